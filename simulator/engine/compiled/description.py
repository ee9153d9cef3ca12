"""Programs as arrays of numbers, as the compiled event loop reads them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
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
from simulator.program import COMPUTE_LANE, Batch, Collective, Comm, PointToPoint, Role, Step, but_tag

Int32s = NDArray[np.int32]
_described = attrgetter("label", "op", "after", "phase")


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
        self._kinds_of_batches: dict[tuple[Hashable, ...], list[int]] = {}

    def kind(self, comm: Comm) -> int:
        """Return the number of the kind of ``comm``."""
        return self.kinds.number(but_tag(comm), comm)

    def kind_and_tag(self, comm: Comm) -> tuple[int, int]:
        """Return the numbers of the kind and of the tag of ``comm``."""
        tag = comm.tag if isinstance(comm, PointToPoint) else ""
        return self.kinds.number(but_tag(comm), comm), self.tags.number(tag, tag)

    def transfers(self, batch: Batch) -> Iterable[tuple[int, int]]:
        """Return the numbers of the kind and of the tag of each transfer of a batch."""
        kinds = self._kinds_of_batches.get(batch.alike)
        if kinds is None:
            kinds = [self.kinds.number(alike, comm) for alike, comm in zip(batch.alike, batch.comms, strict=True)]
            self._kinds_of_batches[batch.alike] = kinds
        return zip(kinds, [self.tags.number(comm.tag, comm.tag) for comm in batch.comms], strict=True)

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


class LaneSteps(NamedTuple):
    """Steps of a lane, the labels that they wait for, and the transfers of their batches.

    ``first_step`` is the number of the first step in the program.
    """

    steps: NDArray[Any]
    after: Int32s
    batches: NDArray[Any]
    first_step: int


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

    def add_steps(self, lane: int, labels: Sequence[str], is_batch: NDArray[np.uint8]) -> Int32s:
        """Return the numbers of the ``labels`` of steps, which stand on lane number ``lane``."""
        numbers = self.numbers_of(labels, len(labels))
        self._columns.append(LabelColumns(numbers, np.full(len(labels), lane, dtype=np.int32), is_batch))
        return numbers

    def numbers_of(self, labels: Iterable[str], n: int) -> Int32s:
        """Return the numbers of ``n`` labels."""
        number = self.labels
        return np.fromiter([number.setdefault(label, len(number)) for label in labels], np.int32, n)

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
        self.steps: list[Step] = []
        self.blocks = Numbers()
        self.phases = Numbers()
        self._comms = comms

    def lane_steps(self, role: RoleNumbers, lane: int, steps: Sequence[Step]) -> LaneSteps:
        """Return as arrays ``steps`` of ``role``, which stand on its lane number ``lane``."""
        batches: list[tuple[int, int]] = []
        block_number, first_step = self.blocks.number, len(self.steps)
        label, op_of_step, after, phase_of_step = zip(*map(_described, steps), strict=True) if steps else ((),) * 4
        #: Of what steps share, by its id: kind of the operation, its number, how many it is of, and its tag.
        shared: dict[int, tuple[int, int, int, int]] = {}
        ops: list[tuple[int, int, int, int]] = []
        for op in op_of_step:
            row = shared.get(id(op))
            if row is None:
                if isinstance(op, Comm):
                    kind, tag = self._comms.kind_and_tag(op)
                    row = RUN_COMM, kind, 1, tag
                elif isinstance(op, Batch):
                    row = RUN_BATCH, len(batches), len(op.comms), 0
                    batches += self._comms.transfers(op)
                else:
                    row = RUN_BLOCK, block_number(id(op), op), 1, 0
                shared[id(op)] = row
            ops.append(row)
        columns = np.zeros(len(steps), dtype=STEP)
        numbers = np.fromiter(chain.from_iterable(ops), np.int32, 4 * len(ops)).reshape(-1, 4)
        for name, values in zip(("kind", "op", "n_ops", "tag"), numbers.T, strict=True):
            columns[name] = values
        columns["label"] = role.add_steps(lane, label, (columns["kind"] == RUN_BATCH).astype(np.uint8))
        columns["n_after"] = list(map(len, after))
        columns["first_after"] = np.cumsum(columns["n_after"]) - columns["n_after"]
        phase = {one: self.phases.number(one, one) for one in dict.fromkeys(phase_of_step)}
        columns["phase"] = list(map(phase.__getitem__, phase_of_step))
        self.steps += steps
        transfers = np.array(batches, dtype=np.int32).reshape(-1, 2).view(TAGGED_COMM)
        awaited = role.numbers_of(chain.from_iterable(after), int(columns["n_after"].sum()))
        return LaneSteps(columns, awaited, transfers, first_step)


def work_of_host(
    role: RoleNumbers, steps: Sequence[Step], work: Sequence[HostWork], costs: Costs, speeds: HostSpeeds
) -> WorkOfHost:
    """Return the work of a host of these ``speeds`` around the ``steps`` of a compute lane as arrays."""
    issues = [issue for one in work for issue in one.issues]
    counts = np.cumsum([0, *[len(one.issues) for one in work]])
    return WorkOfHost(
        first_issue=counts.astype(np.int64),
        issue_label=np.array([role.label(label) if label else -1 for label, _ in issues], dtype=np.int32),
        issue_s=np.array([seconds for _, seconds in issues], dtype=np.float64),
        start_s=np.array([one.start_s for one in work], dtype=np.float64),
        comm_s=np.array(
            [speeds.issue_s(costs, step.op, step.phase) if isinstance(step.op, Comm) else 0.0 for step in steps],
            dtype=np.float64,
        ),
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
        self.lanes: dict[tuple[int, str], LaneSteps] = {}
        self.work: dict[int, list[WorkOfHost]] = {}
        self._placed = placed
        work = work_of_hosts(placed, ranks)
        for role in self.roles:
            lanes = placed.program.roles[role].lanes
            for lane, steps in lanes.items():
                self.lanes[role, lane] = self.lane_steps(role, lane, steps)
            works = {kind: work[role, kind] for kind in self.kinds[role]}
            self.work[role] = self.work_of_hosts(role, lanes.get(COMPUTE_LANE, ()), works)

    def lane_steps(self, role: int, lane: str, steps: Sequence[Step]) -> LaneSteps:
        """Return further ``steps`` of a lane of a role as arrays."""
        numbers = self.roles[role]
        return self.numbers.lane_steps(numbers, numbers.lanes.index(lane), steps)

    def work_of_hosts(
        self, role: int, steps: Sequence[Step], works: Mapping[HostType, Sequence[HostWork]]
    ) -> list[WorkOfHost]:
        """Return the work of hosts of each kind of a role around ``steps`` as arrays."""
        costs, numbers = self._placed.costs, self.roles[role]
        return [work_of_host(numbers, steps, works[kind], costs.for_gpu(kind[0]), kind[1]) for kind in self.kinds[role]]
