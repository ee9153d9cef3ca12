"""Advice on speed: single changes of a job, each simulated, and the ones that help most."""
