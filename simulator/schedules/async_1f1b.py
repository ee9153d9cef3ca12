"""PipeDream without flush: 1F1B that goes on from step to step without draining, each rank with the versions of its
weights that its micro-batches under way began with."""

import math

from simulator.schedules.actions import Schedule, one_chunk
from simulator.schedules.one_f_one_b import order


def weight_versions(p: int, m: int, rank: int) -> int:
    """Return the versions of the weights on rank r: the newest, and those of the other micro-batches under way.

    These are p - r - 1. A version is shared by m of them, as gradients of a step's m micro-batches are accumulated
    before the weights change. With m = 1 that is PipeDream's p - r (weight stashing, arXiv 1806.03377, section 3.3).
    With m >= p - 1 it is PipeDream-2BW's two (arXiv 2006.09503, section 3.1).
    """
    return 1 + math.ceil((p - rank - 1) / m)


SCHEDULE = Schedule(
    name="async_1f1b",
    paper="Harlap et al. 2018, PipeDream, arXiv 1806.03377, sections 3.2 and 3.3; accumulation as in arXiv 2006.09503",
    order=order,
    bubble=lambda p, m, v, f, i, w: 0.0,
    peak=lambda p, m, v, rank: p - rank,
    check=one_chunk,
    batching=lambda p, m: "peer",
    steady=True,
    drains=False,
    weight_versions=weight_versions,
)
