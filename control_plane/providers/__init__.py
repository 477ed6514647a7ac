"""Where replicas run. `base.py` is the contract."""
