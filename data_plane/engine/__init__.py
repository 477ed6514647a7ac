"""The engine: one loop in a process of its own that turns waiting requests into tokens, a step at a time."""
