"""GPipe: all forwards, then all backwards."""

from simulator.schedules.actions import Action, Order, Schedule, filled, one_chunk


def order(p: int, m: int, v: int = 1) -> Order:
    """Each rank: F0 .. F(m-1) B0 .. B(m-1), as torch's ScheduleGPipe runs them."""
    return [[(Action(rank, kind, mb),) for kind in "FB" for mb in range(m)] for rank in range(p)]


SCHEDULE = Schedule(
    name="gpipe",
    paper="Huang et al. 2019, GPipe, arXiv 1811.06965",
    order=order,
    bubble=filled,
    peak=lambda p, m, v, rank: m,
    check=one_chunk,
    batching=lambda p, m: "peer",
)
