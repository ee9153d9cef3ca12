"""1F1B (PipeDream-Flush): after a warm-up, one forward and one backward in turn, so that few activations are held."""

from simulator.schedules.actions import Action, Order, Schedule, Slot, filled, one_chunk


def order(p: int, m: int, v: int = 1) -> Order:
    """Rank r runs min(p - r - 1, m) forwards, then F and B in turn, then the backwards that are left."""
    return [_rank_order(rank, min(p - rank - 1, m), m) for rank in range(p)]


def _rank_order(rank: int, warmup: int, m: int) -> list[Slot]:
    slots: list[Slot] = [(Action(rank, "F", mb),) for mb in range(warmup)]
    for mb in range(m - warmup):
        slots += [(Action(rank, "F", warmup + mb),), (Action(rank, "B", mb),)]
    return slots + [(Action(rank, "B", mb),) for mb in range(m - warmup, m)]


SCHEDULE = Schedule(
    name="1f1b",
    paper="Narayanan et al. 2021, arXiv 2006.09503 (PipeDream-Flush) and 2104.04473, section 2.2.1",
    order=order,
    bubble=filled,
    peak=lambda p, m, v, rank: min(m, p - rank),
    check=one_chunk,
    batching=lambda p, m: "peer",
)
