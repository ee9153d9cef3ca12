"""Patterns: the loads of a collective on links, whatever its size.

An algorithm lists the hops of a group of ranks as `Moves`, one after another where it has real steps. Added up, each is
a `Shape`, the same for all groups whose members sit alike in their nodes. On the nodes of one group a shape is a
`Stage` of a `Pattern`. It holds the bytes on every link per byte of message, and the hops that the first byte makes.
`simulator.network.timing` makes it a `Plan` for a size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, get_args

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.cluster.cluster import Cluster
from simulator.cluster.node import NodeLayout, Route
from simulator.hardware.transport import TransportKind, Way

#: From the least to the most limiting: a hop is of the last kind that it crosses.
KINDS: tuple[TransportKind, ...] = get_args(TransportKind)
#: The end point that stands for switches that sum up and multicast. Without a NIC it is the NVSwitch of the node that
#: the other end is in. With one it is the switches of the fabric: they add up what all NICs of that number send, and
#: send back the sum.
SWITCH = -1


class Hop(NamedTuple):
    """A transfer between end points: GPUs, hosts' memory, or switches that sum up and multicast.

    It goes through NIC ``nic`` of both nodes if given. It carries ``load`` bytes per byte of message, and stands
    ``weight`` times on the critical path."""

    sender: int
    receiver: int
    nic: int | None
    load: float
    weight: float


@dataclass(frozen=True, eq=False)
class AllPairs:
    """Equal hops from each of ``ranks`` to each other one."""

    ranks: tuple[int, ...]
    load: float
    weight: float

    def __iter__(self) -> Iterator[Hop]:
        for a in self.ranks:
            for b in self.ranks:
                if a != b:
                    yield Hop(a, b, None, self.load, self.weight)


@dataclass(frozen=True, eq=False)
class Moves:
    """Hops that an algorithm makes on a group of ranks at one time; they advance in lock-step.

    ``local_share`` is the share of the message that each rank handles without a link. ``efficiency`` is the bandwidth
    reached, relative to a ring of the same load; ``counted``: the share of it that NCCL's tuner counts on. ``way``:
    what carries it out; of sends and receives, ``peers`` counts those of each rank. ``channels``: the rings or trees
    among which the message is split. ``software``: of a hop, relative to one of a ring. ``goes_on``: it is a further
    step of the kernel that made the moves before it, in the same protocol; else a kernel starts with it.
    """

    hops: AllPairs | Sequence[Hop]
    local_share: float = 0.0
    efficiency: float = 1.0
    way: Way = "protocols"
    peers: int = 0
    counted: float = 1.0
    channels: int = 1
    software: float = 1.0
    goes_on: bool = False

    @property
    def heads(self) -> int:
        """Number of parts of the message, each with a head, that switches sum up; 0 where they sum up nothing."""
        return self.channels if self.way == "in_switch" else 0

    @property
    def manner(self) -> tuple[object, ...]:
        """Everything but the hops that the time of a message depends on."""
        return (
            self.local_share,
            self.efficiency,
            self.way,
            self.peers,
            self.heads,
            self.counted,
            self.software,
            self.goes_on,
        )


@dataclass(frozen=True, eq=False)
class Shape:
    """Hops of a group added up, on nodes 0, 1, 2 ... that stand for any others of the same layouts, one by one.

    ``inside``: (node, position in its layout, bytes per byte of message) of links of nodes, NIC ports among them.
    ``across``: (node, NIC, node, NIC, bytes, weight) between NICs; ``everywhere``: (NIC, NIC, bytes, weight) from each
    node to each other one. ``summed``: (nodes, NIC, bytes, weight) of what the
    fabric adds up, each way. ``hops`` counts the hops of the critical path by
    kind; ``link_latency_s`` is the latency of their links, without those between switches. ``sent`` is what all members
    together send, per byte of message.
    """

    moves: Moves
    inside: tuple[tuple[int, int, float], ...]
    across: tuple[tuple[int, int, int, int, float, float], ...]
    summed: tuple[tuple[tuple[int, ...], int, float, float], ...]
    hops: tuple[tuple[TransportKind, float], ...]
    link_latency_s: float
    sent: float
    everywhere: tuple[tuple[int, int, float, float], ...] = ()

    @cached_property
    def columns(self) -> tuple[Ints, Ints, Floats]:
        """Nodes, positions and bytes of ``inside``, an array of each."""
        nodes, positions, loads = zip(*self.inside, strict=True) if self.inside else ((), (), ())
        return np.array(nodes, dtype=np.int64), np.array(positions, dtype=np.int64), np.array(loads, dtype=float)


@dataclass(frozen=True, eq=False)
class Stage:
    """Moves on a group of ranks of a cluster.

    Phases have as reference flow the one on the tightest link: it carries ``flow_bytes`` per byte of message, and
    ``links[i]`` carries ``load[i]`` of that. ``line_s`` holds, per kind of link, the seconds per byte of message that
    its busiest link needs at line rate. ``kind`` is the transport that sets the pace, the last in `KINDS` that is
    crossed. ``hops`` and ``link_latency_s`` (of all links) are as in `Shape`.
    """

    moves: Moves
    kind: TransportKind
    links: Ints
    load: Floats
    flow_bytes: float
    line_s: tuple[tuple[TransportKind, float], ...]
    hops: tuple[tuple[TransportKind, float], ...]
    link_latency_s: float

    @cached_property
    def loads(self) -> tuple[tuple[int, float], ...]:
        """Links, and the load on each."""
        return tuple(zip(self.links.tolist(), self.load.tolist(), strict=True))

    @property
    def timing(self) -> tuple[object, ...]:
        """Everything that the time of a message on idle links depends on.

        Latencies are without their last digits, which depend on the order of a sum over hops."""
        latency = float(f"{self.link_latency_s:.12e}")
        return (self.kind, self.flow_bytes, self.line_s, self.hops, latency, self.moves.manner)


@dataclass(frozen=True, eq=False)
class Pattern:
    """An algorithm on a group of ranks of a cluster: its stages, one after another. ``sent`` is what all members
    together send, per byte of message; ``channels`` are those of the stage that has most."""

    algorithm: str
    stages: tuple[Stage, ...]
    sent: float
    channels: int

    @property
    def timing(self) -> tuple[object, ...]:
        """Everything that the time of a message on idle links depends on, stage by stage."""
        return (self.algorithm, *[stage.timing for stage in self.stages])


def shape_of(cluster: Cluster, moves: Moves, number: Mapping[int, int]) -> Shape:
    """Add up hops: loads link by link, latencies along the critical path. ``number``: of each node in the shape."""
    if isinstance(moves.hops, AllPairs) and (slots := _common_slots(cluster, moves.hops.ranks, number)):
        return _shape_of_pairs(cluster, moves, moves.hops, number, slots)
    total: dict[tuple[int, int, int | None], tuple[float, float]] = {}
    for sender, receiver, nic, load, weight in moves.hops:
        before = total.get((sender, receiver, nic), (0.0, 0.0))
        total[sender, receiver, nic] = before[0] + load, before[1] + weight
    ways, added = _WaysByPlace(cluster), _AddedUp()
    across: dict[tuple[int, int, int, int], tuple[float, float]] = {}
    summed: dict[tuple[int, float], tuple[tuple[int, ...], float]] = {}
    for (sender, receiver, nic), (load, weight) in total.items():
        node_a, node_b, all_ways = ways.between(sender, receiver, nic)
        a, b = number[node_a], number[node_b]
        for way in all_ways:
            part, stands = way.share * load, way.share * weight
            if way.nics is not None:
                ends = a, way.nics[0], b, way.nics[1]
                before = across.get(ends, (0.0, 0.0))
                across[ends] = before[0] + part, before[1] + stands
            elif receiver == SWITCH and nic is not None:
                nodes, weights = summed.get((nic, part), ((), 0.0))
                summed[nic, part] = (*nodes, a), weights + stands
            added.add_loads(a, way.out, part)
            added.add_loads(b, way.back, part)
            added.add_weight(way, stands)
    return added.shape(
        moves,
        across=tuple([(*ends, *both) for ends, both in across.items()]),
        summed=tuple([(nodes, nic, load, weight) for (nic, load), (nodes, weight) in summed.items()]),
        sent=sum([load for (sender, _, _), (load, _) in total.items() if sender >= 0]),
    )


def _common_slots(cluster: Cluster, ranks: Sequence[int], nodes: Mapping[int, int]) -> tuple[int, ...]:
    """Return the places that ``ranks`` have in each of ``nodes``, where these are of one kind and ranks sit alike."""
    slots: dict[int, list[int]] = {node: [] for node in nodes}
    for rank in ranks:
        node, slot = cluster.locate(rank)
        slots[node].append(slot)
    first, *others = [(tuple(in_node), id(cluster.layout_of(node))) for node, in_node in slots.items()]
    return () if cluster.switches.dead or any(other != first for other in others) else first[0]


def _shape_of_pairs(
    cluster: Cluster, moves: Moves, pairs: AllPairs, number: Mapping[int, int], slots: tuple[int, ...]
) -> Shape:
    """Return the shape of equal hops from each to each other one, of ranks that sit alike in all nodes.

    Every pair of places is looked up once: in the first node, and from the first node to the second.
    """
    ways, added = _WaysByPlace(cluster), _AddedUp()
    n, nodes = len(number), list(number)
    here, there = ([cluster.end(node, slot) for slot in slots] for node in (nodes[0], nodes[-1]))
    inside: dict[int, float] = {}
    between: dict[tuple[int, int], tuple[float, float]] = {}
    hops = [(a, b, 1) for a in here for b in here if a != b]
    hops += [(a, b, n - 1) for a in here for b in there] if n > 1 else []
    for sender, receiver, count in hops:
        for way in ways.between(sender, receiver, None)[2]:
            part, stands = count * way.share * pairs.load, n * count * way.share * pairs.weight
            for position in (*way.out, *way.back):
                inside[position] = inside.get(position, 0.0) + part
            if way.nics is not None:
                before = between.get(way.nics, (0.0, 0.0))
                between[way.nics] = before[0] + way.share * pairs.load, before[1] + way.share * pairs.weight
            added.add_weight(way, stands)
    for node in range(n):
        for position, load in inside.items():
            added.add_loads(node, (position,), load)
    sent = len(pairs.ranks) * (len(pairs.ranks) - 1) * pairs.load
    everywhere = tuple([(*nics, *both) for nics, both in between.items()])
    return added.shape(moves, across=(), summed=(), sent=sent, everywhere=everywhere)


class _Way(NamedTuple):
    """Links that a ``share`` of a hop crosses, ``out`` of its first node and ``back`` into its second.

    ``nics``: by which it leaves the one and reaches the other, where they are two. ``kind`` is the last of `KINDS` that
    it crosses, ``latency_s`` that of all of these links.
    """

    out: Route
    back: Route
    nics: tuple[int, int] | None
    share: float
    kind: TransportKind
    latency_s: float


class _AddedUp:
    """Loads of links inside nodes, and the critical path, added up hop by hop."""

    def __init__(self) -> None:
        self._inside: dict[tuple[int, int], float] = {}
        self._path: dict[TransportKind, float] = {}
        self._latency_s = 0.0

    def add_loads(self, node: int, positions: Route, load: float) -> None:
        """Add bytes per byte of message to the links in these positions of a node."""
        inside = self._inside
        for position in positions:
            inside[node, position] = inside.get((node, position), 0.0) + load

    def add_weight(self, way: _Way, weight: float) -> None:
        """Let a way stand so many times on the critical path."""
        if weight:
            self._path[way.kind] = self._path.get(way.kind, 0.0) + weight
            self._latency_s += weight * way.latency_s

    def shape(
        self,
        moves: Moves,
        across: tuple[tuple[int, int, int, int, float, float], ...],
        summed: tuple[tuple[tuple[int, ...], int, float, float], ...],
        sent: float,
        everywhere: tuple[tuple[int, int, float, float], ...] = (),
    ) -> Shape:
        """Return the shape, with what goes between nodes and what all send together."""
        inside = tuple([(*at, load) for at, load in self._inside.items()])
        path = tuple(self._path.items())
        return Shape(moves, inside, across, summed, path, self._latency_s, sent, everywhere)


class _WaysByPlace:
    """The ways of hops, looked up once for all between equal places of nodes of equal kinds."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._ways: dict[tuple[object, ...], list[_Way]] = {}
        self._kinds = cluster.way_kinds

    def between(self, sender: int, receiver: int, nic: int | None) -> tuple[int, int, list[_Way]]:
        """Return the nodes of a hop, and its ways."""
        cluster = self._cluster
        node_a, slot_a = cluster.locate(sender if sender != SWITCH else receiver)
        node_b, slot_b = cluster.locate(receiver if receiver != SWITCH else sender)
        to_switch = (sender == SWITCH) - (receiver == SWITCH)
        key = self._kinds[node_a], slot_a, self._kinds[node_b], slot_b, node_a == node_b, to_switch, nic
        ways = self._ways.get(key)
        if ways is None:
            routes = _routes(cluster, sender, receiver, nic)
            ways = self._ways[key] = [_way(cluster, node_a, node_b, *route) for route in routes]
        return node_a, node_b, ways


#: Links out of the first node and into the second, the NICs between the two if they are two, and the share of the hop.
_HopRoute = tuple[Route, Route, tuple[int, int] | None, float]


def _way(
    cluster: Cluster, node_a: int, node_b: int, out: Route, back: Route, nics: tuple[int, int] | None, share: float
) -> _Way:
    crossed = [cluster.layout_of(node_a).edges[position] for position in out]
    crossed += [cluster.layout_of(node_b).edges[position] for position in back]
    kinds = [edge.kind for edge in crossed]
    kind = next(kind for kind in reversed(KINDS) if kind in kinds)
    return _Way(out, back, nics, share, kind, sum([edge.latency_s for edge in crossed]))


def _routes(cluster: Cluster, sender: int, receiver: int, nic: int | None) -> list[_HopRoute]:
    if SWITCH in (sender, receiver):
        node, slot = cluster.locate(max(sender, receiver))
        layout = cluster.layout_of(node)
        if receiver == SWITCH:
            out = _link(layout, f"gpu{slot}", "nvswitch") if nic is None else layout.out(slot, nic)
            return [(out, (), None, 1.0)]
        back = _link(layout, "nvswitch", f"gpu{slot}") if nic is None else layout.back(nic, slot)
        return [((), back, None, 1.0)]
    (a, slot_a), (b, slot_b) = cluster.locate(sender), cluster.locate(receiver)
    on_a, on_b = cluster.layout_of(a), cluster.layout_of(b)
    if a == b:
        return [(on_a.between[slot_a, slot_b], (), None, 1.0)]
    pairs = cluster.nics_between(a, slot_a, b, slot_b, nic)
    return [(on_a.out(slot_a, nics[0]), on_b.back(nics[1], slot_b), nics, 1 / len(pairs)) for nics in pairs]


def _link(layout: NodeLayout, src: str, dst: str) -> Route:
    return (next(position for position, edge in enumerate(layout.edges) if (edge.src, edge.dst) == (src, dst)),)


def placed(algorithm: str, shapes: Sequence[Shape], cluster: Cluster, nodes: Sequence[int]) -> Pattern:
    """Return the pattern of an algorithm from its shapes, with their node i on ``nodes[i]``."""
    return Pattern(
        algorithm=algorithm,
        stages=tuple([_placed_stage(shape, cluster, nodes) for shape in shapes]),
        sent=sum([shape.sent for shape in shapes]),
        channels=max([shape.moves.channels for shape in shapes]),
    )


def _placed_stage(shape: Shape, cluster: Cluster, nodes: Sequence[int]) -> Stage:
    """Return the stage of a shape. It is worked out once for all nodes that are of the same kinds, one by one.

    They are alike in all that it depends on, and the trunks between them are the same. Only the links inside differ.
    """
    key = (shape, tuple([cluster.node_kinds[node] for node in nodes]))
    inside = _links_inside(shape, cluster, nodes)
    stage: Stage | None = cluster.memo.get(key)
    if stage is None:
        stage = cluster.memo[key] = _stage(shape, cluster, nodes, inside)
        return stage
    return replace(stage, links=np.concatenate((inside, stage.links[len(inside) :])))


def _links_inside(shape: Shape, cluster: Cluster, nodes: Sequence[int]) -> Ints:
    """Return the links of ``shape.inside`` on these nodes."""
    node_of, positions, _ = shape.columns
    return np.array([cluster.first_link[node] for node in nodes], dtype=np.int64)[node_of] + positions


def _stage(shape: Shape, cluster: Cluster, nodes: Sequence[int], inside: Ints) -> Stage:
    links = cluster.links
    trunks: dict[int, float] = {}
    link_latency_s = shape.link_latency_s
    leaves = [cluster.switches.leaves[node] for node in nodes]
    between = [
        (leaves[a][nic_a], leaves[b][nic_b], nodes[a], nic_a, nodes[b], nic_b, load, weight)
        for a, nic_a, b, nic_b, load, weight in shape.across
    ]
    for one in shape.everywhere:
        between += _between_leaves(leaves, nodes, *one)
    for start, goal, a, nic_a, b, nic_b, load, weight in between:
        if start == goal:
            continue
        for index, share in cluster.trunks_between(a, nic_a, b, nic_b):
            trunks[index] = trunks.get(index, 0.0) + share * load
            link_latency_s += share * weight * links[index].latency_s
    for slots, nic, load, weight in shape.summed:
        # The leaf of the first node is the root of the tree; what several leaves send is one sum from where they meet.
        root, other_nodes = nodes[slots[0]], [nodes[slot] for slot in slots[1:]]
        up = [cluster.trunks_between(node, nic, root, nic) for node in other_nodes]
        down = [cluster.trunks_between(root, nic, node, nic) for node in other_nodes]
        shares: dict[int, float] = {}
        for way in (*up, *down):
            for index, share in way:
                shares[index] = max(shares.get(index, 0.0), share)
        for index, share in shares.items():
            trunks[index] = trunks.get(index, 0.0) + share * load
        farthest_s = max([sum([share * links[index].latency_s for index, share in way]) for way in up])
        link_latency_s += 2 * weight * farthest_s
    crossed = np.concatenate((inside, np.array(list(trunks), dtype=np.int64)))
    loads = np.concatenate((shape.columns[2], np.array(list(trunks.values()))))
    busy_s, longest_s = loads / cluster.bandwidths_Bps[crossed], np.zeros(len(KINDS))
    np.maximum.at(longest_s, cluster.kinds[crossed], busy_s)
    kinds = np.flatnonzero(longest_s).tolist()
    flow_bytes = float(loads[np.argmax(busy_s)])
    return Stage(
        moves=shape.moves,
        kind=KINDS[kinds[-1]],
        links=crossed,
        load=loads / flow_bytes,
        flow_bytes=flow_bytes,
        line_s=tuple([(KINDS[kind], float(longest_s[kind])) for kind in kinds]),
        hops=shape.hops,
        link_latency_s=link_latency_s,
    )


def _between_leaves(
    leaves: Sequence[tuple[str, ...]], nodes: Sequence[int], nic_a: int, nic_b: int, load: float, weight: float
) -> Iterator[tuple[str, str, int, int, int, int, float, float]]:
    """Yield what nodes send from one NIC to another NIC of each other node, added up by the leaves of the NICs.

    The first node under each leaf stands for all.
    """
    starts: dict[str, list[int]] = {}
    goals: dict[str, list[int]] = {}
    for under, nic in ((starts, nic_a), (goals, nic_b)):
        for node, on_node in zip(nodes, leaves, strict=True):
            under.setdefault(on_node[nic], []).append(node)
    for start, senders in starts.items():
        for goal, receivers in goals.items():
            count = len(senders) * len(receivers) - len(set(senders).intersection(receivers))
            yield start, goal, senders[0], nic_a, receivers[0], nic_b, count * load, count * weight
