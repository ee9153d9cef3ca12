"""Hops are added up by kinds; the loads are those of every hop alone, over the links of its route."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from simulator.cluster import build_cluster
from simulator.config import load_cluster
from simulator.errors import InputError
from simulator.network.collectives import OPERATIONS, algorithms, patterns
from simulator.network.moves import SWITCH, Hop, HopTable
from simulator.network.plan import LinkLoads, Phase
from simulator.network.steps import Send, step
from tests.support.grids import grid

CLUSTERS: dict[str, dict[str, Any]] = {
    "leaves of four nodes": {"name": "dgx_h100", "fabric": {"kind": "rail_fat_tree", "tiers": 3, "radix": 8}},
    "one leaf for a node": {"name": "dgx_a100", "fabric": {"kind": "fat_tree", "tiers": 2, "radix": 16}},
    "a card for several GPUs": {"name": "dgx1_v100"},
    "a missing GPU": {"name": "dgx_a100", "nodes": 5, "overrides": [{"gpu": "node1.gpu3", "missing": True}]},
    "a slow NIC": {"name": "dgx_a100", "nodes": 5, "overrides": [{"link": "node0.nic0", "bandwidth_scale": 0.5}]},
    "rails alone": {"name": "dgx_h100", "fabric": {"kind": "rail_only"}},
}


#: Members of a group among the ``n`` GPUs of five nodes of eight, of which one may be missing.
GROUPS: dict[str, Callable[[int], Sequence[int]]] = {
    "three nodes, backwards": lambda n: (*range(n - 8, n), *range(8, 15), *range(8)),
    "one of a node": lambda n: range(0, n, 8),
    "not whole nodes": lambda n: range(3, 19),
}


def test_of_hops_at_once_the_first_between_nodes_is_on_the_critical_path() -> None:
    """GPUs 0 to 7 are of one node. Without any hop there is no path."""
    built = build_cluster(load_cluster(CLUSTERS["one leaf for a node"]), 5)
    sends = [Send(0, 1, 1.0), Send(0, 8, 1.0), Send(0, 16, 1.0)]
    weights = [[hop.weight for hop in step(built, sends[:n]).hops] for n in range(4)]
    assert weights == [[], [1.0], [0.0, 1.0], [0.0, 1.0, 0.0]]


@pytest.mark.parametrize(("cluster", "group"), grid(CLUSTERS, GROUPS, every=3))
def test_loads_are_those_of_every_hop_alone(cluster: str, group: str) -> None:
    """Loads of a link are those of the hops that cross it, and latencies are of the critical path, link by link.

    This holds for all operations and algorithms that the group can use, but for hops to switches that sum up.
    """
    built = build_cluster(load_cluster(CLUSTERS[cluster]), 5)
    ranks = tuple(GROUPS[group](len(built.gpus)))
    compared = Counter[str]()
    for op in OPERATIONS:
        for algorithm, moves_of in algorithms(op).items():
            try:
                (pattern, *_), moves_of_phases = patterns(op, ranks, built, algorithm), moves_of(built, ranks)
            except InputError:
                continue
            for phase, moves in zip(pattern.legs, moves_of_phases, strict=True):
                hops = list(moves.hops)
                if any(SWITCH in (hop.sender, hop.receiver) for hop in hops):
                    continue
                expected, latency_s = defaultdict[int, float](float), 0.0
                for hop in hops:
                    for link, share in built.spread(hop.sender, hop.receiver, hop.nic):
                        expected[link] += share * hop.load
                        latency_s += share * hop.weight * built.links[link].latency_s
                loads = {link: load * phase.flow_bytes for link, load in phase.loads if load}
                assert loads == pytest.approx({link: load for link, load in expected.items() if load}, rel=1e-9)
                assert phase.link_latency_s == pytest.approx(latency_s, rel=1e-9)
                compared[op] += 1
    assert compared.keys() >= {"all_reduce", "all_to_all", "broadcast"}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_links_come_in_the_order_of_hops(cluster: str) -> None:
    built = build_cluster(load_cluster(CLUSTERS[cluster]), 5)
    ranks = tuple(range(len(built.gpus)))
    for algorithm in ("ring", "tree"):
        (pattern,) = patterns("all_reduce", ranks, built, algorithm)
        (moves,) = algorithms("all_reduce")[algorithm](built, ranks)
        assert pattern.legs[0].links[0] == built.spread(*next(iter(moves.hops))[:3])[0][0]


def test_hops_as_columns_are_the_hops() -> None:
    """A hop without a NIC, one to a switch, and one through NIC 0."""
    hops = [Hop(3, 1, None, 0.5, 0.0), Hop(2, SWITCH, None, 1.0, 1.0), Hop(1, 9, 0, 0.25, 0.5)]
    assert list(HopTable.from_hops(hops)) == hops
    assert list(HopTable.from_hops([])) == []


def test_loads_kept_as_arrays_are_pairs() -> None:
    """Two links, of which one carries nothing: as pairs both are there, as columns the loaded one alone."""
    pairs = ((4, 0.5), (7, 0.0))
    phase = Phase(1.0, pairs, 0.0)
    loads = LinkLoads(phase.columns[0], phase.columns[1])
    assert (len(loads), loads[0], tuple(loads), loads[1:]) == (1, (4, 0.5), pairs[:1], ())
    assert Phase(1.0, loads, 0.0) == Phase(1.0, pairs[:1], 0.0)
    assert hash(loads) == hash(pairs[:1])
