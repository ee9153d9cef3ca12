"""Links between switches that never limit a transfer tell no ranks apart, and are reported all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import simulator
from simulator.api import cluster_of
from simulator.cluster import build_cluster
from simulator.config import load_workload
from simulator.config.cluster import load_cluster
from simulator.engine.ample_links import ample_links
from simulator.network.collectives import patterns
from tests.support.jobs import job

#: Twelve nodes, of which a stage has four.
PARALLEL = {"tp": 8, "pp": 3, "dp": 4}


def workload(oversubscription: float, **simulation: bool) -> dict[str, Any]:
    """64-port leaves: 4 nodes of 8 cards each without oversubscription, 6 nodes behind 16 uplinks with 3:1."""
    one = job(parallelism=PARALLEL, simulation=simulation, model__layers=9)
    fabric = {"kind": "fat_tree", "tiers": 2, "radix": 64, "oversubscription": oversubscription}
    one["cluster"] |= {"nodes": 12, "fabric": fabric}
    return one


def ample_of(one: dict[str, Any]) -> tuple[int, int]:
    """How many trunks are ample, and how many there are."""
    cluster = cluster_of(load_workload(one))
    ample = ample_links(cluster, cluster.bandwidths_Bps)
    return int(ample.sum()), len(cluster.trunks)


def test_uplinks_without_oversubscription_are_ample() -> None:
    """Three leaves, their uplinks either way. With 3:1 two leaves, whose 16 uplinks carry a third of 48 ports."""
    assert ample_of(workload(1)) == (6, 6)
    assert ample_of(workload(3)) == (0, 4)


@pytest.mark.parametrize("tiers", [2, 3])
@pytest.mark.parametrize(
    ("op", "algorithm"),
    [("all_reduce", "collnet"), ("all_reduce", "nvls"), ("all_reduce", "tree"), ("all_to_all", "pairwise")],
)
@pytest.mark.parametrize("nodes", [range(8), (0, 5, 6), (7, 2)])
def test_a_trunk_carries_no_more_than_the_links_before_and_behind_it(
    tiers: int, op: str, algorithm: str, nodes: Sequence[int]
) -> None:
    """Ample links rest on this, also where switches sum up what comes in and multicast the result."""
    node = {"gpus": {"count": 2}, "nics": {"count": 2}, "nvlink": {"sharp": True}}
    fabric = {"kind": "rail_fat_tree", "tiers": tiers, "radix": {2: 8, 3: 4}[tiers], "sharp": True}
    cluster = build_cluster(load_cluster({"name": "dgx_h100", "nodes": 8, "node": node, "fabric": fabric}))
    is_trunk = cluster.link_column(lambda layout, _at, _link: layout is None, np.bool_)
    ranks = [2 * number + gpu for number in nodes for gpu in range(2)]
    begin, end = cluster.link_ends
    (pattern,) = patterns(op, ranks, cluster, algorithm)
    crossed = 0
    for leg in pattern.legs:
        load = dict(zip(leg.links.tolist(), leg.load.tolist(), strict=True))
        for trunk in filter(is_trunk.__getitem__, load):
            before = [link for link in load if end[link] == begin[trunk] and begin[link] != end[trunk]]
            behind = [link for link in load if begin[link] == end[trunk] and end[link] != begin[trunk]]
            for links in (before, behind):
                assert load[trunk] <= sum(load[link] for link in links) * (1 + 1e-9)
            crossed += 1
    assert crossed


def test_background_traffic_on_an_uplink_is_not_bounded_by_its_ports() -> None:
    """Background traffic begins at the leaf here. So the other five trunks alone are ample."""
    crowded = workload(1)
    crowded["cluster"]["background"] = [{"link": "leaf0.up:tx", "share": 0.5}]
    assert ample_of(crowded) == (5, 6)


def test_an_uplink_behind_one_port_rests_on_nothing() -> None:
    """Two leaves of one card each: an uplink carries what the other does, and neither may count on the other."""
    pair = job(parallelism={"tp": 8, "dp": 2})
    pair["cluster"]["node"] |= {"nics": {"count": 1}}
    pair["cluster"] |= {"nodes": 2, "fabric": {"kind": "fat_tree", "tiers": 2, "radix": 2, "oversubscription": 1}}
    assert ample_of(pair) == (0, 4)


def test_ranks_under_other_leaves_are_one_and_every_byte_is_reported() -> None:
    """Played one by one, with trunks that may limit like any other link, the step is the same and so are its bytes."""
    folded = simulator.run(workload(1))
    plain = simulator.run(workload(1, fold=False))
    assert folded.spans.step_time_s == pytest.approx(plain.spans.step_time_s, rel=1e-9)
    assert len(folded.spans.ranks) < len(plain.spans.ranks) / 8
    assert bytes_by_kind(folded, "leaf") == pytest.approx(bytes_by_kind(plain, "leaf"), rel=1e-9)
    assert bytes_by_kind(plain, "leaf") > 0


def bytes_by_kind(result: simulator.StepResult, word: str) -> float:
    return sum(link.count * link.nbytes for link in result.spans.links if word in link.name)


@pytest.mark.parametrize("fold", [True, False])
def test_uplinks_above_ample_ones_hold_nobody_up(fold: bool) -> None:
    """Four workers, two a node, and two servers on nodes with two cards each, below three tiers of switches.

    What goes to a server meets at its cards: 4 of them, out and in. Leaves have as many uplinks as cards, and so do the
    switches above them. Their uplinks rest on those of the leaves, which rest on the cards: none is told.
    """
    one = job(model__layers=1, parallelism={"tp": 2, "dp": 4, "data_parallel": "async", "servers": 2})
    one["training"] |= {"global_batch": 4, "micro_batch": 1}
    node = {"gpus": {"type": "a100-sxm-80gb", "count": 2}, "host_memory_bandwidth_Bps": 200e9}
    node |= {"nics": {"count": 2, "bandwidth_bps": 80e9, "latency_s": 2e-6}, "pcie": {"generation": 4}}
    node["nvlink"] = {"kind": "nvswitch", "bandwidth_Bps": 100e9, "latency_s": 1e-6}
    one["cluster"] = {"name": "three_tiers", "nodes": 6, "node": node, "fabric": {"radix": 4, "tiers": 3}}
    one["simulation"] = {"fold": fold}
    rows = simulator.run(one).to_dict()["contention"]
    assert sorted((row["kind"], row["count"]) for row in rows) == [("infiniband", 4), ("infiniband", 4), ("memory", 2)]
