"""Uneven loads of experts: whether a job that fits while they are even still fits with a rank that receives more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulator.analysis.training.advice import few_rounds
from simulator.analysis.training.memory import RankMemory, fullest
from simulator.config import Workload, altered
from simulator.units import format_gib

#: Times its even share of tokens that one rank is taken to receive, where it can receive as many. Examples of a peak,
#: not measured ones: the first that does not fit says how near the job is.
TIMES = (2.0, 3.0)
#: Share of a GPU's memory. Where more is free, uneven loads are not tried, as each costs another simulation. A choice.
NEARLY_FULL = 0.1


def uneven_experts_warning(
    memories: Sequence[RankMemory], workload: Workload, needed_bytes: Callable[[Workload], float]
) -> list[str]:
    """Return a warning where a job that fits does not, once one rank receives more than its share of tokens.

    ``needed_bytes``: device memory of a job's fullest rank. Only jobs whose experts are on several ranks (``ep``) have
    such peaks. Not tried are experts that drop what exceeds their capacity, and those with redundant copies, which even
    out loads. Nor is a job whose ``token_distribution`` says how uneven they are.
    """
    worst = fullest(memories)
    if not 0 <= worst.capacity - worst.total < NEARLY_FULL * worst.capacity or not _takes_all_tokens(workload):
        return []
    for times in _possible_times(workload):
        needed = needed_bytes(few_rounds(altered(workload, _uneven(workload, times))))
        if needed > worst.capacity:
            return [
                f"fits while the loads of experts are even: with one rank that receives {times:.3g} times its share of "
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


def _possible_times(workload: Workload) -> list[float]:
    """Return `TIMES`, ascending, none more than a rank can receive: all tokens, or each token once by every expert."""
    moe = workload.model.moe
    assert moe is not None
    most = min(workload.parallelism.ep, moe.experts / moe.top_k)
    return sorted({min(times, most) for times in TIMES} - {1.0})


def _uneven(workload: Workload, times: float) -> dict[str, list[float]]:
    """Return the setting in which the first rank's experts get so many times their share."""
    moe = workload.model.moe
    assert moe is not None
    first = moe.experts // workload.parallelism.ep
    share = times / moe.experts
    rest = (1 - first * share) / (moe.experts - first)
    return {"model.moe.token_distribution": [share] * first + [rest] * (moe.experts - first)}
