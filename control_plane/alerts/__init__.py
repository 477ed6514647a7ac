"""Alerts: one catalogue, as rules for Prometheus and as what the controller's own evaluator fires."""
