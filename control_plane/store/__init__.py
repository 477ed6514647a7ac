"""Rows, sessions, every query, leases. No SQL stands anywhere else."""
