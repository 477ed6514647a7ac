"""API keys, admin tokens, the installation secret and certificates."""
