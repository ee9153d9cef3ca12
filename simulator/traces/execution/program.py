"""The graphs of a job as a `Program`, which the engine plays.

Kernels and work of hosts are `RecordedWork` of their lengths, a lane for each stream and thread. On a cluster the
network plays communication; as recorded, its ranks meet and then take the shortest of their lengths, for the others
have waited. A group's collectives are a lane. A transfer stands in the lane of one that it waits for, or in its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simulator.program import (
    AllToAll,
    Axis,
    Collective,
    CollectiveKind,
    HostKind,
    HostOperation,
    PointToPoint,
    PointToPointKind,
    Program,
    Purpose,
    RecordedWork,
    Role,
    Step,
    numbered_axis,
)
from simulator.traces.execution.graph import GraphComm, GraphNode, JobGraph, NodeKind
from simulator.traces.execution.lengths import NodeLengths
from simulator.traces.execution.meeting_order import NodePlace, lane_of, meetings, running_order

_NO_TIME = "no time"
_TRANSFERS = "transfers"
#: Roles with which that of another rank is compared: ranks that do the same are played once.
_COMPARED = 8


def label(number: int) -> str:
    """Return the label of the step that ends with a node."""
    return str(number)


def graph_program(job: JobGraph, lengths: NodeLengths) -> Program:
    """Return the program of a job. Raises `InputError` where ranks do not fit together, or a length is not known."""
    meeting_of = meetings(job, lengths)
    order = running_order(job, lengths, meeting_of)
    n_ranks = max(rank.rank for rank in job.ranks) + 1
    groups = _Groups(job, n_ranks)
    lanes = [_GraphLanes(job, at, lengths, groups, meeting_of) for at in range(len(job.ranks))]
    for at, place in order:
        lanes[at].add(place)
    roles: list[Role] = []
    role_of = [-1] * n_ranks
    for rank, one in zip(job.ranks, lanes, strict=True):
        role_of[rank.rank] = _role(
            roles, f"rank {rank.rank}", {lane: tuple(steps) for lane, steps in one.lanes.items()}
        )
    if -1 in role_of:
        roles.append(Role("without a trace", {}))
        role_of = [len(roles) - 1 if at < 0 else at for at in role_of]
    return Program(tuple(roles), tuple(role_of), groups.of_axes, name="execution trace")


def _role(roles: list[Role], name: str, lanes: dict[str, tuple[Step, ...]]) -> int:
    """Return the number of a role with these lanes: one of the last of ``roles``, or a new one."""
    for number in range(max(len(roles) - _COMPARED, 0), len(roles)):
        if roles[number].lanes == lanes:
            return number
    roles.append(Role(name, lanes))
    return len(roles) - 1


class _Groups:
    """Axes of the groups of a job, each with one group: those of collectives, all ranks, and each rank alone."""

    def __init__(self, job: JobGraph, n_ranks: int) -> None:
        self._job = job
        self._axes: dict[str, str] = {}
        self.everyone = numbered_axis(Axis.PROCESS_GROUP, 0)
        self.of_axes: dict[str, tuple[tuple[int, ...], ...]] = {
            str(Axis.RANK): tuple((rank,) for rank in range(n_ranks)),
            self.everyone: (tuple(range(n_ranks)),),
        }

    def axis(self, comm: GraphComm) -> str:
        """Return the axis of a collective's group."""
        if comm.group not in self._axes:
            axis = self._axes[comm.group] = numbered_axis(Axis.PROCESS_GROUP, len(self._axes) + 1)
            self.of_axes[axis] = (self._job.members(comm.group),)
        return self._axes[comm.group]


class _GraphLanes:
    """The lanes of one rank, which nodes are added to in the order in which they come."""

    def __init__(
        self,
        job: JobGraph,
        at: int,
        lengths: NodeLengths,
        groups: _Groups,
        meeting_of: Mapping[NodePlace, tuple[NodePlace, ...]],
    ) -> None:
        self._job, self._at, self._lengths, self._groups = job, at, lengths, groups
        self._meeting_of = meeting_of
        self._rank = job.ranks[at]
        self._last_transfer: dict[int, str] = {}  # last node of a lane of transfers -> the lane
        self._transfer_lanes = 0
        self.lanes: dict[str, list[Step]] = {}

    def add(self, place: int) -> None:
        """Add a node behind those that its lanes have."""
        node = self._rank.nodes[place]
        lane = self._lane(node)
        after = tuple(label(other) for other in node.after)
        together = self._meeting_of.get((self._at, place))
        steps = self.lanes.setdefault(lane, [])
        if self._lengths.plays(node):
            steps.append(Step(label(node.number), self._operation(node, together), after))
            return
        seconds = self._lengths.seconds(self._rank, node)
        if together is not None:
            calls = [(self._job.ranks[at], self._job.ranks[at].nodes[other]) for at, other in together]
            seconds = min(self._lengths.seconds(rank, one) for rank, one in calls)
            meeting = f"m{node.number}"
            steps.append(Step(meeting, self._meeting(node), after))
            after = (meeting,)
        steps.append(Step(label(node.number), RecordedWork(node.name, seconds=seconds, stream=lane), after))

    def _lane(self, node: GraphNode) -> str:
        if lane := lane_of(node):
            return lane
        if node.kind == NodeKind.COLLECTIVE and node.comm is not None and self._lengths.is_complete(node):
            return self._groups.axis(node.comm)
        if node.kind == NodeKind.NOTHING:
            return f"{_NO_TIME} {node.number}"
        lane = next((self._last_transfer.pop(other) for other in node.after if other in self._last_transfer), "")
        if not lane:
            self._transfer_lanes += 1
            lane = f"{_TRANSFERS} {self._transfer_lanes}"
        self._last_transfer[node.number] = lane
        return lane

    def _operation(
        self, node: GraphNode, together: tuple[NodePlace, ...] | None
    ) -> Collective | PointToPoint | HostOperation:
        """Return the communication that the network plays. ``together``: the nodes of all ranks that are one."""
        comm = node.comm
        if comm is None:
            kind = HostKind.FROM_HOST if node.kind == NodeKind.LOAD else HostKind.TO_HOST
            return HostOperation(node.name, kind, node.nbytes, Axis.RANK, Purpose.OFFLOAD)
        if node.kind != NodeKind.COLLECTIVE:
            return self._transfer(node, comm, comm.nbytes)
        axis = self._groups.axis(comm)
        if comm.operation == CollectiveKind.ALL_TO_ALL:
            nbytes, send_shares = self._sent(comm, together or ())
            return AllToAll(
                node.name, nbytes, axis, Purpose.DATA, comm.algorithm, send_shares=send_shares,
                receive_shares=comm.receive_shares, per_node=comm.per_node,
            )  # fmt: skip
        nbytes = self._job.message_bytes(comm)
        return Collective(node.name, CollectiveKind(comm.operation), nbytes, axis, Purpose.DATA, comm.algorithm)

    def _sent(self, comm: GraphComm, together: Sequence[NodePlace]) -> tuple[float, tuple[float, ...]]:
        """Return the mean bytes that ranks give to an all-to-all, and the share of each where they differ."""
        calls = ((self._job.ranks[at].rank, self._job.ranks[at].nodes[place].comm) for at, place in together)
        by_rank = {rank: one.nbytes for rank, one in calls if one is not None}
        total = sum(by_rank.values())
        if len(set(by_rank.values())) == 1:
            return comm.nbytes, comm.send_shares
        shares = tuple(by_rank[member] / total for member in self._job.members(comm.group))
        return total / len(by_rank), shares

    def _meeting(self, node: GraphNode) -> Collective | PointToPoint:
        """Return what makes the ranks of a communication wait for each other, without bytes."""
        assert node.comm is not None
        if node.kind != NodeKind.COLLECTIVE:
            return self._transfer(node, node.comm, 0.0)
        return Collective(node.name, CollectiveKind.BARRIER, 0.0, self._groups.axis(node.comm), Purpose.DATA)

    def _transfer(self, node: GraphNode, comm: GraphComm, nbytes: float) -> PointToPoint:
        kind = PointToPointKind.SEND if node.kind == NodeKind.SEND else PointToPointKind.RECV
        return PointToPoint(
            node.name, kind, nbytes, self._groups.everyone, Purpose.PIPELINE, comm.peer, str(comm.tag),
            comm.posted_early,
        )  # fmt: skip
