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
    PointToPoint,
    Role,
    Step,
    StepColumns,
    Steps,
    but_tag,
)

Int32s = NDArray[np.int32]


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
        self.n_steps = 0
        self.blocks = Numbers()
        self.phases = Numbers()
        self._comms = comms

    def lane_steps(self, role: RoleNumbers, lane: int, steps: StepColumns) -> DescribedSteps:
        """Return as arrays ``steps`` of ``role``, which stand on its lane number ``lane``."""
        #: Of each model the kinds of communication in its batch.
        kinds = [
            list(map(self._comms.kind, step.op.comms)) if isinstance(step.op, Batch) else [] for step in steps.models
        ]
        models = np.array([self._row(step, len(in_batch)) for step, in_batch in zip(steps.models, kinds, strict=True)])
        tags = np.fromiter(map(self._comms.tag, chain.from_iterable(steps.tags)), np.int32)
        described, model = np.zeros(len(steps.model), dtype=STEP), np.array(steps.model, dtype=np.int64)
        if len(model):
            for name, values in zip(("kind", "op", "n_ops", "tag", "phase"), models[model].T, strict=True):
                described[name] = values
        n_tags = np.fromiter(map(len, steps.tags), np.int32, len(model))
        is_batch = described["kind"] == RUN_BATCH
        of_batch = np.repeat(is_batch, n_tags)
        described["tag"][~is_batch & (n_tags > 0)] = tags[~of_batch]
        described["op"][is_batch] = np.cumsum(n_tags[is_batch]) - n_tags[is_batch]
        described["label"] = role.add_steps(lane, steps.label, is_batch.astype(np.uint8))
        described["n_after"] = list(map(len, steps.after))
        described["first_after"] = np.cumsum(described["n_after"]) - described["n_after"]
        batches = np.zeros(int(of_batch.sum()), dtype=TAGGED_COMM)
        batches["kind"] = list(chain.from_iterable(map(kinds.__getitem__, steps.model)))
        batches["tag"] = tags[of_batch]
        awaited = role.numbers_of(chain.from_iterable(steps.after), int(described["n_after"].sum()))
        self.n_steps += len(model)
        return DescribedSteps(described, awaited, batches, self.n_steps - len(model))

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
    return WorkOfHost(
        first_issue=counts.astype(np.int64),
        issue_label=np.array([role.label(label) if label else -1 for label, _ in issues], dtype=np.int32),
        issue_s=np.array([seconds for _, seconds in issues], dtype=np.float64),
        start_s=np.array([one.start_s for one in work], dtype=np.float64),
        comm_s=np.array(
            [speeds.issue_s(costs, step.op, step.phase) if isinstance(step.op, Comm) else 0.0 for step in steps.models],
            dtype=np.float64,
        )[np.array(steps.model, dtype=np.int64)],
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
        #: Lanes that are described, in the order of the numbers of their steps.
        self._described: list[Steps] = []
        self.lanes: dict[tuple[int, str], DescribedSteps] = {}
        self.work: dict[int, list[WorkOfHost]] = {}
        self._placed = placed
        work = work_of_hosts(placed, ranks)
        for role in self.roles:
            lanes = placed.program.roles[role].lanes
            for lane, steps in lanes.items():
                self.lanes[role, lane] = self.lane_steps(role, lane, steps)
            works = {kind: work[role, kind] for kind in self.kinds[role]}
            self.work[role] = self.work_of_hosts(role, lanes.get(COMPUTE_LANE, ()), works)

    @property
    def steps(self) -> Steps:
        """All steps by their number."""
        return Steps(*self._described)

    def lane_steps(self, role: int, lane: str, steps: Sequence[Step]) -> DescribedSteps:
        """Return further ``steps`` of a lane of a role as arrays."""
        numbers, described = self.roles[role], Steps.of(steps)
        self._described.append(described)
        return self.numbers.lane_steps(numbers, numbers.lanes.index(lane), described.columns)

    def work_of_hosts(
        self, role: int, steps: Sequence[Step], works: Mapping[HostType, Sequence[HostWork]]
    ) -> list[WorkOfHost]:
        """Return the work of hosts of each kind of a role around ``steps`` as arrays."""
        costs, numbers = self._placed.costs, self.roles[role]
        columns = Steps.of(steps).columns
        return [
            work_of_host(numbers, columns, works[kind], costs.for_gpu(kind[0]), kind[1]) for kind in self.kinds[role]
        ]
