"""Uneven loads of experts: whether a job that fits while they are even still fits with a rank that receives more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulator.analysis.training.advice import few_rounds
from simulator.analysis.training.memory import RankMemory, fullest
from simulator.config import Workload, altered
from simulator.units import format_gib

#: Times its even share of tokens that one rank is taken to receive, tried in this order.
TIMES = (2.0, 3.0)
#: Share of a GPU's memory. Where more is free, uneven loads are not tried.
NEARLY_FULL = 0.1


def uneven_experts_warning(
    memories: Sequence[RankMemory], workload: Workload, needed_bytes: Callable[[Workload], float]
) -> list[str]:
    """Return a warning where a job that fits does not, once one rank receives more than its share of tokens.

    ``needed_bytes``: device memory of a job's fullest rank. Experts that drop what exceeds their capacity have no such
    peaks, nor has a job whose ``token_distribution`` says how uneven they are.
    """
    worst = fullest(memories)
    if not 0 <= worst.capacity - worst.total < NEARLY_FULL * worst.capacity or not _takes_all_tokens(workload):
        return []
    for times in (times for times in TIMES if times <= workload.parallelism.ep):
        needed = needed_bytes(few_rounds(altered(workload, _uneven(workload, times))))
        if needed > worst.capacity:
            return [
                f"fits while the loads of experts are even: with one rank that receives {times:g} times its share of "
                f"tokens it takes {format_gib(needed)} of {format_gib(worst.capacity)}. Routers are uneven at first "
                f"(see model.moe.token_distribution)"
            ]
    return []


def _takes_all_tokens(workload: Workload) -> bool:
    """Tell whether ranks work on as many tokens as routers send, taken to be even."""
    moe = workload.model.moe
    return (
        moe is not None
        and workload.parallelism.ep > 1
        and moe.capacity_factor is None
        and moe.redundant_experts == 0
        and moe.token_distribution == "balanced"
    )


def _uneven(workload: Workload, times: float) -> dict[str, list[float]]:
    """Return the setting in which the first rank's experts get so many times their share, or all that they can."""
    moe = workload.model.moe
    assert moe is not None
    first = moe.experts // workload.parallelism.ep
    share = min(times / moe.experts, 1 / moe.top_k, 1 / first)
    rest = (1 - first * share) / (moe.experts - first)
    return {"model.moe.token_distribution": [share] * first + [rest] * (moe.experts - first)}
