"""Simulated beside measured: the same figures of both, a table, pictures."""
