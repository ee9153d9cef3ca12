"""Groups of GPUs on three clusters, and the collectives that run on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from simulator.cluster import Cluster, build_cluster
from simulator.config.cluster import load_cluster
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.errors import InputError
from simulator.network.collectives import (
    OPERATIONS,
    patterns,
)

IDEAL = Costs.ideal()

A100 = Costs.from_profile(load_profile("a100-sxm-80gb"))

H100 = Costs.from_profile(load_profile("h100-sxm-80gb"))

NODE, TWO, MANY = (build_cluster(load_cluster("dgx_a100"), nodes) for nodes in (1, 2, 128))

#: Groups as jobs have them (part of a node, nodes, one or two GPUs per node, stages far apart), and odd ones: a node
#: with fewer members, nodes without a common NIC.
GROUPS = {
    "tp2": [4, 5],
    "tp8": list(range(8)),
    "two nodes": list(range(16)),
    "dp16": list(range(3, 128, 8)),
    "two per node": [8 * node + gpu for node in range(5) for gpu in (2, 6)],
    "far": [0, 8 * 100],
    "uneven": [0, 1, 2, 8],
    "crooked": [0, 9, 18],
}


def runs(op: str, name: str, ranks: Sequence[int], cluster: Cluster) -> bool:
    """Whether the cluster has what the algorithm needs, and the group sits as it needs."""
    with suppress(InputError):
        return bool(patterns(op, ranks, cluster, name))
    return False


#: Every algorithm on every group that it can run on.
EVERY = [
    (op, name, group)
    for op, entry in OPERATIONS.items()
    for name in entry.algorithms
    for group, ranks in GROUPS.items()
    if runs(op, name, ranks, MANY)
]
