"""A simulated rank's step as planned nodes: when it came to each operation, when that ended, what it waited for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from simulator.errors import InputError
from simulator.program import (
    COMPUTE_LANE,
    Batch,
    Block,
    Collective,
    Comm,
    Compute,
    HostKind,
    HostOperation,
    Program,
    Role,
    Step,
)
from simulator.program.ops import comm_of, kernels_of
from simulator.timeline import Timeline

#: Differences of times that are rounding, s: the engine lets waiting kernels begin so much later.
ROUNDING_S = 1e-11
#: Work on hosts that a trace has nodes for.
_HOST_KINDS = (HostKind.TO_HOST, HostKind.FROM_HOST, HostKind.HOST_UPDATE)


class OpTimes(NamedTuple):
    """When a rank came to an operation, when it began to work, and when it ended (s); its FLOPs and bytes."""

    came_s: float
    start_s: float
    end_s: float
    flops: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """An operation of a rank. ``op`` is a kernel or a communication; None: a wait of ``times``.

    ``lane``: the program's lane that it stands in. ``after``: numbers of the nodes before it.
    """

    number: int
    name: str
    op: Compute | Comm | None
    lane: str
    after: tuple[int, ...]
    times: OpTimes


def planned_nodes(program: Program, timeline: Timeline, rank: int) -> tuple[PlannedNode, ...]:
    """Return the nodes of a simulated rank, in the order of their starts. Raises `InputError` for what has none."""
    return _RankPlan(program.roles[program.role_of[rank]], _times(timeline, rank)).nodes()


class _TimedRow(NamedTuple):
    """A row of the rank's Timeline: its name, whether it is a kernel, and its times."""

    name: str
    is_kernel: bool
    times: OpTimes


def _times(timeline: Timeline, rank: int) -> dict[str, list[_TimedRow]]:
    """Return label of a step -> its rows in the order of their starts.

    A communication that the network has timed begins when its last member comes; the rank has come to it before.
    """
    mine = timeline.select_ranks([rank])
    rows = mine.rows()
    span, start_s, end_s = (rows[name].tolist() for name in ("span", "start_s", "end_s"))
    single = [len(template) == 1 for template in mine.templates]
    names, lanes, flops, nbytes = (rows[name].tolist() for name in ("name", "lane", "flops", "nbytes"))
    rows_by_label: dict[str, list[_TimedRow]] = {}
    for row, at in enumerate(span):
        is_kernel = mine.lane_names[lanes[row]] == COMPUTE_LANE
        timed = single[int(mine.template[at])] and not is_kernel
        came_s = min(float(mine.launched_s[at]), start_s[row]) if timed else start_s[row]
        times = OpTimes(came_s, start_s[row], end_s[row], flops[row], nbytes[row])
        rows_by_label.setdefault(mine.labels[at], []).append(_TimedRow(names[row], is_kernel, times))
    for timed_rows in rows_by_label.values():
        timed_rows.sort(key=lambda one: (one.times.start_s, one.times.end_s))
    return rows_by_label


class _RankPlan:
    """Nodes of a role, whose rows are known."""

    def __init__(self, role: Role, rows: Mapping[str, list[_TimedRow]]) -> None:
        self._role, self._rows = role, rows
        self._nodes: list[PlannedNode] = []
        self._ends: dict[str, tuple[int, ...]] = {}  # label -> its last nodes
        self._awaited: dict[int, tuple[str, ...]] = {}  # node -> labels that it waits for
        self._entry: tuple[int, ...] = ()  # what the first nodes of the present step are after

    def nodes(self) -> tuple[PlannedNode, ...]:
        """Return all nodes, with what they wait for and for how long."""
        for lane, steps in self._role.lanes.items():
            before: tuple[int, ...] = ()
            for step in steps:
                self._entry = before
                before = self._ends[step.label] = self._add(lane, step, before)
        return tuple(self._with_waits())

    def _add(self, lane: str, step: Step, before: tuple[int, ...]) -> tuple[int, ...]:
        """Add the nodes of a step; return the last ones."""
        rows = list(self._rows.get(step.label, []))
        match step.op:
            case Block():
                return self._add_block(lane, step, step.op, before)
            case Batch():
                return tuple(self._node(comm, lane, step, before, _first_of(rows, comm.name)) for comm in step.op.comms)
            case Comm():
                _check(step.op)
                return (self._node(step.op, lane, step, before, rows[0].times),)

    def _add_block(self, lane: str, step: Step, block: Block, before: tuple[int, ...]) -> tuple[int, ...]:
        rows = self._rows.get(step.label, [])
        kernels, comms = (iter([row.times for row in rows if row.is_kernel == wanted]) for wanted in (True, False))
        for op in block.ops:
            beside: tuple[int, ...] = ()
            if not isinstance(op, Compute):
                beside = (self._node(comm_of(op), lane, step, before, next(comms)),)
            if isinstance(op, Collective):
                before = ()
            for kernel in kernels_of(op):
                before = (self._node(kernel, lane, step, before, next(kernels)),)
            before = (*before, *beside)
        return before

    def _node(self, op: Compute | Comm, lane: str, step: Step, after: tuple[int, ...], times: OpTimes) -> int:
        number = len(self._nodes)
        if after is self._entry:
            self._awaited[number] = step.after
        self._nodes.append(PlannedNode(number, op.name, op, lane, after, times))
        return number

    def _with_waits(self) -> Iterator[PlannedNode]:
        """Yield the nodes, and before each the wait that nothing it is after explains."""
        ends = sorted((node.times.end_s, node.number) for node in self._nodes if isinstance(node.op, Compute))
        last_s, waits = [end for end, _ in ends], len(self._nodes)
        for node in sorted(self._nodes, key=lambda one: (one.times.came_s, one.times.end_s, one.number)):
            awaited = [number for label in self._awaited.get(node.number, ()) for number in self._ends[label]]
            after = tuple(dict.fromkeys([*node.after, *awaited]))
            ready_s = max((self._nodes[number].times.end_s for number in after), default=0.0)
            if node.times.came_s - ready_s > ROUNDING_S and not isinstance(node.op, Compute):
                at = bisect_left(last_s, node.times.came_s - ROUNDING_S)  # it waited for a kernel to leave the GPU
                if at < len(ends) and abs(last_s[at] - node.times.came_s) <= ROUNDING_S:
                    after, ready_s = (*after, ends[at][1]), last_s[at]
            if node.times.came_s - ready_s > ROUNDING_S:
                times = OpTimes(ready_s, ready_s, node.times.came_s, 0.0, 0.0)
                yield PlannedNode(waits, f"wait for {node.name}", None, node.lane, after, times)
                after, waits = (waits,), waits + 1
            yield replace(node, after=after)


def _first_of(rows: list[_TimedRow], name: str) -> OpTimes:
    """Take the first row of a name out of ``rows``; return its times."""
    return rows.pop(next(at for at, row in enumerate(rows) if row.name == name)).times


def _check(comm: Comm) -> None:
    """Raise `InputError` for work on hosts that a trace has no nodes for."""
    if isinstance(comm, HostOperation) and comm.op not in _HOST_KINDS:
        raise InputError(
            "Chakra's traces have no operation for it", key=comm.name, found=str(comm.op),
            allowed="copies to and from the memory of hosts, and updates there",
        )  # fmt: skip
