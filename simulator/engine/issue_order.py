"""The order in which a host issues the ops of its rank, and the seconds that this takes.

The host goes through the compute lane; the communication of other lanes is issued in between.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, cast

from simulator.cluster import Gpu
from simulator.costs import Costs, launch
from simulator.program import COMPUTE_LANE, Collective, Comm, Compute, Role, Step


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
    compute, positions = role.lanes.get(COMPUTE_LANE, ()), _compute_positions(role)
    seconds: dict[tuple[str, int, str], float] = {}
    nothing: dict[float, HostWork] = {}

    def issue(step: Step, behind: int | None, before: int) -> tuple[str, float]:
        phase = _phase_of_pass(compute, before, behind, earlier)
        comm = cast(Comm, step.op)
        key = launch.comm_kind(comm), comm.hooks if isinstance(comm, Collective) else 0, phase
        if key not in seconds:
            seconds[key] = speeds.issue_s(costs, comm, phase)
        return step.label if behind is not None else "", seconds[key]

    def work(number: int, steps: Sequence[tuple[Step, int | None]], start_s: float) -> HostWork:
        if steps:
            return HostWork(tuple([issue(step, behind, number) for step, behind in steps]), start_s)
        if start_s not in nothing:
            nothing[start_s] = HostWork((), start_s)
        return nothing[start_s]

    starts = [*_starts_s(role, costs, speeds, earlier.last), 0.0]
    rows = zip(_issues(role, positions, earlier), starts, strict=True)
    return tuple([work(number, steps, start_s) for number, (steps, start_s) in enumerate(rows)])


def _starts_s(role: Role, costs: Costs, speeds: HostSpeeds, last: Step | None) -> Iterator[float]:
    """Yield the host's seconds at each step of the compute lane beside issuing its ops; see `_ComputeStep`."""
    seconds: dict[tuple[str, bool, int, int], float] = {}
    for step, begins, products in _compute_steps(role, last):
        key = step.phase, begins, products, step.hooks
        if key not in seconds:
            kinds = launch.issued_with(step, begins=begins, products=products)
            seconds[key] = speeds.seconds(costs, step.phase, kinds)
        yield seconds[key]


def issue_order(role: Role, earlier: EarlierCompute = NOTHING_EARLIER) -> tuple[tuple[Step, ...], ...]:
    """Return for each step of the compute lane the communication that the host issues right before it.

    One entry more holds what follows the last step. Communication that waits for computation is issued behind it, as by
    a hook that runs when a gradient is there or a layer begins. The rest is issued before the first computation that
    waits for it, or first of all where none does. What waits for ``earlier`` computation only is issued first of all.
    Batches of blocking transfers are not counted.
    """
    return tuple([tuple([step for step, _ in steps]) for steps in _issues(role, _compute_positions(role), earlier)])


def _issues(role: Role, positions: Mapping[str, int], earlier: EarlierCompute) -> list[list[tuple[Step, int | None]]]:
    """Return communication in its `issue_order`, each with the step of the compute lane that it waits for last."""
    compute = role.lanes.get(COMPUTE_LANE, ())
    first_waiting: dict[str, int] = {}
    for index, step in enumerate(compute):
        for label in step.after:
            first_waiting.setdefault(label, index)
    order: list[list[tuple[Step, int | None]]] = [[] for _ in range(len(compute) + 1)]
    for step in chain.from_iterable(steps for lane, steps in role.lanes.items() if lane != COMPUTE_LANE):
        if isinstance(step.op, Comm):
            behind = _last_awaited(step, positions, earlier) if step.after else None
            place = first_waiting.get(step.label, 0) if behind is None else behind + 1
            order[place].append((step, behind))
    return order


def issued_by(role: Role) -> Iterator[tuple[str, str, int]]:
    """Yield all that the host issues for a rank: phase of the step, kind (`simulator.costs.launch`), how often."""
    for step, begins, products in _compute_steps(role):
        for kind, n in launch.issued_with(step, begins=begins, products=products).items():
            yield step.phase, kind, n
        for op in launch.ops_of(step):
            for kind, n in launch.issued(op, step.phase).items():
                yield step.phase, kind, n
    compute, positions = role.lanes.get(COMPUTE_LANE, ()), _compute_positions(role)
    for before, steps in enumerate(_issues(role, positions, NOTHING_EARLIER)):
        for step, behind in steps:
            for kind, n in launch.issued(cast(Comm, step.op)).items():
                yield _phase_of_pass(compute, before, behind, NOTHING_EARLIER), kind, n


def _compute_positions(role: Role) -> dict[str, int]:
    """Return the position of each step of the compute lane, by label."""
    return {step.label: index for index, step in enumerate(role.lanes.get(COMPUTE_LANE, ()))}


def _last_awaited(step: Step, positions: Mapping[str, int], earlier: EarlierCompute) -> int | None:
    """Return the position of the last step of the compute lane that ``step`` waits for; -1 for earlier ones."""
    last = None
    for label in step.after:
        position = positions.get(label, -1)
        if (last is None or position > last) and (position >= 0 or label in earlier.labels):
            last = position
    return last


class _ComputeStep(NamedTuple):
    """A step of the compute lane, and what the host does at it beside issuing its ops.

    ``begins``: it begins a pass. A pass that is cut, where units are gathered or buckets are full, is several steps of
    one phase, stage and micro-batch. ``products``: those that the host looks at to cut graphs.
    """

    step: Step
    begins: bool
    products: int


def _compute_steps(role: Role, last: Step | None = None) -> Iterator[_ComputeStep]:
    """Yield the steps of the compute lane, which follows a ``last`` step, if any."""
    products: dict[int, int] = {}  # of a block, which many steps run
    latest = None if last is None else (last.phase, last.stage, last.microbatch)
    for step in role.lanes.get(COMPUTE_LANE, ()):
        phase = step.phase
        if phase == "I" and id(step.op) not in products:
            products[id(step.op)] = launch.products_of(step)
        run = phase, step.stage, step.microbatch
        yield _ComputeStep(step, latest != run, products[id(step.op)] if phase == "I" else 0)
        latest = run


def _phase_of_pass(compute: Sequence[Step], before: int, behind: int | None, earlier: EarlierCompute) -> str:
    """Return the phase of the pass in which the host issues communication.

    It is the pass ``behind`` which it follows, as hooks run there, else the one that the host is about to issue.
    """
    if behind == -1:
        return earlier.last.phase if earlier.last is not None else ""
    at = before if behind is None else behind
    return compute[at].phase if at < len(compute) else ""
