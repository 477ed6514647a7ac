"""Backups: all that an installation needs to come back, in one file that nobody opens without the keyring."""
