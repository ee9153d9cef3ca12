"""When communication is exposed: the one rule for runs that are recorded and for simulated ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Floats
from simulator.timeline import covered_s


def exposed_s(start_s: Floats, end_s: Floats, communicates: NDArray[np.bool_]) -> float:
    """Seconds in which communication runs and no other kernel does, of the kernels of one rank."""
    computes = ~communicates
    return covered_s(start_s, end_s) - covered_s(start_s[computes], end_s[computes])
