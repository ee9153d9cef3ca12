"""Links and routes that nodes of a kind have in common (`Cluster.node_kinds`), worked out once for all of them."""

from __future__ import annotations

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.cluster.cluster import Cluster


def alike_links(cluster: Cluster) -> tuple[Ints, Ints]:
    """Return the links that stand for all others, and for every link the place of its stand-in among them.

    The stand-in of a link inside a node is that of the same position in the first node of the kind. Trunks stand for
    themselves.
    """
    alike: tuple[Ints, Ints] | None = cluster.memo.get("alike links")
    if alike is None:
        first_of_kind: dict[int, int] = {}
        stand_ins = []
        for kind, layout, first in zip(cluster.node_kinds, cluster.layouts, cluster.first_link, strict=True):
            stand_ins.append(np.arange(len(layout.edges)) + first_of_kind.setdefault(kind, first))
        stand_ins.append(np.arange(len(cluster.links) - len(cluster.trunks), len(cluster.links)))
        links, places = np.unique(np.concatenate(stand_ins), return_inverse=True)
        alike = cluster.memo["alike links"] = links, places
    return alike


def spread_columns(cluster: Cluster, a: int, b: int) -> tuple[Ints, Floats]:
    """Return `Cluster.spread` as an array of links and one of shares.

    Pairs of end points that sit alike in nodes of the same two kinds differ only in the links inside the nodes.
    """
    (node_a, slot_a), (node_b, slot_b) = cluster.locate(a), cluster.locate(b)
    key = ("spread", cluster.node_kinds[node_a], slot_a, cluster.node_kinds[node_b], slot_b, node_a == node_b)
    columns = cluster.memo.get(key)
    if columns is None:
        spread = cluster.spread(a, b)
        places = [_place_of(cluster, link, node_a, node_b) for link, _ in spread]
        parts, positions = np.array(places, dtype=np.int64).reshape(-1, 2).T
        columns = cluster.memo[key] = parts, positions, np.array([share for _, share in spread], dtype=float)
    parts, positions, shares = columns
    return np.array((cluster.first_link[node_a], cluster.first_link[node_b], 0))[parts] + positions, shares


def _place_of(cluster: Cluster, link: int, *nodes: int) -> tuple[int, int]:
    """Return which of two nodes a link is in and its position there; 2 and the link itself for a trunk."""
    for part, node in enumerate(nodes):
        position = link - cluster.first_link[node]
        if 0 <= position < len(cluster.layouts[node].edges):
            return part, position
    return 2, link
