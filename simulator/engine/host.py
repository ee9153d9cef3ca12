"""What a host does at each step of its rank, in the order in which it issues (`simulator.program.issue`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from simulator.costs import Costs, launch
from simulator.program import Comm, Role, Step
from simulator.program.issue import follows, issue_order
from simulator.program.ops import COMPUTE_LANE


@dataclass(frozen=True)
class Errand:
    """What the host does before a step of the compute lane: ``issues`` are the seconds of each communication, with its
    label where it follows on computation and so cannot begin before; then ``start_s`` for the step itself."""

    issues: tuple[tuple[str, float], ...]
    start_s: float


def agenda(role: Role, costs: Costs, speed: float) -> tuple[Errand, ...]:
    """The errands before each step of the compute lane and after the last; ``speed``: over the calibrated host's."""
    behind = follows(role.lanes)
    starts = [costs.launched_s(kinds) / speed for _, kinds in _started(role)]
    return tuple(
        Errand(
            tuple(
                (step.label if behind[step.label] is not None else "", costs.launch_s(cast(Comm, step.op)) / speed)
                for step in steps
            ),
            start_s,
        )
        for steps, start_s in zip(issue_order(role.lanes), [*starts, 0.0], strict=True)
    )


def _started(role: Role) -> Iterator[tuple[Step, dict[str, int]]]:
    """The compute lane's steps, and what the host does at each beside its ops. A pass that is cut, where units are
    gathered or buckets are full, is several steps of one phase, stage and micro-batch."""
    for before, step in pairwise((None, *role.lanes.get(COMPUTE_LANE, ()))):
        assert step is not None
        begins = before is None or _pass(before) != _pass(step)
        yield step, launch.issued_with(step, begins=begins)


def _pass(step: Step) -> tuple[str, int, int]:
    return step.phase, step.stage, step.microbatch


def issued_by(role: Role) -> Iterator[tuple[str, int]]:
    """All that the host issues for a rank, kind by kind (`simulator.costs.launch`), and how often."""
    for step, kinds in _started(role):
        yield from kinds.items()
        for op in launch.ops_of(step):
            yield launch.issued(op), 1
    for steps in issue_order(role.lanes):
        for step in steps:
            yield launch.issued(cast(Comm, step.op)), 1
