"""What an endpoint would take and cost: accelerators, fit, presets, and traces replayed on the scaler."""
