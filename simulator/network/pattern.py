"""Patterns: the loads of a collective on links, whatever its size.

An algorithm lists the hops of a group of ranks as `Moves`, one after another where it has real steps. Added up, each is
a `Shape`, the same for all groups whose members sit alike in their nodes. On the nodes of one group a shape is a
`Leg` of a `Pattern`. It holds the bytes on every link per byte of message, and the hops that the first byte
makes. `simulator.network.timing` makes it a `Phase` of a `Plan` for a size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simulator.arrays import Floats, Ints, distinct, first_places
from simulator.cluster.cluster import Cluster
from simulator.hardware.transport import TransportKind
from simulator.network.moves import KINDS, Moves
from simulator.network.plan import LinkLoads
from simulator.network.shape import NicLoads, Shape


@dataclass(frozen=True, eq=False)
class Leg:
    """Moves on a group of ranks of a cluster, for messages of any size.

    Their reference flow is the one on the tightest link, of several on the first that is crossed. It carries
    ``flow_bytes`` per byte of message, and ``links[i]`` carries ``load[i]`` of that. ``line_s`` holds, per kind of
    link, the seconds per byte of message that its busiest link needs at line rate. ``kind`` is the transport that sets
    the pace, the last in `KINDS` that is crossed. ``hops`` and ``link_latency_s`` (of all links) are as in `Shape`.
    """

    moves: Moves
    kind: TransportKind
    links: Ints
    load: Floats
    flow_bytes: float
    line_s: tuple[tuple[TransportKind, float], ...]
    hops: tuple[tuple[TransportKind, float], ...]
    link_latency_s: float

    @property
    def loads(self) -> LinkLoads:
        """Links, and the load on each."""
        return LinkLoads(self.links, self.load)

    @property
    def timing(self) -> tuple[object, ...]:
        """Everything that the time of a message on idle links depends on.

        Latencies are without their last digits, which depend on the order of a sum over hops."""
        latency = float(f"{self.link_latency_s:.12e}")
        return (self.kind, self.flow_bytes, self.line_s, self.hops, latency, self.moves.manner)


@dataclass(frozen=True, eq=False)
class Pattern:
    """An algorithm on a group of ranks of a cluster: its legs, one after another. ``sent`` is what all members
    together send, per byte of message; ``channels`` are those of the leg that has most."""

    algorithm: str
    legs: tuple[Leg, ...]
    sent: float
    channels: int

    @property
    def timing(self) -> tuple[object, ...]:
        """Everything that the time of a message on idle links depends on, leg by leg."""
        return (self.algorithm, *[leg.timing for leg in self.legs])


def place_pattern(algorithm: str, shapes: Sequence[Shape], cluster: Cluster, nodes: Sequence[int]) -> Pattern:
    """Return the pattern of an algorithm from its shapes, with their node i on ``nodes[i]``."""
    return Pattern(
        algorithm=algorithm,
        legs=tuple([_placed_leg(shape, cluster, nodes) for shape in shapes]),
        sent=sum([shape.sent for shape in shapes]),
        channels=max([shape.moves.channels for shape in shapes]),
    )


def _placed_leg(shape: Shape, cluster: Cluster, nodes: Sequence[int]) -> Leg:
    """Return the leg of a shape. It is worked out once for all nodes that are of the same kinds, one by one.

    They are alike in all that it depends on, and the trunks between them are the same. Only the links inside differ.
    """
    key = (shape, np.array(cluster.node_kinds)[list(nodes)].tobytes())
    inside = _links_inside(shape, cluster, nodes)
    leg: Leg | None = cluster.memo.get(key)
    if leg is None:
        leg = cluster.memo[key] = _leg(shape, cluster, nodes, inside)
        return leg
    return replace(leg, links=np.concatenate((inside, leg.links[len(inside) :])))


def _links_inside(shape: Shape, cluster: Cluster, nodes: Sequence[int]) -> Ints:
    """Return the links of ``shape.inside`` on these nodes."""
    return cluster.first_links[list(nodes)][shape.inside.node] + shape.inside.position


def _leg(shape: Shape, cluster: Cluster, nodes: Sequence[int], inside: Ints) -> Leg:
    links = cluster.links
    trunks: dict[int, float] = {}
    link_latency_s = shape.link_latency_s
    leaves = [cluster.switches.leaves[node] for node in nodes]
    between = list(_between_nics(shape.across, cluster, nodes))
    for one in shape.everywhere:
        between += _between_leaves(leaves, nodes, *one)
    for a, nic_a, b, nic_b, load, weight in between:
        for index, share, latency_s in _ways(cluster, a, nic_a, b, nic_b):
            trunks[index] = trunks.get(index, 0.0) + share * load
            link_latency_s += share * weight * latency_s
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
    loads = np.concatenate((shape.inside.load, np.array(list(trunks.values()))))
    busy_s, longest_s = loads / cluster.bandwidths_Bps[crossed], np.zeros(len(KINDS))
    np.maximum.at(longest_s, cluster.kinds[crossed], busy_s)
    kinds = np.flatnonzero(longest_s).tolist()
    flow_bytes = float(loads[np.argmax(busy_s)])
    return Leg(
        moves=shape.moves,
        kind=KINDS[kinds[-1]],
        links=crossed,
        load=loads / flow_bytes,
        flow_bytes=flow_bytes,
        line_s=tuple([(KINDS[kind], float(longest_s[kind])) for kind in kinds]),
        hops=shape.hops,
        link_latency_s=link_latency_s,
    )


def _ways(cluster: Cluster, a: int, nic_a: int, b: int, nic_b: int) -> tuple[tuple[int, float, float], ...]:
    """Return the trunks between two NICs: index, share of what goes there, latency. A cluster keeps them by leaves."""
    key = "ways", cluster.switches.leaves[a][nic_a], cluster.switches.leaves[b][nic_b]
    ways: tuple[tuple[int, float, float], ...] | None = cluster.memo.get(key)
    if ways is None:
        spread = cluster.trunks_between(a, nic_a, b, nic_b)
        ways = cluster.memo[key] = tuple([(index, share, cluster.links[index].latency_s) for index, share in spread])
    return ways


#: What goes between two NICs: node, NIC, node, NIC, bytes and weight.
_NicPair = tuple[int, int, int, int, float, float]


def _between_nics(across: NicLoads, cluster: Cluster, nodes: Sequence[int]) -> Iterator[_NicPair]:
    """Yield what goes between NICs under different leaves, added up by leaves.

    The first two NICs under each two leaves stand for all.
    """
    at = np.array(nodes, dtype=np.int64)
    start = cluster.leaf_numbers[at[across.a], across.nic_a]
    goal = cluster.leaf_numbers[at[across.b], across.nic_b]
    apart = np.flatnonzero(start != goal)
    code = start[apart] * (int(cluster.leaf_numbers.max(initial=0)) + 1) + goal[apart]
    pairs = distinct(code)
    pair = np.searchsorted(pairs, code)
    load, weight = (np.bincount(pair, one[apart], len(pairs)) for one in (across.load, across.weight))
    first = apart[first_places(pair, len(pairs))]
    ends = (at[across.a[first]], across.nic_a[first], at[across.b[first]], across.nic_b[first], load, weight)
    yield from zip(*[column[np.argsort(first)].tolist() for column in ends], strict=True)


def _between_leaves(
    leaves: Sequence[tuple[str, ...]], nodes: Sequence[int], nic_a: int, nic_b: int, load: float, weight: float
) -> Iterator[_NicPair]:
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
            if start != goal:
                yield senders[0], nic_a, receivers[0], nic_b, count * load, count * weight
