"""A cluster without properties of its own, for schedules and closed forms."""

from __future__ import annotations

from simulator.cluster.build import build_cluster
from simulator.cluster.cluster import Cluster
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.hardware.node import Gpus, NodeSpec, NvLink, Pcie

#: So much bandwidth that the time of any message is its latency alone.
_UNBOUNDED_Bps = 1e30


def ideal_cluster(gpus: int, latency_s: float = 0.0) -> Cluster:
    """Return a cluster of so many GPUs that reach each other in ``latency_s``, with bandwidth for everything at
    once."""
    node = NodeSpec(
        gpus=Gpus(type="ideal", count=gpus),
        nvlink=NvLink(kind="nvswitch", bandwidth_Bps=_UNBOUNDED_Bps, latency_s=latency_s),
        pcie=Pcie(generation=6),
    )
    return build_cluster(ClusterSpec(name="ideal", node=node))
