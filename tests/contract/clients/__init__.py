"""OpenAI clients of many makers, unmodified, each in an environment of its own: `make clients`."""
