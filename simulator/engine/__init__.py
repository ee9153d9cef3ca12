"""Plays a program on a cluster."""

from simulator.engine.simulate import simulate

__all__ = ["simulate"]
