"""The admin HTTP API."""
