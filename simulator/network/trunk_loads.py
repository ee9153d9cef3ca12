"""Loads of shapes on the trunks between switches, for all legs of a pattern at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from simulator.arrays import Floats, Ints, by_appearance, distinct, first_places
from simulator.cluster.cluster import Cluster
from simulator.network.shape import Shape


class CrossedTrunks(NamedTuple):
    """Trunks in the order in which they are first crossed, with the bytes on each per byte of message.

    ``latency_s``: of all links on the critical path, those inside nodes too.
    """

    trunks: Ints
    load: Floats
    latency_s: float


class _NicPairs(NamedTuple):
    """Bytes and weights between two NICs, which are cabled to different switches; ``leg`` ascends."""

    leg: Ints
    a: Ints
    nic_a: Ints
    b: Ints
    nic_b: Ints
    load: Floats
    weight: Floats


def crossed_trunks(shapes: Sequence[Shape], cluster: Cluster, nodes: Ints) -> list[CrossedTrunks]:
    """Return the trunks that each of ``shapes`` crosses, with its node i on ``nodes[i]``."""
    if not shapes:
        return []
    latency_s = np.array([shape.link_latency_s for shape in shapes])
    pairs = _nic_pairs(shapes, cluster, nodes)
    ways = [_ways(cluster, *ends) for ends in zip(*[column.tolist() for column in pairs[1:5]], strict=True)]
    counts = [len(trunks) for trunks, _, _ in ways]
    nothing = np.zeros(0)
    trunk = np.concatenate([np.zeros(0, dtype=np.int64), *[trunks for trunks, _, _ in ways]])
    share = np.concatenate([nothing, *[shares for _, shares, _ in ways]])
    trunk_latency_s = np.concatenate([nothing, *[latencies for _, _, latencies in ways]])
    leg = np.repeat(pairs.leg, counts)
    load, weight = (np.repeat(column, counts) for column in (pairs.load, pairs.weight))
    np.add.at(latency_s, leg, share * weight * trunk_latency_s)  # one after another, as the order decides last digits
    first, place = by_appearance(leg * len(cluster.links) + trunk)
    loads: Floats = np.bincount(place, share * load, len(first)).astype(np.float64, copy=False)
    legs, trunks = leg[first], trunk[first]
    cuts = np.searchsorted(legs, np.arange(1, len(shapes)))
    crossings = [
        CrossedTrunks(trunks=leg_trunks, load=leg_loads, latency_s=leg_latency_s)
        for leg_trunks, leg_loads, leg_latency_s in zip(
            np.split(trunks, cuts), np.split(loads, cuts), latency_s.tolist(), strict=True
        )
    ]
    return [
        _with_sums(one, shape, cluster, nodes.tolist()) if shape.summed else one
        for one, shape in zip(crossings, shapes, strict=True)
    ]


def _ways(cluster: Cluster, a: int, nic_a: int, b: int, nic_b: int) -> tuple[Ints, Floats, Floats]:
    """Return the trunks between two NICs: index, share of what goes there, latency. A cluster keeps them by leaves."""
    leaves = cluster.switches.leaves
    key = "ways", leaves[a][nic_a], leaves[b][nic_b]
    ways: tuple[Ints, Floats, Floats] | None = cluster.memo.get(key)
    if ways is None:
        spread = cluster.trunks_between(a, nic_a, b, nic_b)
        trunks = np.array([index for index, _ in spread], dtype=np.int64)
        share = np.array([share for _, share in spread], dtype=float)
        latency_s = np.array([cluster.links[index].latency_s for index, _ in spread], dtype=float)
        ways = cluster.memo[key] = trunks, share, latency_s
    return ways


def _nic_pairs(shapes: Sequence[Shape], cluster: Cluster, nodes: Ints) -> _NicPairs:
    """Return what goes between NICs under different leaves, added up by leaves, leg by leg."""
    across = _pairs_across(shapes, cluster, nodes)
    everywhere = [
        (leg, *pair)
        for leg, shape in enumerate(shapes)
        for one in shape.everywhere
        for pair in _between_leaves(cluster, nodes.tolist(), *one)
    ]
    if not everywhere:
        return across
    both = zip(across, map(np.array, zip(*everywhere, strict=True)), strict=True)
    columns = [np.concatenate(parts) for parts in both]
    order = np.argsort(columns[0], kind="stable")
    return _NicPairs(*[column[order] for column in columns])


def _pairs_across(shapes: Sequence[Shape], cluster: Cluster, nodes: Ints) -> _NicPairs:
    """Return what shapes list as ``across``, added up by leaves: the first two NICs under each two stand for all."""
    across = zip(*[shape.across for shape in shapes], strict=True)
    a, nic_a, b, nic_b, load, weight = (np.concatenate(column) for column in across)
    leg = np.repeat(np.arange(len(shapes)), [len(shape.across.a) for shape in shapes])
    start, goal = cluster.leaf_numbers[nodes[a], nic_a], cluster.leaf_numbers[nodes[b], nic_b]
    apart = np.flatnonzero(start != goal)
    n_leaves = int(cluster.leaf_numbers.max(initial=0)) + 1
    code = (leg[apart] * n_leaves + start[apart]) * n_leaves + goal[apart]
    pairs = distinct(code)
    pair = np.searchsorted(pairs, code)
    load, weight = (np.bincount(pair, one[apart], len(pairs)) for one in (load, weight))
    first = apart[first_places(pair, len(pairs))]
    ends = leg[first], nodes[a[first]], nic_a[first], nodes[b[first]], nic_b[first], load, weight
    order = np.argsort(first)
    in_order: list[Any] = [column[order] for column in ends]
    return _NicPairs(*in_order)


def _between_leaves(
    cluster: Cluster, nodes: Sequence[int], nic_a: int, nic_b: int, load: float, weight: float
) -> Iterator[tuple[int, int, int, int, float, float]]:
    """Yield what nodes send from one NIC to another NIC of each other node, added up by the leaves of the NICs.

    The first node under each leaf stands for all.
    """
    starts: dict[str, list[int]] = {}
    goals: dict[str, list[int]] = {}
    for under, nic in ((starts, nic_a), (goals, nic_b)):
        for node in nodes:
            under.setdefault(cluster.switches.leaves[node][nic], []).append(node)
    for start, senders in starts.items():
        for goal, receivers in goals.items():
            count = len(senders) * len(receivers) - len(set(senders).intersection(receivers))
            if start != goal:
                yield senders[0], nic_a, receivers[0], nic_b, count * load, count * weight


def _with_sums(crossed: CrossedTrunks, shape: Shape, cluster: Cluster, nodes: Sequence[int]) -> CrossedTrunks:
    """Return what a shape crosses with what switches add up on the way.

    The leaf of the first node is the root of the tree. What several leaves send is one sum from where they meet.
    """
    trunks = dict(zip(crossed.trunks.tolist(), crossed.load.tolist(), strict=True))
    latency_s = crossed.latency_s
    for slots, nic, load, weight in shape.summed:
        root, other_nodes = nodes[slots[0]], [nodes[slot] for slot in slots[1:]]
        up = [cluster.trunks_between(node, nic, root, nic) for node in other_nodes]
        down = [cluster.trunks_between(root, nic, node, nic) for node in other_nodes]
        shares: dict[int, float] = {}
        for way in (*up, *down):
            for index, share in way:
                shares[index] = max(shares.get(index, 0.0), share)
        for index, share in shares.items():
            trunks[index] = trunks.get(index, 0.0) + share * load
        farthest_s = max([sum([share * cluster.links[index].latency_s for index, share in way]) for way in up])
        latency_s += 2 * weight * farthest_s
    return CrossedTrunks(np.array(list(trunks), dtype=np.int64), np.array(list(trunks.values())), latency_s)
