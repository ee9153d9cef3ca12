"""Nodes of a kind share what each of them would have alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simulator.cluster import build_cluster, recent_cluster
from simulator.cluster.recent import MOST_CLUSTERS, MOST_ENTRIES
from simulator.config import load_cluster
from simulator.hardware.cluster_spec import NodeGroup
from simulator.network.collectives import patterns
from tests.support.ten_nodes import BREAKS, ten_nodes


@pytest.mark.parametrize("overrides", BREAKS.values(), ids=BREAKS)
def test_phases_on_nodes_of_a_kind_are_those_of_each_group_alone(overrides: list[dict[str, Any]]) -> None:
    """A cluster that has placed all groups before gives each the links, loads and times of a cluster that has not."""
    cluster, plain = ten_nodes(overrides), ten_nodes(overrides)
    groups = [tuple(cluster.gpus_of(node)) for node in range(10)]
    groups += [(*cluster.gpus_of(node), *cluster.gpus_of(node + 1)) for node in range(9)]
    for group in groups:
        plain.memo.clear()
        for shared, alone in zip(
            patterns("all_reduce", group, cluster), patterns("all_reduce", group, plain), strict=True
        ):
            assert shared.timing == alone.timing
            assert [leg.loads for leg in shared.legs] == [leg.loads for leg in alone.legs]


def test_nodes_of_a_kind_hang_on_the_same_switches_and_are_as_fast() -> None:
    """Leaves of 4 nodes: nodes 0 to 3, 4 to 7 and 8 and 9 are a kind each. A slow card in node 1 makes it a fourth."""
    assert ten_nodes([]).node_kinds == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2)
    assert ten_nodes(BREAKS["slow card"]).node_kinds == (0, 1, 0, 0, 2, 2, 2, 2, 3, 3)


def test_nodes_whose_switches_sum_up_are_no_kind_with_those_whose_do_not() -> None:
    """Two nodes under one leaf, alike in all their links."""
    spec = load_cluster("dgx_h100")
    assert spec.node is not None
    plain = replace(spec.node, nvlink=replace(spec.node.nvlink, sharp=False))
    groups = NodeGroup(count=2, node=spec.node), NodeGroup(count=1, node=plain)
    assert build_cluster(replace(spec, nodes=None, node=None, groups=groups)).node_kinds == (0, 0, 1)


def test_gpus_and_links_are_those_of_their_names_whatever_changes_them() -> None:
    """`ClusterLinks` makes each link when asked: it has its number, and the bandwidth that the override leaves it."""
    cluster = ten_nodes([{"link": "node1.nic*", "bandwidth_scale": 0.5}, {"gpu": "node9.gpu7", "speed_scale": 0.5}])
    plain = ten_nodes([])
    assert [link.index for link in cluster.links] == list(range(len(plain.links)))
    slow = {link.name for link, was in zip(cluster.links, plain.links, strict=True) if link != was}
    assert slow == {f"node1.nic{nic}:{way}" for nic in range(8) for way in ("tx", "rx")}
    assert cluster.bandwidths_Bps.tolist() == [link.bandwidth_Bps for link in cluster.links]
    assert [gpu.name for gpu in cluster.gpus if gpu.speed_scale < 1] == ["node9.gpu7"]


def test_a_process_keeps_its_last_clusters_and_bounds_what_they_remember() -> None:
    """Equal descriptions give one cluster, until `MOST_CLUSTERS` others were built; a full memo is emptied."""
    spec = load_cluster({"name": "dgx_a100", "nodes": 2})
    kept = recent_cluster(spec)
    assert recent_cluster(load_cluster("dgx_a100"), 2) is kept
    kept.memo.update(dict.fromkeys(range(MOST_ENTRIES + 1)))
    assert recent_cluster(spec) is kept
    assert not kept.memo
    for nodes in range(3, 3 + MOST_CLUSTERS):
        recent_cluster(spec, nodes)
    assert recent_cluster(spec) is not kept
