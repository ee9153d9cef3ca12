"""Costs: seconds of a kernel, launch, transport, interference; from a calibration profile, or ideal."""

from simulator.costs.costs import Costs
from simulator.costs.origin import Origin

__all__ = ["Costs", "Origin"]
