"""DualPipe: every stage on two ranks, micro-batches fed from both ends, so that the two directions fill each other's
bubbles."""

from simulator.schedules.actions import Action, Order, Schedule, in_a_v
from simulator.schedules.dualpipe_v import idle, phases


def order(p: int, m: int, v: int = 1) -> Order:
    """Run DualPipeV's phases on both halves of the pipeline, each with its own direction as chunk 0.

    Micro-batches 0 .. m/2 - 1 go through stages 0 .. p - 1 of the first copy, from rank 0 on. The others go through
    stages p .. 2p - 1 of the second, from rank p - 1 on.
    """
    ranks = []
    for rank in range(p):
        near = min(rank, p - 1 - rank)
        stages = (rank, 2 * p - 1 - rank) if rank == near else (2 * p - 1 - rank, rank)
        ranks.append(
            [
                tuple(
                    Action(stages[chunk], kind, mb + (m // 2 if stages[chunk] >= p else 0)) for chunk, kind, mb in slot
                )
                for slot in phases(near, p // 2, m // 2)
            ]
        )
    return ranks


def check(p: int, m: int, v: int) -> str | None:
    """Ranks and micro-batches in pairs, and twice as many micro-batches as ranks."""
    if p % 2:
        return f"needs an even number of pipeline ranks, got {p}"
    if m < 2 * p or m % 2:
        return f"needs an even number of at least {2 * p} micro-batches (2 pp, both directions), got {m}"
    return None if v == 1 else f"needs 1 chunk per rank, got {v}"


SCHEDULE = Schedule(
    name="dualpipe",
    paper="DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437, section 3.2.1; github.com/deepseek-ai/DualPipe",
    order=order,
    bubble=lambda p, m, v, f, i, w: idle(p, f, i, w) / (m * (f + i + w)),
    peak=lambda p, m, v, rank: p + 1,
    check=check,
    rank_of=in_a_v,
    splits=True,
    joined=True,
    copies=2,
)
