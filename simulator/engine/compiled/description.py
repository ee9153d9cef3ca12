"""Programs as arrays of numbers, as the compiled event loop reads them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Floats, Ints
from simulator.costs import Costs
from simulator.engine.compiled.library import RUN_BATCH, RUN_BLOCK, RUN_COMM, STEP, TAGGED_COMM, CommKindRecord
from simulator.engine.growth import HostType, host_type
from simulator.engine.issue_order import HostSpeeds, HostWork
from simulator.engine.placed_ranks import work_of_hosts
from simulator.engine.placement import Placed
from simulator.engine.rank import PlacedRank
from simulator.program import (
    COMPUTE_LANE,
    Batch,
    Collective,
    Comm,
    LaneSteps,
    PointToPoint,
    Role,
    Step,
    StepColumns,
    but_tag,
)

Int32s = NDArray[np.int32]
#: Columns of steps that are those of their prototypes.
_OF_PROTOTYPES = ("kind", "op", "n_ops", "tag", "phase")


class Numbers:
    """Things that are numbered in the order in which they come first."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, key: Hashable, thing: Any) -> int:
        """Return the number of what ``key`` names; ``thing`` is it, where it comes first."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.things)
            self.things.append(thing)
        return number


class CommNumbers:
    """Communication by its number of a kind, which is all but its tag, and the number of its tag.

    ``lane_names`` are those that spans are drawn on.
    """

    def __init__(self) -> None:
        self.kinds = Numbers()
        self.tags = Numbers()
        self.lane_names = Numbers()
        self._ops = Numbers()

    def kind(self, comm: Comm) -> int:
        """Return the number of the kind of ``comm``."""
        return self.kinds.number(but_tag(comm), comm)

    def tag(self, tag: str) -> int:
        """Return the number of a tag; communication that is no transfer has none, which has a number too."""
        return self.tags.number(tag, tag)

    def tagged(self, kind: int, tag: int) -> Comm:
        """Return the communication of a kind that has a tag."""
        comm: Comm = self.kinds.things[kind]
        return replace(comm, tag=self.tags.things[tag]) if isinstance(comm, PointToPoint) else comm

    def lane_name(self, name: str) -> int:
        """Return the number of the name of a lane."""
        return self.lane_names.number(name, name)

    def records(self, first: int) -> list[CommKindRecord]:
        """Return what the loop knows of kinds, from number ``first`` on."""
        return [self._record(comm) for comm in self.kinds.things[first:]]

    def _record(self, comm: Comm) -> CommKindRecord:
        host_waits = isinstance(comm, Collective) and comm.host_waits
        names = self._ops.number(comm.op, comm.op), self.lane_name(comm.lane)
        return CommKindRecord(
            comm.nbytes, *names, isinstance(comm, PointToPoint), comm.spins, comm.holds_sms, host_waits
        )


class DescribedSteps(NamedTuple):
    """Steps of a lane, and the labels that they wait for and the transfers of their batches, of other lanes too.

    ``first_step`` is the number of the first step in the program.
    """

    steps: NDArray[Any]
    after: Int32s
    batches: NDArray[Any]
    first_step: int


class DescribedLane(NamedTuple):
    """A lane that gets steps: the numbers of its role, its own number there, and how many steps it gets."""

    role: RoleNumbers
    lane: int
    n_steps: int


class WorkOfHost(NamedTuple):
    """`HostWork` around the steps of a lane: what is issued before step i is ``first_issue[i]`` to ``[i + 1]``.

    ``comm_s``: seconds to issue the communication that a step of the compute lane is.
    """

    first_issue: Ints
    issue_label: Int32s
    issue_s: Floats
    start_s: Floats
    comm_s: Floats


class LabelColumns(NamedTuple):
    """Labels by their numbers, the lane that has the step of each, and whether that is a batch."""

    label: Int32s
    lane: Int32s
    is_batch: NDArray[np.uint8]


class RoleNumbers:
    """Numbers of the labels of a role's steps, and of those that steps wait for."""

    def __init__(self, role: Role) -> None:
        self.lanes = list(role.lanes)
        self.labels: dict[str, int] = {}
        self._columns: list[LabelColumns] = []

    def label(self, label: str) -> int:
        """Return the number of a label; a new one where no step has had it yet."""
        return self.labels.setdefault(label, len(self.labels))

    def add_steps(self, lane: int, labels: Sequence[str], is_batch: NDArray[np.uint8]) -> list[int]:
        """Return the numbers of the ``labels`` of steps, which stand on lane number ``lane``."""
        numbers = self.numbers_of(labels)
        column = np.array(numbers, dtype=np.int32)
        self._columns.append(LabelColumns(column, np.full(len(labels), lane, dtype=np.int32), is_batch))
        return numbers

    def numbers_of(self, labels: Iterable[str]) -> list[int]:
        """Return the numbers of labels."""
        number = self.labels
        return [number.setdefault(label, len(number)) for label in labels]

    def columns_since(self, n_additions: int) -> LabelColumns:
        """Return the labels of all steps but those of the first ``n_additions`` calls of `add_steps`."""
        later = self._columns[n_additions:]
        return LabelColumns(*[np.concatenate(column) for column in zip(*later, strict=True)])

    @property
    def n_additions(self) -> int:
        """Number of calls of `add_steps`."""
        return len(self._columns)


class ProgramNumbers:
    """Numbers of the steps of a program, of the blocks that they run, and of their phases."""

    def __init__(self, comms: CommNumbers) -> None:
        self.blocks = Numbers()
        self.phases = Numbers()
        self._comms, self._n_steps = comms, 0

    def described(self, steps: StepColumns, lanes: Sequence[DescribedLane]) -> list[DescribedSteps]:
        """Return by lane as arrays ``steps``, which are those of some ``lanes`` one after another."""
        prototype, n = np.array(steps.prototype, dtype=np.int64), len(steps.prototype)
        described = np.zeros(n, dtype=STEP)
        batched = [step.op.comms if isinstance(step.op, Batch) else () for step in steps.prototypes]
        kinds = [list(map(self._comms.kind, comms)) for comms in batched]
        rows = [self._row(step, len(comms)) for step, comms in zip(steps.prototypes, batched, strict=True)]
        for name, values in zip(_OF_PROTOTYPES, np.array(rows, dtype=np.int32).reshape(-1, 5).T, strict=True):
            described[name] = values[prototype]
        tags = np.fromiter(map(self._comms.tag, chain.from_iterable(steps.tags)), np.int32)
        n_tags, n_after = (np.fromiter(map(len, column), np.int32, n) for column in (steps.tags, steps.after))
        is_batch = described["kind"] == RUN_BATCH
        is_batched = np.repeat(is_batch, n_tags)
        described["tag"][~is_batch & (n_tags > 0)] = tags[~is_batched]
        described["op"][is_batch] = np.cumsum(n_tags[is_batch]) - n_tags[is_batch]
        described["n_after"], described["first_after"] = n_after, np.cumsum(n_after) - n_after
        batches = np.zeros(int(is_batched.sum()), dtype=TAGGED_COMM)
        batches["kind"] = list(chain.from_iterable(map(kinds.__getitem__, steps.prototype)))
        batches["tag"] = tags[is_batched]
        labels, awaited, ends = list[int](), list[int](), np.cumsum([lane.n_steps for lane in lanes]).tolist()
        places = [slice(end - lane.n_steps, end) for lane, end in zip(lanes, ends, strict=True)]
        for lane, place in zip(lanes, places, strict=True):
            labels += lane.role.add_steps(lane.lane, steps.label[place], is_batch[place].astype(np.uint8))
            awaited += lane.role.numbers_of(chain.from_iterable(steps.after[place]))
        described["label"], after = labels, np.array(awaited, dtype=np.int32)
        first, self._n_steps = self._n_steps, self._n_steps + n
        return [DescribedSteps(described[place], after, batches, first + place.start) for place in places]

    def _row(self, step: Step, n_ops: int) -> tuple[int, int, int, int, int]:
        """Return kind and number of a step's operation, how many it is of, its tag, and the number of the phase."""
        op, phase = step.op, self.phases.number(step.phase, step.phase)
        if isinstance(op, Batch):
            return RUN_BATCH, 0, n_ops, 0, phase
        if isinstance(op, Comm):
            return RUN_COMM, self._comms.kind(op), 1, self._comms.tag(""), phase
        return RUN_BLOCK, self.blocks.number(id(op), op), 1, 0, phase


def work_of_host(
    role: RoleNumbers, steps: StepColumns, work: Sequence[HostWork], costs: Costs, speeds: HostSpeeds
) -> WorkOfHost:
    """Return the work of a host of these ``speeds`` around the ``steps`` of a compute lane as arrays."""
    issues = [issue for one in work for issue in one.issues]
    counts = np.cumsum([0, *[len(one.issues) for one in work]])
    comms = [(step.op, step.phase) if isinstance(step.op, Comm) else None for step in steps.prototypes]
    comm_s = [speeds.issue_s(costs, *comm) if comm else 0.0 for comm in comms]
    return WorkOfHost(
        first_issue=counts.astype(np.int64),
        issue_label=np.array([role.label(label) if label else -1 for label, _ in issues], dtype=np.int32),
        issue_s=np.array([seconds for _, seconds in issues], dtype=np.float64),
        start_s=np.array([one.start_s for one in work], dtype=np.float64),
        comm_s=np.array(comm_s, dtype=np.float64)[np.array(steps.prototype, dtype=np.int64)],
    )


class JobDescription:
    """A job's program and the work of its hosts as arrays; ``kinds`` are those of the hosts of each role's ranks.

    It is the same for all plays of a program that does not grow.
    """

    def __init__(self, placed: Placed, ranks: Sequence[PlacedRank], comms: CommNumbers) -> None:
        self.numbers = ProgramNumbers(comms)
        self.roles = {rank.role: RoleNumbers(placed.program.roles[rank.role]) for rank in ranks}
        self.kinds: dict[int, dict[HostType, None]] = {}
        for rank in ranks:
            self.kinds.setdefault(rank.role, {})[host_type(rank)] = None
        self._placed, self._steps = placed, list[LaneSteps]()
        lanes = {
            (role, lane): LaneSteps.from_steps(steps)
            for role in self.roles
            for lane, steps in placed.program.roles[role].lanes.items()
        }
        self.lanes = self._described(lanes)
        self.work: dict[int, list[WorkOfHost]] = {}
        work = work_of_hosts(placed, ranks)
        for role in self.roles:
            works = {kind: work[role, kind] for kind in self.kinds[role]}
            self.work[role] = self.work_of_hosts(role, placed.program.roles[role].lanes.get(COMPUTE_LANE, ()), works)

    @property
    def steps(self) -> LaneSteps:
        """All steps by their number."""
        return LaneSteps(*self._steps)

    def lane_steps(self, role: int, lane: str, steps: Sequence[Step]) -> DescribedSteps:
        """Return further ``steps`` of a lane of a role as arrays."""
        return self._described({(role, lane): LaneSteps.from_steps(steps)})[role, lane]

    def _described(self, steps: Mapping[tuple[int, str], LaneSteps]) -> dict[tuple[int, str], DescribedSteps]:
        """Return steps by role and lane as arrays."""
        whole = LaneSteps(*steps.values())
        self._steps.append(whole)
        lanes = [
            DescribedLane(self.roles[role], self.roles[role].lanes.index(lane), len(lane_steps))
            for (role, lane), lane_steps in steps.items()
        ]
        return dict(zip(steps, self.numbers.described(whole.columns, lanes), strict=True))

    def work_of_hosts(
        self, role: int, steps: Sequence[Step], works: Mapping[HostType, Sequence[HostWork]]
    ) -> list[WorkOfHost]:
        """Return the work of hosts of each kind of a role around ``steps`` as arrays."""
        costs, numbers = self._placed.costs, self.roles[role]
        columns = LaneSteps.from_steps(steps).columns
        return [
            work_of_host(numbers, columns, works[kind], costs.for_gpu(kind[0]), kind[1]) for kind in self.kinds[role]
        ]
