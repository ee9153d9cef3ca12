"""The order in which a host issues the ops of its rank, and the seconds that this takes.

The host goes through the compute lane; the communication of other lanes is issued in between.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from simulator.cluster import Gpu
from simulator.costs import Costs, launch
from simulator.program import COMPUTE_LANE, Collective, Comm, Compute, LaneSteps, Role, Step, StepColumns


class HostSpeeds(NamedTuple):
    """How fast a host issues ops, over the calibrated one: its main thread, and autograd's."""

    main: float
    autograd: float

    @classmethod
    def from_gpu(cls, gpu: Gpu) -> HostSpeeds:
        """Read the speeds of the host of ``gpu``."""
        return cls(gpu.host_speed, gpu.host_speed * gpu.autograd_speed)

    def seconds(self, costs: Costs, phase: str, kinds: Mapping[str, int]) -> float:
        """Return the host's seconds for a number of each kind (`simulator.costs.launch`) in a step of this phase."""
        if not kinds:
            return 0.0
        return sum(
            costs.launched_s({kind: n}) / (self.autograd if launch.by_autograd(phase, kind) else self.main)
            for kind, n in kinds.items()
        )

    def issue_s(self, costs: Costs, op: Compute | Comm, phase: str) -> float:
        """Return the seconds to issue one op of a step of this phase."""
        return self.seconds(costs, phase, launch.issued(op, phase))


class HostWork(NamedTuple):
    """Work of the host before a step of the compute lane.

    ``issues`` are the seconds of each communication, with its label where it follows computation and so cannot begin
    before it is issued. Then come ``start_s`` for the step itself.
    """

    issues: tuple[tuple[str, float], ...]
    start_s: float


class EarlierCompute(NamedTuple):
    """The compute lane before an extension: the ``labels`` of its steps, and the ``last`` of them."""

    labels: Container[str]
    last: Step | None


NOTHING_EARLIER = EarlierCompute(frozenset(), None)


def host_work(
    role: Role, costs: Costs, speeds: HostSpeeds, earlier: EarlierCompute = NOTHING_EARLIER
) -> tuple[HostWork, ...]:
    """Return the host's work before each step of the compute lane, and after the last.

    Of an extension ``role`` has only the steps of this; what follows ``earlier`` computation is issued first of them.
    """
    phases = _compute(role).field("phase")
    seconds: dict[tuple[str, int, str], float] = {}
    nothing: dict[float, HostWork] = {}

    def issue(issued: _Issued, before: int) -> tuple[str, float]:
        phase, comm = _phase_of_pass(phases, before, issued.behind, earlier), issued.comm
        key = launch.comm_kind(comm), comm.hooks if isinstance(comm, Collective) else 0, phase
        if key not in seconds:
            seconds[key] = speeds.issue_s(costs, comm, phase)
        return issued.label if issued.behind is not None else "", seconds[key]

    def work(number: int, comms: Sequence[_Issued], start_s: float) -> HostWork:
        if comms:
            return HostWork(tuple([issue(one, number) for one in comms]), start_s)
        if start_s not in nothing:
            nothing[start_s] = HostWork((), start_s)
        return nothing[start_s]

    starts = [*_starts_s(role, costs, speeds, earlier.last), 0.0]
    rows = zip(_issues(role, earlier), starts, strict=True)
    return tuple([work(number, comms, start_s) for number, (comms, start_s) in enumerate(rows)])


def _starts_s(role: Role, costs: Costs, speeds: HostSpeeds, last: Step | None) -> Iterator[float]:
    """Yield the host's seconds at each step of the compute lane beside issuing its ops."""
    seconds: dict[tuple[int, bool], float] = {}
    for step, begins in _compute_steps(role, last):
        key = id(step), begins
        if key not in seconds:
            seconds[key] = speeds.seconds(costs, step.phase, launch.issued_with(step, begins=begins))
        yield seconds[key]


class _Issued(NamedTuple):
    """Communication that the host issues, its label, and the step of the compute lane that it waits for last."""

    label: str
    comm: Comm
    behind: int | None


def issue_order(role: Role, earlier: EarlierCompute = NOTHING_EARLIER) -> tuple[tuple[str, ...], ...]:
    """Return for each step of the compute lane the labels of communication that the host issues right before it.

    One entry more holds what follows the last step. Communication that waits for computation is issued behind it, as by
    a hook that runs when a gradient is there or a layer begins. The rest is issued before the first computation that
    waits for it, or first of all where none does. What waits for ``earlier`` computation only is issued first of all.
    Batches of blocking transfers are not counted.
    """
    return tuple([tuple([issued.label for issued in comms]) for comms in _issues(role, earlier)])


def _issues(role: Role, earlier: EarlierCompute) -> list[list[_Issued]]:
    """Return communication in its `issue_order`."""
    compute = _compute(role)
    positions = {label: index for index, label in enumerate(compute.label)}
    first_waiting: dict[str, int] = {}
    for index, after in enumerate(compute.after):
        for label in after:
            first_waiting.setdefault(label, index)
    order: list[list[_Issued]] = [[] for _ in range(len(compute.label) + 1)]
    for columns in (columns for lane, columns in role.columns.items() if lane != COMPUTE_LANE):
        for number, label, after in zip(columns.prototype, columns.label, columns.after, strict=True):
            op = columns.prototypes[number].op
            if isinstance(op, Comm):
                behind = _last_awaited(after, positions, earlier) if after else None
                place = first_waiting.get(label, 0) if behind is None else behind + 1
                order[place].append(_Issued(label, op, behind))
    return order


def issued_by(role: Role) -> Iterator[tuple[str, str, int]]:
    """Yield all that the host issues for a rank: phase of the step, kind (`simulator.costs.launch`), how often."""
    for step, begins in _compute_steps(role):
        for kind, n in launch.issued_with(step, begins=begins).items():
            yield step.phase, kind, n
        for op in launch.ops_of(step):
            for kind, n in launch.issued(op, step.phase).items():
                yield step.phase, kind, n
    phases = _compute(role).field("phase")
    for before, comms in enumerate(_issues(role, NOTHING_EARLIER)):
        for issued in comms:
            for kind, n in launch.issued(issued.comm).items():
                yield _phase_of_pass(phases, before, issued.behind, NOTHING_EARLIER), kind, n


def _compute(role: Role) -> StepColumns:
    """Return the steps of the compute lane, if there is one."""
    return role.columns.get(COMPUTE_LANE) or LaneSteps.from_steps(()).columns


def _last_awaited(after: Sequence[str], positions: Mapping[str, int], earlier: EarlierCompute) -> int | None:
    """Return the position of the last step of the compute lane that is waited for; -1 for earlier ones."""
    last = None
    for label in after:
        position = positions.get(label, -1)
        if (last is None or position > last) and (position >= 0 or label in earlier.labels):
            last = position
    return last


def _compute_steps(role: Role, last: Step | None = None) -> Iterator[tuple[Step, bool]]:
    """Yield of each step of the compute lane its prototype, and whether it begins a pass; it follows a ``last`` step.

    A pass that is cut, where units are gathered or buckets are full, is several steps of one phase, stage and
    micro-batch.
    """
    compute = _compute(role)
    latest = None if last is None else (last.phase, last.stage, last.microbatch)
    for number, microbatch in zip(compute.prototype, compute.microbatch, strict=True):
        prototype = compute.prototypes[number]
        run = prototype.phase, prototype.stage, microbatch
        yield prototype, latest != run
        latest = run


def _phase_of_pass(phases: Sequence[str], before: int, behind: int | None, earlier: EarlierCompute) -> str:
    """Return the phase of the pass in which the host issues communication.

    It is the pass ``behind`` which it follows, as hooks run there, else the one that the host is about to issue.
    """
    if behind == -1:
        return earlier.last.phase if earlier.last is not None else ""
    at = before if behind is None else behind
    return phases[at] if at < len(phases) else ""
