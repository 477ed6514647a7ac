"""A load driver for anything that speaks OpenAI's completions over HTTP: `ingle bench URL`."""
