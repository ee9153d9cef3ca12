"""Clusters that this process has built lately, with what was worked out on them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from simulator.cluster.build import build_cluster
from simulator.cluster.cluster import Cluster
from simulator.hardware.cluster_spec import ClusterSpec

#: Most clusters that are kept.
MOST_CLUSTERS = 4
#: Most entries of the memo of a cluster that is handed out again: patterns and routes of some thirty layouts.
MOST_ENTRIES = 20_000
#: Most nodes in all entries together, as patterns grow with the nodes that they cross. Ten layouts of 512 nodes have
#: 9,000 entries, in 150 MB.
MOST_NODES_OF_ENTRIES = 10_000_000
#: Entries that the memo of a cluster may have however many nodes there are: patterns and routes of some seven layouts.
ENTRIES_AT_ANY_SIZE = 5_000

_recent: deque[Cluster] = deque(maxlen=MOST_CLUSTERS)


def recent_cluster(spec: ClusterSpec, nodes: int | None = None) -> Cluster:
    """Return the cluster that ``spec`` describes, as `build_cluster` does: one of the last few that are equal, or anew.

    Patterns, routes and ways over trunks that were worked out for one job then serve the next one. What is kept is
    bounded: `MOST_CLUSTERS` clusters, each with at most `most_entries` in its memo, or it begins anew without any.
    Raises as `build_cluster`.
    """
    if nodes is not None:
        spec = replace(spec, nodes=nodes)
    for cluster in _recent:
        if cluster.spec == spec:
            if len(cluster.memo) > most_entries(cluster.n_nodes):
                cluster.memo.clear()
            return cluster
    _recent.append(build_cluster(spec))
    return _recent[-1]


def most_entries(n_nodes: int) -> int:
    """Return how many entries the memo of a cluster may have.

    >>> most_entries(100), most_entries(1_000), most_entries(10_000)
    (20000, 10000, 5000)
    """
    return max(ENTRIES_AT_ANY_SIZE, min(MOST_ENTRIES, MOST_NODES_OF_ENTRIES // n_nodes))
