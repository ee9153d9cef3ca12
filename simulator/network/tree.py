"""NCCL's double binary tree between nodes, with a chain of GPUs inside each.

Two trees carry half of the message each. A node that is inner in one is a leaf in the other. Every node thus sends and
receives the message about once up and once down (Sanders, Speck and Traeff, Parallel Computing 35, 2009; NCCL
src/graph/trees.cc).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from simulator.cluster.cluster import Cluster
from simulator.network.channels import Channel, channels
from simulator.network.moves import Hop, HopTable, Moves

#: Bandwidth of a tree relative to a ring of the same load (NCCL src/graph/tuning.cc, ncclTopoTuneModel).
EFFICIENCY = 0.92


def all_reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Reduce up both trees, broadcast down: about 2 log2(nodes) hops between nodes and 2(g-1) in nodes of g GPUs.

    NCCL has trees for nothing else (src/graph/tuning.cc).
    """
    strung = channels(cluster, ranks)
    hops = HopTable.joined([_hops(channel, 1 / len(strung)) for channel in strung])
    counted = _counted(cluster, list(hops)) if len(strung[0].first) == 1 else 1.0
    return (Moves(hops, local_share=1 / len(ranks), efficiency=EFFICIENCY, counted=counted, channels=len(strung)),)


def _counted(cluster: Cluster, hops: list[Hop]) -> float:
    """Return the share of a chain's bandwidth that NCCL's tuner counts on inside one node.

    It counts on half of the narrowest link, as if what goes up and down shared it (src/graph/tuning.cc,
    ncclTopoTuneModel, ratio). Where it does, the loads say so already. A chain of NVLinks alone counts in full here, as
    rings may pass through a GPU here, and NCCL's do not. Measured at the speed of the chain are 5 GPUs of a DGX-1 that
    no ring of NVLinks joins (vTrain's table).
    """
    slots = [(cluster.locate(hop.sender), cluster.locate(hop.receiver)[1]) for hop in hops]
    if all(cluster.layout_of(node).joins(a, b) for (node, a), b in slots):
        return 1.0
    both: dict[int, float] = {}
    up: dict[int, float] = {}
    for number, hop in enumerate(hops):
        for link in cluster.route(hop.sender, hop.receiver):
            both[link] = both.get(link, 0.0) + hop.load
            if not number % 2:
                up[link] = up.get(link, 0.0) + hop.load
    return max(both.values()) / (2 * max(up.values()))


def single_all_reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Reduce up one binary tree with all of the message, and broadcast down.

    An inner node with two children sends and receives three times what a leaf does."""
    strung = channels(cluster, ranks)
    hops = HopTable.joined([_hops(channel, 1 / len(strung), trees=1) for channel in strung])
    return (Moves(hops, local_share=1 / len(ranks), efficiency=EFFICIENCY, channels=len(strung)),)


def parent(node: int, n: int) -> int:
    """Return the parent of a node in a binary tree of nodes 0..n-1 in order; -1 for the root, node 0.

    The root has one child. The lowest set bit of a node is its height. Its parent has that bit cleared and the next one
    set, where that exists.

    >>> [parent(node, 8) for node in range(8)]
    [-1, 2, 4, 2, 0, 6, 4, 6]
    """
    if node == 0:
        return -1
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return up if up < n else node ^ bit


def other_parent(node: int, n: int) -> int:
    """Return the parent in the second tree, which is the first mirrored for even n, moved on by one for odd n.

    >>> [other_parent(node, 8) for node in range(8)]
    [1, 3, 1, 7, 5, 3, 5, -1]
    """
    if n % 2:
        up = parent((node - 1) % n, n)
        return -1 if up < 0 else (up + 1) % n
    up = parent(n - 1 - node, n)
    return -1 if up < 0 else n - 1 - up


def _hops(channel: Channel, share: float, trees: int = 2) -> HopTable:
    """Return the hops of one channel. On the critical path: the longest chain, and what is between nodes."""
    node = np.repeat(np.arange(len(channel.first)), channel.sizes)
    near = np.flatnonzero(~channel.ends_node)
    ends = np.stack([channel.members[near + 1], channel.members[near]], axis=1)  # far, near: up; then down
    is_longest = np.repeat(node[near] == np.argmax(channel.sizes), 2)
    weight = np.where(is_longest, share, 0.0)
    inside = HopTable.alike(ends.reshape(-1), ends[:, ::-1].reshape(-1), None, share, weight)
    return HopTable.joined([inside, between_nodes(channel, share, trees)])


def between_nodes(channel: Channel, share: float, trees: int = 2) -> HopTable:
    """Return the hops of ``trees`` trees between the first GPUs of a channel's nodes, each with an equal part of its
    ``share``. On the critical path: the longest way to the root of each."""
    heads, each = channel.heads, share / trees
    tables = []
    for parents, longest_way in _double_tree(len(heads))[:trees]:
        parent_of = np.array(parents, dtype=np.int64)
        node = np.flatnonzero(parent_of >= 0)
        ends = np.stack([heads[node], heads[parent_of[node]]], axis=1)
        is_longest = np.zeros(len(heads), dtype=bool)
        is_longest[list(longest_way)] = True
        weight = np.where(np.repeat(is_longest[node], 2), each, 0.0)
        tables.append(HopTable.alike(ends.reshape(-1), ends[:, ::-1].reshape(-1), channel.nic, each, weight))
    return HopTable.joined(tables)


@lru_cache(maxsize=256)
def _double_tree(n: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Return for each of the two trees the parent of every node, and the nodes on the longest way to the root."""
    trees = []
    for parent_in_tree in (parent, other_parent):
        parents = tuple([parent_in_tree(node, n) for node in range(n)])
        parent_of = np.array(parents, dtype=np.int64)
        depth, at = np.zeros(n, dtype=np.int64), parent_of.copy()
        while (below_root := at >= 0).any():
            depth += below_root
            at = np.where(below_root, parent_of[at], -1)
        trees.append((parents, _way_to_root(int(np.argmax(depth)), parents)))
    return tuple(trees)


def _way_to_root(node: int, parents: tuple[int, ...]) -> tuple[int, ...]:
    way = [node]
    while (upper := parents[way[-1]]) >= 0:
        way.append(upper)
    return tuple(way)
