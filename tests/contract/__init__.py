"""What a client may rely on, asked through the clients themselves."""
