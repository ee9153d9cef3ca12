"""Hops are added up by kinds; the loads are those of every hop alone, over the links of its route."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.cluster import build_cluster
from simulator.config import load_cluster
from simulator.network.collectives import algorithms, patterns
from simulator.network.moves import SWITCH, Hop, HopTable
from simulator.network.plan import LinkLoads, Phase

CLUSTERS: dict[str, dict[str, Any]] = {
    "leaves of four nodes": {"name": "dgx_h100", "fabric": {"kind": "rail_fat_tree", "tiers": 3, "radix": 8}},
    "one leaf for a node": {"name": "dgx_a100", "fabric": {"kind": "fat_tree", "tiers": 2, "radix": 16}},
    "a card for several GPUs": {"name": "dgx1_v100"},
    "a missing GPU": {"name": "dgx_a100", "nodes": 5, "overrides": [{"gpu": "node1.gpu3", "missing": True}]},
}


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_loads_are_those_of_every_hop_alone(cluster: dict[str, Any], algorithm: str) -> None:
    """Five nodes, in an order that turns back: on each link is what the hops put there that cross it."""
    built = build_cluster(load_cluster(cluster), 5)
    ranks = (*range(8, len(built.gpus)), *range(8))
    (pattern,) = patterns("all_reduce", ranks, built, algorithm)
    (moves,) = algorithms("all_reduce")[algorithm](built, ranks)
    expected: dict[int, float] = {}
    for hop in moves.hops:
        for link, share in built.spread(hop.sender, hop.receiver, hop.nic):
            expected[link] = expected.get(link, 0.0) + share * hop.load
    (stage,) = pattern.stages
    loads = {link: load * stage.flow_bytes for link, load in stage.loads}
    assert loads == pytest.approx(expected, rel=1e-12)
    assert stage.links[0] == built.spread(*next(iter(moves.hops))[:3])[0][0]  # links come in the order of hops


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
