"""Tensor operations of the engine: one reference, several backends, chosen in `dispatch`."""

__version__ = "0.0.0"  # a PyPI package of this name is probed for its version by transformers
