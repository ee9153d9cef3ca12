"""Naive model parallelism: one micro-batch at a time passes forward and back through all stages."""

from simulator.schedules.actions import Action, Order, Schedule, one_chunk


def order(p: int, m: int, v: int = 1) -> Order:
    """Each rank: F0 B0 F1 B1 ..."""
    return [[(Action(rank, kind, mb),) for mb in range(m) for kind in "FB"] for rank in range(p)]


SCHEDULE = Schedule(
    name="naive",
    paper="Huang et al. 2019, GPipe, arXiv 1811.06965, figure 2b",
    order=order,
    bubble=lambda p, m, v, f, i, w: float(p - 1),  # one rank of p works at any time
    peak=lambda p, m, v, rank: 1,
    check=one_chunk,
    batching=lambda p, m: "peer",
)
