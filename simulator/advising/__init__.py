"""Advice on speed: changes of a job, each simulated, and the ones that help most."""
