"""Costs: seconds of a kernel, launch, transport, interference; from a calibration profile, or ideal."""

from simulator.costs.costs import Costs
from simulator.costs.origin import Origin
from simulator.costs.recent import recent_costs

__all__ = ["Costs", "Origin", "recent_costs"]
