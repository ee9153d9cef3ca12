"""Graphs of what a rank runs: nodes that compute or communicate, each behind the nodes that it waits for."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from simulator.errors import InputError
from simulator.input_files import brief
from simulator.output.comm_arguments import PART_IN


class NodeKind(StrEnum):
    """Kinds of nodes. ``HOST`` is work of the host, ``GPU`` a kernel, ``NOTHING`` takes no time."""

    HOST = "host"
    GPU = "gpu"
    LOAD = "load"
    STORE = "store"
    COLLECTIVE = "collective"
    SEND = "send"
    RECEIVE = "receive"
    NOTHING = "nothing"


#: Kinds in which a rank waits for others.
EXCHANGES = (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECEIVE)


@dataclass(frozen=True, slots=True)
class GraphComm:
    """Communication of a node.

    ``operation``: a collective by its name here; empty of a transfer. ``nbytes``: what a rank puts in, or what is
    transferred. ``group``: name of the ranks that take part; empty: all.
    ``peer`` and ``tag``: the other end of a transfer, and what tells it from others. ``posted_early``: a receive that
    is posted when its bytes come. ``algorithm`` and shares: as of `simulator.program.AllToAll`.
    """

    operation: str = ""
    nbytes: float = 0.0
    group: str = ""
    peer: int = -1
    tag: int = 0
    posted_early: bool = False
    algorithm: str = "auto"
    send_shares: tuple[float, ...] = ()
    receive_shares: tuple[float, ...] = ()
    per_node: float = 0.0


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node, which begins when the nodes in ``after`` have ended and its ``lane`` is free.

    ``seconds``: its recorded length; None where there is none. ``flops`` and ``nbytes``: operations, and bytes that it
    moves. ``dtype``: type of the operands, as GPUs' peaks are told by it; empty where the trace does not tell.
    ``lane``: a thread or a stream; empty where the trace names none.
    """

    number: int
    name: str
    kind: NodeKind
    after: tuple[int, ...] = ()
    seconds: float | None = None
    flops: float = 0.0
    nbytes: float = 0.0
    dtype: str = ""
    lane: str = ""
    comm: GraphComm | None = None


@dataclass(frozen=True)
class RankGraph:
    """The graph of one rank: nodes in an order in which they can run.

    ``groups``: name of a group -> its ranks, as far as the file says.
    ``missing``: sentences on what the file lacks. ``origin``: who wrote it, Chakra or PyTorch.
    """

    rank: int
    file: str
    origin: str
    nodes: tuple[GraphNode, ...]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobGraph:
    """The graphs of the ranks of one job, by rank, and its ``groups``: name -> ranks.

    ``missing``: sentences on what the files together lack.
    """

    ranks: tuple[RankGraph, ...]
    groups: Mapping[str, tuple[int, ...]]
    missing: tuple[str, ...] = ()

    def message_bytes(self, comm: GraphComm) -> float:
        """Return the message of a collective as nccl-tests counts it: of gathers what they bring together."""
        return comm.nbytes * (len(self.members(comm.group)) if comm.operation in PART_IN else 1)

    @property
    def n_ranks(self) -> int:
        """Ranks of the job, as far as the trace tells: those of groups and other ends of transfers too."""
        numbers = [rank.rank for rank in self.ranks] + [rank for ranks in self.groups.values() for rank in ranks]
        comms = (node.comm for rank in self.ranks for node in rank.nodes if node.comm is not None)
        return max([*numbers, *(comm.peer for comm in comms)]) + 1

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it was read from."""
        return tuple(rank.file for rank in self.ranks)

    def members(self, group: str) -> tuple[int, ...]:
        """Return the ranks of a group: as listed, or all of the trace; none where the trace has one rank alone."""
        return self.groups.get(group) or (self._everyone if len(self._everyone) > 1 else ())

    @cached_property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(rank.rank for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class LinkedNode:
    """A node as a file has it. ``callers``: nodes that it waits for, or whose call it is a part of."""

    node: GraphNode
    callers: tuple[int, ...] = ()


def in_running_order(linked: Sequence[LinkedNode], file: object) -> tuple[tuple[GraphNode, ...], tuple[str, ...]]:
    """Return nodes in an order in which they can run, with sentences on what of the links was left out.

    Some writers list a node's callers, which end after it, beside what it waits for. So callers count where all of them
    together with the rest have an order, and else not. Raises `InputError` where nodes wait in a circle, or two have
    one number.
    """
    numbers = {one.node.number for one in linked}
    if len(numbers) < len(linked):
        counts = Counter(one.node.number for one in linked)
        raise InputError("two operations have one number", file=file, found=counts.most_common(1)[0][0])
    missing: list[str] = []
    lost = sum(other not in numbers for one in linked for other in one.node.after)
    if lost:
        missing.append(f"{lost:,} links to operations that the file lacks, which wait for nothing here")
    nodes = [replace(one.node, after=_distinct(one.node.after, numbers)) for one in linked]
    if any(one.callers for one in linked):
        with_callers = [
            replace(node, after=_distinct((*node.after, *one.callers), numbers))
            for node, one in zip(nodes, linked, strict=True)
        ]
        order = _order(with_callers)
        if len(order) == len(linked):
            return tuple(order), tuple(missing)
        missing.append("ctrl_deps name callers, which end after their parts, and are left out")
    order = _order(nodes)
    if len(order) < len(nodes):
        raise InputError("operations wait for each other in a circle", file=file, found=_circle(nodes, order))
    return tuple(order), tuple(missing)


def _distinct(after: Iterable[int], numbers: set[int]) -> tuple[int, ...]:
    return tuple(other for other in dict.fromkeys(after) if other in numbers)


def _order(nodes: Sequence[GraphNode]) -> list[GraphNode]:
    """Return the nodes in the order of the file, each behind those that it waits for; none of a circle."""
    place = {node.number: at for at, node in enumerate(nodes)}
    waits = [len(node.after) for node in nodes]
    behind: dict[int, list[int]] = {}
    for at, node in enumerate(nodes):
        for other in node.after:
            behind.setdefault(place[other], []).append(at)
    ready = [at for at, count in enumerate(waits) if not count]
    order = []
    while ready:
        at = heapq.heappop(ready)
        order.append(nodes[at])
        for other in behind.get(at, ()):
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, other)
    return order


def _circle(nodes: Sequence[GraphNode], order: Sequence[GraphNode]) -> str:
    """Return a circle of nodes that wait for each other, as text."""
    ended = {node.number for node in order}
    left = {node.number: node for node in nodes if node.number not in ended}
    number, path = next(iter(left)), []
    while number not in path:
        path.append(number)
        number = next(other for other in left[number].after if other in left)
    return str(brief(" after ".join(map(str, [*path[path.index(number) :], number]))))
