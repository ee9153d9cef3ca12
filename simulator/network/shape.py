"""Shapes: the hops of a group added up link by link, the same for all groups whose members sit alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.cluster.cluster import Cluster
from simulator.cluster.node import NodeLayout, Route
from simulator.hardware.transport import TransportKind
from simulator.network.moves import KINDS, SWITCH, AllPairs, Moves


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
    first, *further = [(tuple(in_node), id(cluster.layout_of(node))) for node, in_node in slots.items()]
    return () if cluster.switches.dead or any(other != first for other in further) else first[0]


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
