"""The order in which ranks of a job come to their nodes, where they meet in communication.

Nodes of a lane take turns: the one that could begin first is first. So lanes of all ranks follow one order in which
everything can run, and no two of them wait for each other.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from simulator.errors import InputError
from simulator.program import CollectiveKind
from simulator.traces.execution.graph import EXCHANGES, GraphComm, GraphNode, JobGraph, NodeKind, RankGraph
from simulator.traces.execution.lengths import NodeLengths

#: A node: position of its rank in the job, and its own among the rank's nodes.
NodePlace = tuple[int, int]


def lane_of(node: GraphNode) -> str:
    """Return the lane in which a node takes its turn; empty of communication, and of what takes no time."""
    match node.kind:
        case NodeKind.HOST:
            return f"host {node.lane}".strip()
        case NodeKind.GPU:
            return f"stream {node.lane}" if node.lane else "kernels"
        case NodeKind.LOAD | NodeKind.STORE:
            return f"{node.kind} {node.lane}".strip()
        case _:
            return ""


def meetings(job: JobGraph, lengths: NodeLengths) -> dict[NodePlace, tuple[NodePlace, ...]]:
    """Return for each communication whose ranks are all in the trace the nodes that are one with it.

    The n-th collective of a group is one on all its ranks, and the n-th send with a tag to a rank is one with its n-th
    receive. Raises `InputError` where ranks call different things.
    """
    calls: dict[Hashable, list[NodePlace]] = {}
    for at, rank in enumerate(job.ranks):
        numbers: Counter[Hashable] = Counter()
        for place, node in enumerate(rank.nodes):
            if node.kind in EXCHANGES and lengths.is_complete(node):
                call = _call(rank, node)
                calls.setdefault((call, numbers[call, node.kind]), []).append((at, place))
                numbers[call, node.kind] += 1
    meeting_of: dict[NodePlace, tuple[NodePlace, ...]] = {}
    for places in calls.values():
        _check(job, places)
        meeting_of |= dict.fromkeys(places, tuple(places))
    return meeting_of


def _call(rank: RankGraph, node: GraphNode) -> Hashable:
    """Return what the callers of a communication share."""
    comm = node.comm
    assert comm is not None
    if node.kind == NodeKind.COLLECTIVE:
        return comm.group
    ends = (rank.rank, comm.peer) if node.kind == NodeKind.SEND else (comm.peer, rank.rank)
    return *ends, comm.tag


def _check(job: JobGraph, places: Sequence[NodePlace]) -> None:
    """Raise `InputError` unless these nodes are one communication, of all that take part."""
    nodes = [job.ranks[at].nodes[place] for at, place in places]
    first, rank = nodes[0], job.ranks[places[0][0]]
    assert first.comm is not None
    where = f"operation {first.number} ({first.name[:60]})"
    partners = set(job.members(first.comm.group)) if first.kind == NodeKind.COLLECTIVE else {rank.rank, first.comm.peer}
    callers = {job.ranks[at].rank for at, _ in places}
    if first.comm.peer == rank.rank:
        raise InputError(f"rank {rank.rank} sends to itself", file=rank.file, key=where)
    if strangers := sorted(callers - partners):
        stranger = next(job.ranks[at] for at, _ in places if job.ranks[at].rank == strangers[0])
        group = f"group {first.comm.group}" if first.comm.group else "the group"
        message = f"rank {stranger.rank} calls {first.comm.operation} of {group}, and is not in it"
        raise InputError(message, file=stranger.file, found=f"ranks {', '.join(map(str, sorted(partners)[:8]))}")
    if lacking := sorted(partners - callers):
        lacking_text = ", ".join(map(str, lacking[:4]))
        raise InputError(f"rank {lacking_text} has no call that belongs to it", file=rank.file, key=where)
    if any(len(shares) not in (0, len(partners)) for shares in (first.comm.send_shares, first.comm.receive_shares)):
        raise InputError(f"has no share for each of {len(partners)} ranks", file=rank.file, key=where)
    for (at, _), node in zip(places, nodes, strict=True):
        if not _agree(node, first):
            message = f"{_text(first)} here, {_text(node)} at operation {node.number} of rank {job.ranks[at].rank}"
            raise InputError("ranks call different things", file=rank.file, key=where, found=message)


def _agree(one: GraphNode, other: GraphNode) -> bool:
    """Tell whether two ranks can mean one communication; to an all-to-all each may give bytes of its own."""
    assert one.comm is not None
    assert other.comm is not None
    same_bytes = one.comm.nbytes == other.comm.nbytes or one.comm.operation == CollectiveKind.ALL_TO_ALL
    return same_bytes and _manner(one.comm) == _manner(other.comm)


def _manner(comm: GraphComm) -> tuple[object, ...]:
    return comm.operation, comm.algorithm, comm.send_shares, comm.receive_shares, comm.per_node


def _text(node: GraphNode) -> str:
    assert node.comm is not None
    comm = node.comm
    algorithm = "" if comm.algorithm == "auto" else f" by {comm.algorithm}"
    shares = " in shares of its own" if comm.send_shares or comm.receive_shares or comm.per_node else ""
    return f"{comm.operation or node.kind} of {comm.nbytes:,.0f} bytes{algorithm}{shares}"


@dataclass
class _Run:
    """Nodes that have come so far. ``free_s``: when each lane of a rank is free.

    ``came``: how many have come to the meeting that begins with a node. ``latest_s``: when the last of them would end.
    """

    waits: dict[NodePlace, int]
    behind: dict[NodePlace, list[NodePlace]]
    ready: list[tuple[float, int, int]] = field(default_factory=list)
    ready_s: dict[NodePlace, float] = field(default_factory=dict)
    free_s: dict[tuple[int, str], float] = field(default_factory=dict)
    came: Counter[NodePlace] = field(default_factory=Counter)
    latest_s: dict[NodePlace, float] = field(default_factory=dict)

    def end(self, place: NodePlace, end_s: float) -> None:
        """Let everything behind a node that has ended come."""
        for other in self.behind.get(place, ()):
            self.ready_s[other] = max(self.ready_s.get(other, 0.0), end_s)
            self.waits[other] -= 1
            if not self.waits[other]:
                heapq.heappush(self.ready, (self.ready_s[other], *other))


def running_order(
    job: JobGraph, lengths: NodeLengths, meeting_of: Mapping[NodePlace, tuple[NodePlace, ...]]
) -> tuple[NodePlace, ...]:
    """Return all nodes of all ranks in the order in which they come. Raises `InputError` where some never do."""
    run = _begun(job, meeting_of)
    order: list[NodePlace] = []
    while run.ready:
        start_s, at, place = heapq.heappop(run.ready)
        order.append((at, place))
        rank, node = job.ranks[at], job.ranks[at].nodes[place]
        if lane := lane_of(node):
            start_s = max(start_s, run.free_s.get((at, lane), 0.0))
        end_s = start_s + lengths.expected_s(rank, node)
        run.free_s[at, lane] = end_s
        together = meeting_of.get((at, place), ((at, place),))
        first = together[0]
        run.came[first] += 1
        run.latest_s[first] = end_s = max(end_s, run.latest_s.get(first, 0.0))
        if run.came[first] == len(together):
            for member in together:
                run.end(member, end_s)
    if len(order) < sum(len(rank.nodes) for rank in job.ranks) or any(
        run.came[together[0]] < len(together) for together in meeting_of.values()
    ):
        raise _deadlock(job, run, order, meeting_of)
    return tuple(order)


def _begun(job: JobGraph, meeting_of: Mapping[NodePlace, tuple[NodePlace, ...]]) -> _Run:
    """Return the run at its start: links of nodes, and of the collectives of a group, which take turns."""
    run = _Run({}, {})
    for at, rank in enumerate(job.ranks):
        number = {node.number: place for place, node in enumerate(rank.nodes)}
        last_of_group: dict[str, int] = {}
        for place, node in enumerate(rank.nodes):
            before = {number[other] for other in node.after}
            if node.kind == NodeKind.COLLECTIVE and node.comm is not None and (at, place) in meeting_of:
                if node.comm.group in last_of_group:
                    before.add(last_of_group[node.comm.group])
                last_of_group[node.comm.group] = place
            run.waits[at, place] = len(before)
            for other in sorted(before):
                run.behind.setdefault((at, other), []).append((at, place))
            if not before:
                run.ready.append((0.0, at, place))
    heapq.heapify(run.ready)
    return run


def _deadlock(
    job: JobGraph, run: _Run, order: Sequence[NodePlace], meeting_of: Mapping[NodePlace, tuple[NodePlace, ...]]
) -> InputError:
    """Return the error of ranks that wait for each other for ever: what the first of them wait in."""
    stuck: dict[int, int] = {}
    for at, place in order:
        together = meeting_of.get((at, place), ((at, place),))
        if run.came[together[0]] < len(together):
            stuck.setdefault(at, job.ranks[at].nodes[place].number)
    waiting = [f"rank {job.ranks[at].rank} in operation {stuck[at]}" for at in sorted(stuck)]
    return InputError(
        "ranks wait for each other for ever", file=job.ranks[0].file, found="; ".join(waiting[:4]) or "nothing can run"
    )
