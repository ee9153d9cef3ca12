"""Interleaved 1F1B: each rank holds v chunks of the model, so that the bubble shrinks by v."""

from simulator.schedules.actions import Action, Order, Schedule, Slot, filled


def order(p: int, m: int, v: int) -> Order:
    """Rank r runs its warm-up of forwards, then pairs of F and B, then the backwards left.

    Micro-batches pass in rounds: each round goes through chunk 0, then chunk 1, and so on.
    """
    return [_rank_order(rank, p, m, v) for rank in range(p)]


def rounds(p: int, m: int) -> int:
    """Return the number of rounds of equally many micro-batches.

    A round is of p where p divides m, as in Megatron-LM, and of at least p in torch's flexible form. There is one where
    m is smaller than p."""
    return max(1, m // p)


def warmup(p: int, m: int, v: int, rank: int) -> int:
    """Forwards of a rank before its steady phase (Megatron-LM, ``get_num_warmup_microbatches``)."""
    return min(2 * (p - rank - 1) + (v - 1) * (m // rounds(p, m)), m * v)


def chunk_actions(kind: str, rank: int, p: int, m: int, v: int) -> list[Action]:
    """Return the forwards of a rank in their order, or (any other kind) its backwards."""
    per_round = m // rounds(p, m)
    chunks = range(v) if kind == "F" else range(v - 1, -1, -1)
    return [
        Action(chunk * p + rank, kind, microbatch)
        for first in range(0, m, per_round)
        for chunk in chunks
        for microbatch in range(first, first + per_round)
    ]


def _rank_order(rank: int, p: int, m: int, v: int) -> list[Slot]:
    forwards, backwards = (chunk_actions(kind, rank, p, m, v) for kind in "FB")
    lead = warmup(p, m, v, rank)
    slots: list[Slot] = [(action,) for action in forwards[:lead]]
    slots += zip(forwards[lead:], backwards, strict=False)
    slots += [(action,) for action in backwards[len(forwards) - lead :]]
    return slots


def peak(p: int, m: int, v: int, rank: int) -> int:
    """The warm-up's forwards and the one of the first pair."""
    return min(warmup(p, m, v, rank) + 1, m * v)


def whole_rounds(p: int, m: int, v: int) -> str | None:
    """The check of what runs in rounds: m must be a multiple of max(1, m // p)."""
    n = rounds(p, m)
    if m % n == 0:
        return None
    near = [other for other in (*range(m - 1, 0, -1), *range(m + 1, 2 * m + p)) if other % rounds(p, other) == 0]
    near = sorted([next(n for n in near if n < m), next(n for n in near if n > m)])
    return (
        f"runs {n} rounds of at least {p} (pipeline ranks) micro-batches, which do not share {m} evenly; "
        f"nearest: {', '.join(map(str, near))}, or any multiple of {p}"
    )


def check(p: int, m: int, v: int) -> str | None:
    """At least two chunks, and whole rounds."""
    return f"needs at least 2 chunks per rank, got {v}" if v < 2 else whole_rounds(p, m, v)


SCHEDULE = Schedule(
    name="interleaved",
    paper="Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2; rounds as torch's ScheduleInterleaved1F1B",
    order=order,
    bubble=lambda p, m, v, f, i, w: filled(p, m, v, f, i, w) if m >= p else None,
    peak=peak,
    check=check,
    batching=lambda p, m: "single" if m % p else "slot",  # Megatron-LM has whole rounds of p only
    posts_ahead=True,
    chunks=None,
)
