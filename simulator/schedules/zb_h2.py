"""ZB-H2: more forwards before the first backward, and weight gradients left for the end.

Ranks thus idle neither in a step nor between steps. It takes about twice the memory of 1F1B.
"""

from simulator.schedules.actions import Action, Order, Schedule, one_chunk


def order(p: int, m: int, v: int = 1) -> Order:
    """The pattern needs 2p - 1 micro-batches, of which missing ones are left out."""
    return [
        [(action,) for action in _rank_order(rank, p, max(m, 2 * p - 1)) if action.microbatch < m] for rank in range(p)
    ]


def _rank_order(rank: int, p: int, m: int) -> list[Action]:
    """One rank's actions by phase; micro-batches count up for each kind.

    With F = I = W = 1 rank r starts at r, and the gradient of micro-batch 0 is back at 2p - 1 - r. So 2 (p - r) - 1
    forwards fit before it. Then the last rank runs I, W and F in turn, and for the last 2p - 1 micro-batches I and F
    alone. The other ranks' last I then come as early as rank 0 needs them to end at 3m.
    """
    lead = 2 * (p - rank) - 1
    pattern = ["F"] * lead + ["I", "W", "F"] * (m - 2 * p + 1) + ["I", "F"] * (2 * rank)
    pattern += ["I", "W"] * lead + ["W"] * (2 * rank)
    counts = {"F": -1, "I": -1, "W": -1}
    actions = []
    for kind in pattern:
        counts[kind] += 1
        actions.append(Action(rank, kind, counts[kind]))
    return actions


SCHEDULE = Schedule(
    name="zb_h2",
    paper="Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.2",
    order=order,
    bubble=lambda p, m, v, f, i, w: 0.0 if m >= 2 * p - 1 else None,
    peak=lambda p, m, v, rank: 2 * p - 1 if m >= 2 * p - 1 else None,
    check=one_chunk,
    splits=True,
    steady=True,
)
