"""Small clusters for tests, slow enough that what happens on their links can be derived by hand."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from simulator.cluster import Cluster, build_cluster
from simulator.cluster.wires import PCIE_LATENCY_s
from simulator.config.cluster import cluster_data
from simulator.config.validation import validated
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.network.pattern import Pattern
from simulator.network.plan import Plan

#: Bytes/s of a NIC: so slow that a PCIe link (121 GB/s) or an NVLink never limits anything.
NIC_Bps = 1e9
NIC_LATENCY_s = 1e-3
#: From a GPU through its PCIe switch to its NIC, across, and the same way down.
HOP_s = NIC_LATENCY_s + 4 * PCIE_LATENCY_s


def nic_cluster(nodes: int, gpus: int = 1) -> Cluster:
    """``nodes`` nodes of ``gpus`` GPUs, each GPU with a NIC of its own, under one leaf switch per rail.

    A message from node to node takes `HOP_s`, then its bytes at `NIC_Bps`.
    """
    spec = {
        "name": "small",
        "nodes": nodes,
        "node": {
            "gpus": {"type": "ideal", "count": gpus},
            "nvlink": {"kind": "nvswitch", "bandwidth_Bps": 1e12},
            "pcie": {"generation": 6},
            "nics": {"count": gpus, "bandwidth_bps": 8 * NIC_Bps, "latency_s": NIC_LATENCY_s},
        },
    }
    return build_cluster(validated(ClusterSpec, spec))


def _gpus(count: int, kind: str = "none", **pcie: Any) -> dict[str, Any]:
    nvlink = {"kind": kind, "bandwidth_Bps": 100e9 if kind != "none" else 0.0, "latency_s": 1e-6}
    return {
        "gpus": {"type": "ideal", "count": count},
        "nvlink": nvlink if kind != "none" else {"kind": "none"},
        "pcie": {"generation": 4, **pcie},
    }


def _fabric(nodes: int, gpus: int, **fabric: Any) -> dict[str, Any]:
    """Nodes whose every GPU has an NVLink and a NIC of 10 GB/s."""
    nics = {"count": gpus, "bandwidth_bps": 80e9, "latency_s": 2e-6}
    return {"nodes": nodes, "node": {**_gpus(gpus, "nvswitch"), "nics": nics}, "fabric": fabric}


#: Every way in which GPUs and nodes are joined, each once, as small as shows it.
CLUSTERS: dict[str, Mapping[str, Any]] = {
    name: {"name": name, **spec}
    for name, spec in {
        "nvswitch": {"node": _gpus(4, "nvswitch")},
        "mesh": {"node": _gpus(4, "mesh")},
        "pairs": {"node": _gpus(4, "pairs", gpus_per_switch=2)},
        "pcie": {"node": _gpus(4, gpus_per_switch=2)},
        "pcie_no_p2p": {"node": _gpus(4, gpus_per_switch=2, p2p=False)},
        # A node of PCIe GPUs with one NIC for all, at the host.
        "pcie_nodes": {
            "nodes": 2,
            "node": {
                **_gpus(4, gpus_per_switch=2),
                "nics": {"count": 1, "bandwidth_bps": 80e9, "latency_s": 2e-6, "attach": "cpu"},
            },
        },
        "one_leaf": _fabric(4, 2),
        # Radix 5 at 4:1 is 4 ports down and 1 up: two leaves of 4 nodes, whose 40 GB/s meet in 10 GB/s.
        "oversubscribed": _fabric(8, 1, radix=5, oversubscription=4),
        # Radix 4 is 2 ports down and 2 up; two tiers join 4 leaves, 4 nodes of 2 rails. 8 nodes are 4 leaves per rail,
        # two under each of its two spine groups, which meet in the core.
        "three_tiers": _fabric(8, 2, radix=4, tiers=3),
        # Two leaves per rail, and nothing between the rails.
        "rail_only": _fabric(4, 2, kind="rail_only", radix=4),
        # Both NICs of a node on one leaf: 6 ports are 3 down, 1 node each; 4 leaves under one group of spines.
        "fat_tree": _fabric(4, 2, kind="fat_tree", radix=6),
        # 4p - 1 = 7 ports: groups of 4 routers with 2 NICs each, 4 nodes; 8 cables between the two groups.
        "dragonfly": _fabric(8, 2, kind="dragonfly", radix=7),
        "torus": _fabric(6, 1, kind="torus", shape=[2, 3]),
        # Three nodes per site; a message has 10 ms to go, and 20 MB may be under way: 1 GB/s of 5.
        "sites": _fabric(
            6, 1, kind="fat_tree", sites={"count": 2, "bandwidth_bps": 40e9, "latency_s": 1e-2, "window_bytes": 20e6}
        ),
    }.items()
}


def carried(pattern: Pattern, cluster: Cluster) -> dict[str, float]:
    """Bytes per byte of size on every link by name, of a pattern of one phase."""
    (phase,) = pattern.legs
    return {cluster.links[index].name: load * phase.flow_bytes for index, load in phase.loads}


def link_bytes(operation: Plan, cluster: Cluster) -> dict[str, float]:
    """Bytes on every link by name."""
    totals: dict[str, float] = {}
    for phase in operation.phases:
        for index, load in phase.loads:
            name = cluster.links[index].name
            totals[name] = totals.get(name, 0.0) + load * phase.nbytes
    return totals


def check_route(built: Cluster, a: int, b: int) -> None:
    """A route starts at the sender, ends at the receiver, and each link starts where the one before ended."""
    crossed = [built.links[i] for i in built.route(a, b)]
    assert crossed[0].src == built.gpus[a].name
    assert crossed[-1].dst == built.gpus[b].name
    assert all(first.dst == second.src for first, second in pairwise(crossed))
    assert all(built.graph.edges[link.src, link.dst]["link"] == link.index for link in crossed)


def with_unknown_hosts(name: str) -> dict[str, Any]:
    """Return a shipped cluster as a mapping, under another name, that does not say how fast its hosts' memory is."""
    data = cluster_data(name)[0]
    node = {key: value for key, value in data["node"].items() if key != "host_memory_bandwidth_Bps"}
    return {**data, "name": "unknown_hosts", "node": node}
