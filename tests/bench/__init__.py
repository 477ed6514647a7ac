"""Benchmarks: figures side by side in one run. Nothing here asserts a time."""
