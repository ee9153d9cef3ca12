"""Shapes: the hops of a group added up link by link, the same for all groups whose members sit alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simulator.arrays import Bools, Floats, Ints, by_appearance, distinct, first_places, joined
from simulator.cluster.cluster import Cluster
from simulator.cluster.inner_routes import Route
from simulator.cluster.node import NodeLayout
from simulator.hardware.transport import TransportKind
from simulator.network.moves import KINDS, SWITCH, AllPairs, HopTable, Moves

#: Hops that are added up together: enough for arrays, and few enough for what is between to stay in caches.
HOPS_AT_ONCE = 1 << 15


class InsideLoads(NamedTuple):
    """Bytes per byte of message on links inside nodes, by the node of a shape and the position in its layout.

    Links come in the order of the first hops that cross them.
    """

    node: Ints
    position: Ints
    load: Floats


class NicLoads(NamedTuple):
    """Bytes per byte of message, and weights, from NIC ``nic_a`` of nodes ``a`` of a shape to ``nic_b`` of ``b``."""

    a: Ints
    nic_a: Ints
    b: Ints
    nic_b: Ints
    load: Floats
    weight: Floats


@dataclass(frozen=True, eq=False)
class Shape:
    """Hops of a group added up, on nodes 0, 1, 2 ... that stand for any others of the same layouts, one by one.

    ``inside``: of links of nodes, NIC ports among them. ``across``: between NICs. ``everywhere``: (NIC, NIC, bytes,
    weight) from each node to each other one. ``summed``: (nodes, NIC, bytes, weight) of what the fabric adds up, each
    way. ``hops`` counts the hops of the critical path by kind. ``link_latency_s`` is the latency of their links,
    without those between switches. ``sent`` is what all members together send, per byte of message.
    """

    moves: Moves
    inside: InsideLoads
    across: NicLoads
    summed: tuple[tuple[tuple[int, ...], int, float, float], ...]
    hops: tuple[tuple[TransportKind, float], ...]
    link_latency_s: float
    sent: float
    everywhere: tuple[tuple[int, int, float, float], ...] = ()


def shape_of(cluster: Cluster, moves: Moves, number: Mapping[int, int]) -> Shape:
    """Add up hops: loads link by link, latencies along the critical path. ``number``: of each node in the shape."""
    if isinstance(moves.hops, AllPairs) and (slots := _common_slots(cluster, moves.hops.ranks, number)):
        return _shape_of_pairs(cluster, moves, moves.hops, number, slots)
    table = moves.hops if isinstance(moves.hops, HopTable) else HopTable.from_hops(list(moves.hops))
    hops = _hop_kinds(cluster, table)
    number_of = np.zeros(cluster.n_nodes, dtype=np.int64)
    number_of[list(number)] = np.array(list(number.values()), dtype=np.int64)
    ends = number_of[hops.nodes[0]], number_of[hops.nodes[1]]
    path, latency_s = _critical_path(hops, table.weight)
    return Shape(
        moves,
        inside=_inside_loads(hops.ways, hops.kind, ends, table.load, len(number)),
        across=_across(hops, ends, table),
        summed=_summed(hops, ends, table),
        hops=path,
        link_latency_s=latency_s,
        sent=float(table.load[table.sender >= 0].sum()),
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

    Every pair of places is looked up once: in the first node, and from the first node to the last. Hops into the last
    stand for all that other nodes send, and for what these send into the first.
    """
    n, nodes = len(number), list(number)
    here, there = (np.array([cluster.end(node, slot) for slot in slots]) for node in (nodes[0], nodes[-1]))
    sender, receiver = (ends.reshape(-1) for ends in np.meshgrid(here, here, indexing="ij"))
    sender, receiver = sender[sender != receiver], receiver[sender != receiver]
    count = np.ones(len(sender))
    if n > 1:
        outward, inward = (ends.reshape(-1) for ends in np.meshgrid(here, there, indexing="ij"))
        sender, receiver = np.concatenate([sender, outward]), np.concatenate([receiver, inward])
        count = np.concatenate([count, np.full(len(outward), n - 1.0)])
    no_nic = np.full(len(sender), -1)
    table = HopTable(sender, receiver, no_nic, count * pairs.load, n * count * pairs.weight)
    hops = _hop_kinds(cluster, table)
    one = _inside_loads(hops.ways, hops.kind, (np.zeros_like(sender), np.zeros_like(sender)), table.load, 1)
    between: dict[tuple[int, int], float] = {}
    for kind in hops.kind[len(sender) - len(here) * len(there) :].tolist() if n > 1 else ():
        for way in hops.ways[kind]:
            if way.nics is not None:
                between[way.nics] = between.get(way.nics, 0.0) + way.share
    path, latency_s = _critical_path(hops, table.weight)
    nobody, nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
    return Shape(
        moves,
        inside=InsideLoads(np.repeat(np.arange(n), len(one.node)), np.tile(one.position, n), np.tile(one.load, n)),
        across=NicLoads(nobody, nobody, nobody, nobody, nothing, nothing),
        summed=(),
        hops=path,
        link_latency_s=latency_s,
        sent=len(pairs.ranks) * (len(pairs.ranks) - 1) * pairs.load,
        everywhere=tuple([(*nics, share * pairs.load, share * pairs.weight) for nics, share in between.items()]),
    )


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


class _HopKinds(NamedTuple):
    """Hops by kind: those of a ``kind`` are between equal places of nodes of equal kinds, and take the same ``ways``.

    ``nodes``: those in which hops begin, and those in which they end.
    """

    nodes: tuple[Ints, Ints]
    kind: Ints
    ways: list[list[_Way]]


def _hop_kinds(cluster: Cluster, table: HopTable) -> _HopKinds:
    """Return the kinds of hops; the ways of each are looked up once."""
    sender = np.where(table.sender == SWITCH, table.receiver, table.sender)
    receiver = np.where(table.receiver == SWITCH, table.sender, table.receiver)
    (node_a, slot_a), (node_b, slot_b) = cluster.located(sender), cluster.located(receiver)
    to_switch = (table.sender == SWITCH).astype(np.int64) - (table.receiver == SWITCH)
    node_kinds = cluster.way_kind_column
    kinds_of_ends = (node_kinds[node_a], node_kinds[node_b]) if node_kinds.any() else ()
    code = _code([*kinds_of_ends, slot_a, slot_b, node_a == node_b, to_switch, table.nic], len(sender))
    kinds = distinct(code)
    kind = np.searchsorted(kinds, code)
    ways = []
    for hop in first_places(kind, len(kinds)).tolist():
        a, b, nic = int(table.sender[hop]), int(table.receiver[hop]), int(table.nic[hop])
        routes = _routes(cluster, a, b, None if nic < 0 else nic)
        ways.append([_way(cluster, int(node_a[hop]), int(node_b[hop]), *route) for route in routes])
    return _HopKinds((node_a, node_b), kind, ways)


def _code(columns: Sequence[Ints | Bools], length: int) -> Ints:
    """Return a number for each row of ``columns``, which equal rows share: the columns are its digits."""
    code = np.zeros(length, dtype=np.int64)
    for column in columns:
        low, high = (int(column.min()), int(column.max())) if length else (0, 0)
        if low != high:
            code *= high - low + 1
            code += column
            code -= low
    return code


def _inside_loads(
    ways: Sequence[Sequence[_Way]], kind: Ints, ends: tuple[Ints, Ints], load: Floats, n_nodes: int
) -> InsideLoads:
    """Return what hops put on links inside nodes, added up; ``ends``: nodes where they begin and end."""
    entries = [
        [
            (end, position, way.share)
            for way in kind_ways
            for end, part in enumerate((way.out, way.back))
            for position in part
        ]
        for kind_ways in ways
    ]
    count = np.fromiter(map(len, entries), dtype=np.int64, count=len(entries))
    flat = [one for kind_entries in entries for one in kind_entries]
    end, position = (np.array([one[which] for one in flat], dtype=np.int64) for which in (0, 1))
    share = np.array([one[2] for one in flat], dtype=float)
    width = int(position.max(initial=0)) + 1
    total, is_crossed = np.zeros(n_nodes * width), np.zeros(n_nodes * width, dtype=bool)
    in_order = []
    for start in range(0, len(kind), HOPS_AT_ONCE):
        hops = slice(start, start + HOPS_AT_ONCE)
        hop, entry = _expanded(count, kind[hops])
        cell = np.stack([nodes[hops] for nodes in ends])[end[entry], hop] * width + position[entry]
        np.add.at(total, cell, share[entry] * load[hops][hop])
        new = cell[~is_crossed[cell]]
        in_order.append(new[by_appearance(new)[0]])
        is_crossed[new] = True
    crossed = joined(in_order)
    return InsideLoads(*np.divmod(crossed, width), total[crossed])


def _expanded(count: Ints, kind: Ints) -> tuple[Ints, Ints]:
    """Return hop and entry of everything that hops have, as ``count[kind]`` entries of each, kind after kind."""
    per_hop = count[kind]
    hop = np.repeat(np.arange(len(kind)), per_hop)
    first = np.cumsum(count) - count
    return hop, np.arange(len(hop)) + np.repeat(first[kind] - (np.cumsum(per_hop) - per_hop), per_hop)


def _across(hops: _HopKinds, ends: tuple[Ints, Ints], table: HopTable) -> NicLoads:
    """Return what goes from NIC to NIC."""
    entries = [[(*way.nics, way.share) for way in kind_ways if way.nics is not None] for kind_ways in hops.ways]
    hop, entry = _expanded(np.fromiter(map(len, entries), dtype=np.int64, count=len(entries)), hops.kind)
    flat = [one for kind_entries in entries for one in kind_entries]
    nic_a, nic_b = (np.array([one[which] for one in flat], dtype=np.int64)[entry] for which in (0, 1))
    share = np.array([one[2] for one in flat], dtype=float)[entry]
    return NicLoads(ends[0][hop], nic_a, ends[1][hop], nic_b, share * table.load[hop], share * table.weight[hop])


def _summed(
    hops: _HopKinds, ends: tuple[Ints, Ints], table: HopTable
) -> tuple[tuple[tuple[int, ...], int, float, float], ...]:
    """Return what NICs hand to switches that sum it up."""
    total: dict[tuple[int, int, int], tuple[float, float]] = {}
    for hop in np.flatnonzero((table.receiver == SWITCH) & (table.nic >= 0)).tolist():
        key = int(table.sender[hop]), int(ends[0][hop]), int(table.nic[hop])
        load, weight = total.get(key, (0.0, 0.0))
        total[key] = load + float(table.load[hop]), weight + float(table.weight[hop])
    summed: dict[tuple[int, float], tuple[list[int], float]] = {}
    for (_, node, nic), (load, weight) in total.items():
        nodes, weights = summed.get((nic, load), ([], 0.0))
        summed[nic, load] = [*nodes, node], weights + weight
    return tuple([(tuple(nodes), nic, load, weight) for (nic, load), (nodes, weight) in summed.items()])


def _critical_path(hops: _HopKinds, weight: Floats) -> tuple[tuple[tuple[TransportKind, float], ...], float]:
    """Return the weights of kinds of transport on the critical path, and the latency of its links inside nodes."""
    path: dict[TransportKind, float] = {}
    latency_s = 0.0
    for kind_ways, total in zip(hops.ways, np.bincount(hops.kind, weight, len(hops.ways)).tolist(), strict=True):
        for way in kind_ways if total else ():
            path[way.kind] = path.get(way.kind, 0.0) + total * way.share
            latency_s += total * way.share * way.latency_s
    return tuple([(kind, path[kind]) for kind in KINDS if kind in path]), latency_s


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
