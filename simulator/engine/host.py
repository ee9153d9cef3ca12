"""In which order a host issues what its rank does: it goes through the compute lane, and what runs on lanes of its own
is issued in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

from simulator.cluster import Gpu
from simulator.costs import Costs, launch
from simulator.program import COMPUTE_LANE, Comm, Compute, Role, Step


@dataclass(frozen=True)
class Errand:
    """What the host does before a step of the compute lane: ``issues`` are the seconds of each communication, with its
    label where it follows on computation and so cannot begin before; then ``start_s`` for the step itself."""

    issues: tuple[tuple[str, float], ...]
    start_s: float


class HostSpeeds(NamedTuple):
    """How fast a host issues ops, over the calibrated one: its main thread, and autograd's."""

    main: float
    autograd: float

    def seconds(self, costs: Costs, phase: str, kinds: Mapping[str, int]) -> float:
        """That the host takes for so many of each kind (`simulator.costs.launch`) of a step of this phase."""
        return sum(
            costs.launched_s({kind: n}) / (self.autograd if launch.by_autograd(phase, kind) else self.main)
            for kind, n in kinds.items()
        )

    def issue_s(self, costs: Costs, op: Compute | Comm, phase: str) -> float:
        """That it takes to issue an op of a step of this phase."""
        return self.seconds(costs, phase, launch.issued(op, phase))


def host_speeds(gpu: Gpu) -> HostSpeeds:
    return HostSpeeds(gpu.host_speed, gpu.host_speed * gpu.autograd_speed)


def agenda(role: Role, costs: Costs, speeds: HostSpeeds) -> tuple[Errand, ...]:
    """The errands before each step of the compute lane and after the last."""
    place = _places(role)
    starts = [speeds.seconds(costs, step.phase, kinds) for step, kinds in _started(role)]

    def issue(step: Step, before: int) -> tuple[str, float]:
        issue_s = speeds.issue_s(costs, cast(Comm, step.op), _phase(role, place, step, before))
        return step.label if _follows(step, place) is not None else "", issue_s

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


def issued_by(role: Role) -> Iterator[tuple[str, str, int]]:
    """All that the host issues for a rank: phase of the step, kind (`simulator.costs.launch`), how often."""
    for step, kinds in _started(role):
        for kind, n in kinds.items():
            yield step.phase, kind, n
        for op in launch.ops_of(step):
            for kind, n in launch.issued(op, step.phase).items():
                yield step.phase, kind, n
    place = _places(role)
    for before, steps in enumerate(issue_order(role)):
        for step in steps:
            for kind, n in launch.issued(cast(Comm, step.op)).items():
                yield _phase(role, place, step, before), kind, n


def _phase(role: Role, place: dict[str, int], step: Step, before: int) -> str:
    """Of the pass in which the host issues communication: the one that it follows, as hooks run there, else the one
    that the host is about to issue."""
    compute, behind = role.lanes.get(COMPUTE_LANE, ()), _follows(step, place)
    at = before if behind is None else behind
    return compute[at].phase if at < len(compute) else ""
