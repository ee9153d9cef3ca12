"""Small clusters for tests, slow enough that what happens on their links can be derived by hand."""

from __future__ import annotations

from simulator.cluster import Cluster, build_cluster
from simulator.cluster.node import PCIE_LATENCY_s
from simulator.config.cluster import ClusterSpec

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
    return build_cluster(ClusterSpec.model_validate(spec))
