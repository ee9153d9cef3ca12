"""Marks: the state of a play at the beginnings of the periods of a pipeline."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from simulator.arrays import Floats
from simulator.program import COMPUTE_LANE, Repetition, Role, StepPhase

K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class PeriodMark(Generic[K, S]):
    """The state of a play at ``time_s``, when the first rank has come to a step that begins a period.

    ``hosts_s``: by simulated rank, when its host will have issued everything so far.
    ``counts``: how often each communication was made. ``runs``: how often each prepared block was run.
    ``saturated_s``: seconds of each state of a full link.
    """

    time_s: float
    hosts_s: Floats
    counts: Mapping[K, int]
    runs: Sequence[int]
    saturated_s: Mapping[S, float]


def marked_steps(role: Role, repetition: Repetition) -> list[int]:
    """Return the steps of a role's compute lane with which periods begin.

    They are its last forward pass, with which the pipeline begins to drain, and those of the same stage whole periods
    before.
    """
    forward = [
        (index, step) for index, step in enumerate(role.lanes.get(COMPUTE_LANE, ())) if step.phase == StepPhase.FORWARD
    ]
    if not forward:
        return []
    last = forward[-1][1]
    begins: dict[int, int] = {}
    for index, step in forward:
        if step.stage == last.stage:
            begins.setdefault(step.microbatch, index)
    return [index for number, index in begins.items() if (last.microbatch - number) % repetition.microbatches == 0]
