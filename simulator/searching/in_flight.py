"""The fullest moment of each rank of a pipeline, by the order of its passes alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from simulator.config.pipelines import find_schedule
from simulator.schedules import Action, Schedule, Slot

#: More passes of a rank than this are not looked at one by one.
_MOST_PASSES = 4_000


@dataclass(frozen=True)
class FullestMoment:
    """The moment between two passes of a rank at which it holds most micro-batch chunks.

    ``waiting``: stage -> chunks that wait for their backward pass, or input gradient. ``split``: stage -> chunks that
    wait for their weight gradient. ``following``: stage and kind of the pass that comes next; None: there is none.
    """

    waiting: tuple[tuple[int, int], ...]
    split: tuple[tuple[int, int], ...] = ()
    following: tuple[int, str] | None = None


@lru_cache(maxsize=4096)
def fullest_moments(schedule: str, p: int, m: int, v: int) -> tuple[FullestMoment, ...]:
    """Return a moment of every rank of a pipeline of ``p`` ranks, ``m`` micro-batches and ``v`` chunks per rank.

    A rank's passes run in the order of the schedule whatever they take, so that the moment comes in every step. Where
    the order depends on times, or is long, each rank has one micro-batch in all of its stages. That is so once the last
    stage has run the first one forward, before any backward pass.
    """
    plan = find_schedule(schedule)
    m = _fewest_alike(plan, p, m, v)
    if plan.search is None and 2 * m * v <= _MOST_PASSES:
        return tuple(_fullest(slots) for slots in plan.order(p, m, v))
    return tuple(FullestMoment(tuple((stage, 1) for stage in _one_copy(plan, p, v, rank))) for rank in range(p))


def _fewest_alike(plan: Schedule, p: int, m: int, v: int) -> int:
    """Return so few micro-batches that ranks hold as many chunks of them at most, by the claim of the schedule."""
    few = 2 * p + m % p
    if few >= m or plan.check(p, few, v) is not None:
        return m
    claims = [(plan.peak(p, few, v, rank), plan.peak(p, m, v, rank)) for rank in range(p)]
    return few if all(some is not None and some == all_ for some, all_ in claims) else m


def _one_copy(plan: Schedule, p: int, v: int, rank: int) -> list[int]:
    return [stage for stage in range(p * v) if plan.rank_of(stage, p) == rank]


def _fullest(slots: list[Slot]) -> FullestMoment:
    actions = [action for slot in slots for action in slot]
    chunks = most = fullest = 0
    for number, action in enumerate(actions):
        chunks += (action.kind == "F") - (action.kind in "BW")
        if chunks > most:
            most, fullest = chunks, number
    waiting: dict[int, int] = {}
    split: dict[int, int] = {}
    for action in actions[: fullest + 1]:
        _count(action, waiting, split)
    after = actions[fullest + 1] if fullest + 1 < len(actions) else None
    return FullestMoment(
        tuple(waiting.items()), tuple(split.items()), None if after is None else (after.stage, after.kind)
    )


def _count(action: Action, waiting: dict[int, int], split: dict[int, int]) -> None:
    """Count a pass that has run."""
    stage, kind = action.stage, action.kind
    if kind == "F":
        waiting[stage] = waiting.get(stage, 0) + 1
    elif kind in "BI":
        waiting[stage] -= 1
        split[stage] = split.get(stage, 0) + (kind == "I")
    else:
        split[stage] -= 1
