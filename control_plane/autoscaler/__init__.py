"""How many replicas each endpoint should have: `decide.py` decides, `loop.py` acts."""
