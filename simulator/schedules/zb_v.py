"""ZB-V: two chunks per rank in a V, so that a micro-batch begins and ends on rank 0; the memory of 1F1B."""

from simulator.schedules.actions import Action, Order, Schedule, in_a_v, two_chunks


def order(p: int, m: int, v: int = 2) -> Order:
    """Follow torch's ScheduleZBVZeroBubble: the pattern needs 2p - 1 micro-batches; missing ones are left out."""
    return [
        [(action,) for action in _rank_order(rank, p, max(m, 2 * p - 1)) if action.microbatch < m] for rank in range(p)
    ]


def _rank_order(rank: int, p: int, m: int) -> list[Action]:
    """One rank's actions by phase, as chunk and kind; micro-batches count up for each."""
    fill = ["0F"] * (2 * (p - rank) - 1) + ["1F", "0F"] * rank + ["1F", "1I", "1W"] * (p - rank)
    warm = fill.count("0F")
    steady = ["0F", "0I", "0W", "1F", "1I", "1W"] * (m - warm)
    # Forwards of chunk 1 that chunk 0 is ahead by when its own have ended.
    ahead = warm - fill.count("1F")
    late = ["0I", "0W", "1F", "1I", "1W"] * ahead
    drain = ["0I", "1I"] * rank + ["0I", "0W"] * (p - rank)
    drain += ["1W"] * rank + ["0W"] * rank
    counts: dict[str, int] = {}
    actions = []
    for text in [*fill, *steady, *late, *drain]:
        counts[text] = counts.get(text, -1) + 1
        actions.append(Action(rank if text[0] == "0" else 2 * p - 1 - rank, text[1], counts[text]))
    return actions


SCHEDULE = Schedule(
    name="zb_v",
    paper="Qi et al. 2023, arXiv 2401.10241, section 6; Qi et al. 2024, arXiv 2405.15362",
    order=order,
    bubble=lambda p, m, v, f, i, w: 0.0 if m >= 2 * p - 1 else None,
    peak=lambda p, m, v, rank: 2 * p if m >= 2 * p - 1 else None,
    check=two_chunks,
    rank_of=in_a_v,
    posts_ahead=True,
    chunks=2,
    splits=True,
    steady=True,
)
