"""Brings what stands to what was asked: `plan.py` decides, `loop.py` acts."""
