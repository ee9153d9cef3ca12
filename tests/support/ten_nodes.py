"""Ten nodes of a cluster, whole or broken in one way each."""

from __future__ import annotations

from typing import Any

from simulator.cluster import Cluster, build_cluster
from simulator.config import load_cluster

#: Ten nodes in leaves of four NICs: two whole pods and half of a third, each broken in its own way.
BREAKS: dict[str, list[dict[str, Any]]] = {
    "all alike": [],
    "slow card": [{"link": "node1.nic2", "bandwidth_scale": 0.5}],
    "slow NVLink": [{"link": "node6.gpu3.nvlink", "bandwidth_scale": 0.5}],
    "missing card": [{"nic": "node3.nic1", "missing": True}],
    "missing GPU": [{"gpu": "node5.gpu0", "missing": True}],
    "dead uplink": [{"link": "node2.nic4", "missing": True}],
}


def ten_nodes(overrides: list[dict[str, Any]]) -> Cluster:
    fabric = {"kind": "rail_fat_tree", "tiers": 3, "radix": 8}
    return build_cluster(load_cluster({"name": "dgx_a100", "nodes": 10, "fabric": fabric, "overrides": overrides}))
