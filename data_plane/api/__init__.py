"""OpenAI's routes over HTTP, and the replica's own: health, metrics, drain."""
