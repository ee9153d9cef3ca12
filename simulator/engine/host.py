"""In which order a host issues what its rank does: it goes through the compute lane, and what runs on lanes of its own
is issued in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

from simulator.cluster import Gpu
from simulator.costs import Costs, launch
from simulator.program import Comm, Role, Step
from simulator.program.ops import COMPUTE_LANE

#: Passes that autograd's thread issues.
BACKWARD = ("B", "I", "W")


@dataclass(frozen=True)
class Errand:
    """What the host does before a step of the compute lane: ``issues`` are the seconds of each communication, with its
    label where it follows on computation and so cannot begin before; then ``start_s`` for the step itself."""

    issues: tuple[tuple[str, float], ...]
    start_s: float


class HostSpeeds(NamedTuple):
    """How fast a host issues ops, over the calibrated one: its main thread, and autograd's, which issues what belongs
    to backward passes (torch/csrc/autograd/engine.cpp: a thread per device)."""

    main: float
    autograd: float

    def of(self, phase: str, kind: str = "") -> float:
        """In a pass of this phase, for what ``kind`` is (`simulator.costs.launch`); what is run again belongs to the
        backward pass that needs it."""
        return self.autograd if phase in BACKWARD and kind not in launch.BY_MAIN_THREAD else self.main


def host_speeds(gpu: Gpu) -> HostSpeeds:
    return HostSpeeds(gpu.host_speed, gpu.host_speed * gpu.autograd_speed)


def agenda(role: Role, costs: Costs, speeds: HostSpeeds) -> tuple[Errand, ...]:
    """The errands before each step of the compute lane and after the last."""
    compute, place = role.lanes.get(COMPUTE_LANE, ()), _places(role)
    starts = [
        sum(costs.launched_s({kind: n}) / speeds.of(step.phase, kind) for kind, n in kinds.items())
        for step, kinds in _started(role)
    ]

    def issue(step: Step, before: int) -> tuple[str, float]:
        comm, behind = cast(Comm, step.op), _follows(step, place)
        at = before if behind is None else behind
        phase = compute[at].phase if at < len(compute) else ""  # hooks run where the pass does
        return step.label if behind is not None else "", costs.launch_s(comm) / speeds.of(phase, launch.issued(comm))

    return tuple(
        Errand(tuple(issue(step, number) for step in steps), start_s)
        for number, (steps, start_s) in enumerate(zip(issue_order(role), [*starts, 0.0], strict=True))
    )


def issue_order(role: Role) -> tuple[tuple[Step, ...], ...]:
    """Per step of the compute lane, the communication that the host issues right before it, and one entry more for
    what follows the last.

    Communication that waits for computation is issued behind it, as by a hook that runs when a gradient is there or a
    layer begins. What waits for none is issued before the first computation that waits for it; what nobody waits for,
    first. Batches of blocking transfers are not counted.
    """
    compute = role.lanes.get(COMPUTE_LANE, ())
    place = _places(role)
    needed: dict[str, int] = {}
    for index, step in enumerate(compute):
        for label in step.after:
            needed.setdefault(label, index)
    order: list[list[Step]] = [[] for _ in range(len(compute) + 1)]
    for lane, _, step in role.steps():
        if lane != COMPUTE_LANE and isinstance(step.op, Comm):
            behind = _follows(step, place)
            order[needed.get(step.label, 0) if behind is None else behind + 1].append(step)
    return tuple(map(tuple, order))


def _follows(step: Step, place: dict[str, int]) -> int | None:
    """The last step of the compute lane (label -> ``place``) that ``step`` waits for."""
    return max((place[label] for label in step.after if label in place), default=None)


def _places(role: Role) -> dict[str, int]:
    return {step.label: index for index, step in enumerate(role.lanes.get(COMPUTE_LANE, ()))}


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
    for steps in issue_order(role):
        for step in steps:
            yield launch.issued(cast(Comm, step.op)), 1
