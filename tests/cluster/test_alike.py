"""Nodes of a kind share what each of them would have alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simulator.cluster import build_cluster
from simulator.cluster.alike import alike_links, spread_columns
from simulator.config import load_cluster
from simulator.hardware.cluster_spec import NodeGroup
from simulator.network.collectives import patterns
from tests.support.ten_nodes import BREAKS, ten_nodes


@pytest.mark.parametrize("overrides", BREAKS.values(), ids=BREAKS)
def test_routes_on_nodes_of_a_kind_are_those_of_each_pair_alone(overrides: list[dict[str, Any]]) -> None:
    """`Cluster.spread` works every pair out by itself. Of 80 GPUs each third sends to each fifth."""
    cluster, plain = ten_nodes(overrides), ten_nodes(overrides)
    for a in range(0, len(cluster.gpus), 3):
        for b in range(0, len(cluster.gpus), 5):
            links, shares = spread_columns(cluster, a, b)
            plain.memo.clear()
            assert tuple(zip(links.tolist(), shares.tolist(), strict=True)) == plain.spread(a, b)


@pytest.mark.parametrize("overrides", BREAKS.values(), ids=BREAKS)
def test_stages_on_nodes_of_a_kind_are_those_of_each_group_alone(overrides: list[dict[str, Any]]) -> None:
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
            assert [stage.loads for stage in shared.stages] == [stage.loads for stage in alone.stages]


@pytest.mark.parametrize("overrides", BREAKS.values(), ids=BREAKS)
def test_a_link_is_as_fast_as_its_stand_in(overrides: list[dict[str, Any]]) -> None:
    """Links share a stand-in only where kind, bandwidth and latency are the same; stand-ins are fewer than links."""
    cluster = ten_nodes(overrides)
    stand_ins, places = alike_links(cluster)
    assert len(np.unique(stand_ins)) < len(cluster.links)
    for link, stand_in in zip(cluster.links, stand_ins[places].tolist(), strict=True):
        other = cluster.links[stand_in]
        assert (link.kind, link.bandwidth_Bps, link.latency_s) == (other.kind, other.bandwidth_Bps, other.latency_s)


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
