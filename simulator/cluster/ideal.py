"""A cluster without properties of its own, for schedules and closed forms."""

from __future__ import annotations

from simulator.cluster.build import build_cluster
from simulator.cluster.cluster import Cluster
from simulator.config.cluster import ClusterSpec

#: So much bandwidth that the time of any message is its latency alone.
_UNBOUNDED_Bps = 1e30


def ideal_cluster(gpus: int, latency_s: float = 0.0) -> Cluster:
    """``gpus`` GPUs that reach each other in ``latency_s``, with bandwidth for everything at once."""
    return build_cluster(
        ClusterSpec.model_validate(
            {
                "name": "ideal",
                "node": {
                    "gpus": {"type": "ideal", "count": gpus},
                    "nvlink": {"kind": "nvswitch", "bandwidth_Bps": _UNBOUNDED_Bps, "latency_s": latency_s},
                    "pcie": {"generation": 6},
                },
            }
        )
    )
