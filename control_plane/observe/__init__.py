"""Telemetry: structured logs, metrics, traces."""
