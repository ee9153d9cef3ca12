"""Equal hops between all pairs of ranks are added up by pairs of places, as each hop alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simulator.cluster import build_cluster
from simulator.config import load_cluster
from simulator.costs import Costs
from simulator.network import direct
from simulator.network.collectives import plan
from simulator.network.pattern import place_pattern
from simulator.network.shape import shape_of
from tests.support.clusters import link_bytes

#: Two GPUs on PCIe in each node, with a card each. A leaf of a rail has two ports down and two up.
RAILS: dict[str, Any] = {
    "name": "rails",
    "node": {
        "gpus": {"type": "ideal", "count": 2},
        "pcie": {"generation": 4, "gpus_per_switch": 1},
        "nics": {"count": 2, "bandwidth_bps": 80e9, "latency_s": 2e-6},
    },
    "fabric": {"kind": "rail_fat_tree", "tiers": 3, "radix": 4},
}
CLUSTERS: dict[str, dict[str, Any]] = {
    "leaves of four nodes": {"name": "dgx_a100", "fabric": {"kind": "rail_fat_tree", "tiers": 3, "radix": 8}},
    "nodes across leaves": {"name": "dgx_a100", "fabric": {"kind": "fat_tree", "tiers": 2, "radix": 40}},
    "cards for several GPUs": {"name": "dgx1_v100"},
    "no NVLink": {"name": "pcie_l40s"},
    "rails of a card for each GPU": RAILS,
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_equal_hops_are_added_up_as_each_alone(cluster: dict[str, Any]) -> None:
    """Five nodes: bytes of links and the latency of the path are those of hops that are listed."""
    built, nodes = build_cluster(load_cluster(cluster), 5), range(5)
    number = {node: node for node in nodes}
    (moves,) = direct.all_to_all(built, tuple(range(len(built.gpus))))
    listed = replace(moves, hops=list(moves.hops))
    (by_places,), (one_by_one,) = (
        place_pattern("pairs", [shape_of(built, hops, number)], built, nodes).legs for hops in (moves, listed)
    )
    assert dict(by_places.loads) == pytest.approx(dict(one_by_one.loads), rel=1e-12)
    assert dict(by_places.hops) == pytest.approx(dict(one_by_one.hops), rel=1e-12)
    assert by_places.link_latency_s == pytest.approx(one_by_one.link_latency_s, rel=1e-12)
    assert by_places.flow_bytes == pytest.approx(one_by_one.flow_bytes, rel=1e-12)


def test_messages_to_cards_of_another_rail_cross_the_spines() -> None:
    """Four nodes are two leaves of each rail, with two nodes each. A GPU sends 1/8 to each other one through its own
    card. Of 3 other GPUs of its rail one is under its leaf. Of 4 of the other rail one is reached inside the node. So
    5/8 of a message go up from each of the two cards of a leaf, and as much comes down."""
    built = build_cluster(load_cluster(RAILS | {"fabric": RAILS["fabric"] | {"tiers": 2}}), 4)
    on = link_bytes(plan("all_to_all", 1.0, range(8), built, Costs.ideal(), "pairwise"), built)
    leaves = {name: nbytes for name, nbytes in on.items() if "leaf" in name}
    assert leaves == pytest.approx(dict.fromkeys(leaves, 2 * 5 / 8))
    assert len(leaves) == 2 * 2 * 2  # rails, leaves, directions
