"""Plays programs on a cluster."""

from simulator.engine.placement import Placed
from simulator.engine.simulate import simulate, simulate_together

__all__ = ["Placed", "simulate", "simulate_together"]
