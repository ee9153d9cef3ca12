"""Plays programs on a cluster."""

from simulator.engine.carried import check_routes
from simulator.engine.periods import UnsteadyError
from simulator.engine.placement import Placed, StepSource
from simulator.engine.simulate import PlayedProgram, play_together, simulate, simulate_together

__all__ = [
    "Placed",
    "PlayedProgram",
    "StepSource",
    "UnsteadyError",
    "check_routes",
    "play_together",
    "simulate",
    "simulate_together",
]
