"""Profiler traces of real runs: what is in them, what differs, and what a step would be under other conditions."""
