"""Breadth-first pipeline: GPipe over v chunks per rank, each chunk with all micro-batches before the next."""

from simulator.schedules.actions import Action, Order, Schedule, filled


def order(p: int, m: int, v: int) -> Order:
    """Each rank: all forwards chunk by chunk, then all backwards, chunks and micro-batches in reverse, as torch's
    ScheduleLoopedBFS runs them."""
    return [
        [
            *((Action(chunk * p + rank, "F", mb),) for chunk in range(v) for mb in range(m)),
            *((Action(chunk * p + rank, "B", mb),) for chunk in reversed(range(v)) for mb in reversed(range(m))),
        ]
        for rank in range(p)
    ]


def check(p: int, m: int, v: int) -> str | None:
    """At least two chunks: with one it is GPipe, backwards in reverse."""
    return f"needs at least 2 chunks per rank, got {v}; with 1 use schedule: gpipe" if v < 2 else None


SCHEDULE = Schedule(
    name="looped_bfs",
    paper="Lamy-Poirier 2023, Breadth-First Pipeline Parallelism, arXiv 2211.05953",
    order=order,
    bubble=lambda p, m, v, f, i, w: filled(p, m, v, f, i, w) if m >= p else None,
    peak=lambda p, m, v, rank: m * v,
    check=check,
    posts_ahead=True,
    chunks=None,
)
