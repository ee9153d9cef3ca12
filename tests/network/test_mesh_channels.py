"""Rings through several nodes whose GPUs each have a link to each other one."""

from __future__ import annotations

import pytest

from simulator.cluster import build_cluster
from simulator.config import load_cluster
from simulator.network.collectives import patterns
from tests.support.clusters import carried


@pytest.mark.parametrize("nodes", [2, 4, 6])
def test_every_link_of_the_mesh_and_every_port_carries_an_equal_part(nodes: int) -> None:
    """n = 8 x nodes GPUs in 8 rings, each with 1/8 of the message: a hop carries 2 (n-1)/n / 8 of it. A node's 8 chains
    of 7 hops are its 56 directed links, once each; a ring crosses to the next node on one rail, and has one port each
    way in every node."""
    cluster = build_cluster(load_cluster("mi300x", nodes=nodes))
    n = 8 * nodes
    (ring,) = patterns("all_reduce", range(n), cluster, "ring")
    for kind, count in (("nvlink", 56 * nodes), (cluster.spec.fabric.transport, 2 * 8 * nodes)):
        names = {link.name for link in cluster.links if link.kind == kind}
        of_kind = [load for name, load in carried(ring, cluster).items() if name in names]
        assert len(of_kind) == count
        assert of_kind == pytest.approx([2 * (n - 1) / n / 8] * count)
