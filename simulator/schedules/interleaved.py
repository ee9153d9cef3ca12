"""Interleaved 1F1B: each rank holds v chunks of the model, so that the bubble shrinks by v."""

from simulator.schedules.actions import Action, Order, Schedule, Slot


def order(p: int, m: int, v: int) -> Order:
    """Rank r runs 2 (p - r - 1) + (v - 1) p forwards (at most m v), then pairs of F and B, then the backwards left.

    Micro-batches pass in rounds of p: each round goes through chunk 0, then chunk 1, and so on.
    """
    return [_rank_order(rank, p, m, v) for rank in range(p)]


def warmup(p: int, m: int, v: int, rank: int) -> int:
    """Forwards of a rank before its steady phase (Megatron-LM, ``get_num_warmup_microbatches``)."""
    return min(2 * (p - rank - 1) + (v - 1) * p, m * v)


def _rank_order(rank: int, p: int, m: int, v: int) -> list[Slot]:
    def action(kind: str, index: int) -> Action:
        round_, within = divmod(index, p * v)
        chunk, microbatch = divmod(within, p)
        if kind == "B":
            chunk = v - 1 - chunk
        return Action(chunk * p + rank, kind, round_ * p + microbatch)

    total, lead = m * v, warmup(p, m, v, rank)
    slots: list[Slot] = [(action("F", i),) for i in range(lead)]
    slots += [(action("F", lead + i), action("B", i)) for i in range(total - lead)]
    slots += [(action("B", i),) for i in range(total - lead, total)]
    return slots


def peak(p: int, m: int, v: int, rank: int) -> int:
    """The warm-up's forwards and the one of the first pair."""
    return min(warmup(p, m, v, rank) + 1, m * v)


def check(p: int, m: int, v: int) -> str | None:
    """Megatron's classic form needs at least two chunks and whole rounds of p micro-batches."""
    if v < 2:
        return f"needs at least 2 chunks per rank, got {v}"
    if m % p:
        near = [n for n in (m // p * p, (m // p + 1) * p) if n > 0]
        return f"needs a multiple of {p} (pipeline ranks) micro-batches, got {m}; nearest: {', '.join(map(str, near))}"
    return None


SCHEDULE = Schedule(
    name="interleaved",
    paper="Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2",
    order=order,
    bubble=lambda p, m, v: (p - 1) / (v * m),
    peak=peak,
    check=check,
    batching="slot",
    chunked=True,
)
