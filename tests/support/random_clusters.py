"""Random clusters: shipped ones and small odd ones, with slow parts, other traffic and GPUs of several kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Any

from simulator.config.cluster import cluster_data
from tests.support.clusters import CLUSTERS

Section = dict[str, Any]

#: Shipped clusters whose hosts and drives are told, and those with odd nodes.
SHIPPED = ("dgx_a100", "dgx_h100", "dgx_b200", "pcie_l40s", "pcie_a100_nvlink_pairs", "dgx1_v100", "mi300x")
#: Those whose GPUs multiply in 8 bits, and in 4 bits or in 8 bits with scales of blocks of 32 (MX).
EIGHT_BITS, FOUR_BITS = ("dgx_h100", "dgx_b200"), ("dgx_b200",)
#: Bytes/s of a host's memory, for clusters that do not say it.
HOST_MEMORY_Bps = 200e9
#: Parts that differ, none of them more often than each.
OVERRIDES: tuple[list[Section], ...] = (
    [],
    [],
    [],
    [{"gpu": "node0.gpu0", "speed_scale": 0.9}],
    [{"gpu": "node*.gpu1", "speed_scale": 0.8}],
    [{"gpu": "node0.gpu1", "host_speed": 0.5}],
    [{"link": "node0.nic0", "bandwidth_scale": 0.5}],
    [{"nic": "node0.nic0", "missing": True}],
    [{"gpu": "node0.gpu1", "missing": True}],
)


def random_cluster(random: Random, ranks: int, servers: int, shipped: Sequence[str] = SHIPPED) -> Section:
    """Return a cluster that holds the ranks; ``shipped``: the only ones to take, where fewer than all."""
    one = random.choice
    overrides = one(OVERRIDES)
    if len(shipped) < len(SHIPPED) or one((True, True, False)):
        cluster: Section = {"name": one(shipped)}
        per_node = shipped_cluster(cluster["name"])["node"]["gpus"]["count"]
        if "host_memory_bandwidth_Bps" not in shipped_cluster(cluster["name"])["node"]:
            cluster["node"] = {"host_memory_bandwidth_Bps": HOST_MEMORY_Bps}
        cluster["nodes"] = -(-ranks // per_node) + servers + one((0, 0, 1))
        if one((True, False, False)):
            cluster["fabric"] = {"kind": one(("fat_tree", "rail_only"))}
    else:
        cluster = dict(CLUSTERS[one(list(CLUSTERS))])
        gpus = {**cluster["node"]["gpus"], "type": one(("a100-sxm-80gb", "h100-sxm-80gb"))}
        kinds = _kinds(gpus, one((True, False, False)))
        cluster["node"] = {**cluster["node"], "gpus": kinds, "host_memory_bandwidth_Bps": HOST_MEMORY_Bps}
        if cluster["fabric" if "fabric" in cluster else "node"].get("shape") is None:
            cluster["nodes"] = -(-ranks // gpus["count"]) + servers
    if overrides and overrides[0].get("missing") and "gpu" in overrides[0] and "nodes" in cluster:
        cluster["nodes"] += 1  # for the rank that has no place
    if one((True, *[False] * 9)):
        cluster["background"] = [{"link": "node0.nic0", "share": one((0.2, 0.6))}]
    return {**cluster, "overrides": overrides} if overrides else cluster


def _kinds(gpus: Section, mixed: bool) -> Section | list[Section]:
    """Return the GPUs of a node, half of them of another type where they are ``mixed``."""
    half = gpus["count"] // 2
    if not mixed or not half:
        return gpus
    return [{**gpus, "count": gpus["count"] - half}, {**gpus, "type": "h200-sxm-141gb", "count": half}]


@lru_cache(maxsize=len(SHIPPED))
def shipped_cluster(name: str) -> Mapping[str, Any]:
    """Return the file of a shipped cluster, read once for all jobs."""
    return cluster_data(name)[0]
