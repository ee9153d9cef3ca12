"""Marks: the state of a play at the beginnings of the periods of a pipeline."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Generic, TypeVar

from simulator.arrays import Floats
from simulator.program import COMPUTE_LANE, Repetition, Role, Step, StepPhase

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


def marked_steps(role: Role, repetition: Repetition) -> list[list[int]]:
    """Return for each training step the steps of a role's compute lane with which periods begin.

    They are its last forward pass, with which the pipeline begins to drain, and those of the same stage whole periods
    before.
    """
    compute = role.lanes.get(COMPUTE_LANE, ())
    length = len(compute) // repetition.steps
    return [
        _period_begins(compute, range(first * length, (first + 1) * length), repetition.microbatches)
        for first in range(repetition.steps)
    ]


def _period_begins(compute: Sequence[Step], indices: Iterable[int], microbatches: int) -> list[int]:
    forward = [(index, compute[index]) for index in indices if compute[index].phase == StepPhase.FORWARD]
    if not forward:
        return []
    last = forward[-1][1]
    begins: dict[int, int] = {}
    for index, step in forward:
        if step.stage == last.stage:
            begins.setdefault(step.microbatch, index)
    return [index for number, index in begins.items() if (last.microbatch - number) % microbatches == 0]


class Marks(Generic[K, S]):
    """The marks that a play puts, in their order, at ``marked`` steps of a lane: a list for each training step."""

    def __init__(self, marked: Sequence[Sequence[int]]) -> None:
        self._ends = list(accumulate(map(len, marked)))
        self.steps = list(chain.from_iterable(marked))
        self._marks: list[PeriodMark[K, S]] = []

    def put(self, mark: PeriodMark[K, S]) -> None:
        """Add a mark."""
        self._marks.append(mark)

    def at_ended_step(self) -> Sequence[PeriodMark[K, S]]:
        """Return the marks of the training step that the last mark ends; none where more of its marks are to come."""
        return self.by_training_step()[self._ends.index(len(self._marks))] if len(self._marks) in self._ends else ()

    def by_training_step(self) -> list[Sequence[PeriodMark[K, S]]]:
        """Return the marks of each training step."""
        return [self._marks[first:end] for first, end in pairwise([0, *self._ends])]
