"""How a group of ranks is strung on the cluster: NCCL's channels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from simulator.cluster.cluster import Cluster
from simulator.cluster.node import NodeLayout


@dataclass(frozen=True, slots=True)
class Channel:
    """One of the parallel rings or trees among which a message is split evenly.

    ``nodes`` holds the group's GPUs node by node; data enters a node at its first GPU and leaves it at its last,
    through NIC ``nic`` of the node (None: inside one node, or each GPU through its own NIC).
    """

    nic: int | None
    nodes: tuple[tuple[int, ...], ...]


def channels(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Channel, ...]:
    """The channels of a group.

    Across nodes: one per NIC index that serves members on every node, so that all their NICs carry an equal part; in
    each node the channel enters at the GPU that the NIC serves and leaves from the next nearest, through the same NIC
    (NCCL src/graph/search.cc, with crossNic off). Groups without a common NIC run one channel, each GPU on its own NIC.
    Inside a node: one is enough, as its switch or host treats all orders alike; where GPUs are meshed pairwise, one per
    stride that visits all members, so that all NVLinks are used.
    """
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(cluster.node_of(rank), []).append(rank)
    if len(members) == 1:
        n = len(ranks)
        strides = [s for s in range(1, n) if math.gcd(s, n) == 1] if cluster.spec.node.nvlink.kind == "mesh" else [1]
        return tuple(Channel(None, (tuple(ranks[i * s % n] for i in range(n)),)) for s in strides)
    served = [{cluster.own_nic(rank) for rank in group} for group in members.values()]
    common = sorted(served[0].intersection(*served[1:]))
    if not common:
        return (Channel(None, tuple(tuple(group) for group in members.values())),)
    firsts = [node * cluster.gpus_per_node for node in members]
    inside = [tuple([rank - first for rank in group]) for first, group in zip(firsts, members.values(), strict=True)]
    return tuple(
        Channel(
            nic,
            tuple(
                tuple([first + gpu for gpu in _through(cluster.layout, group, nic)])
                for first, group in zip(firsts, inside, strict=True)
            ),
        )
        for nic in common
    )


@lru_cache(maxsize=1024)
def _through(layout: NodeLayout, group: tuple[int, ...], nic: int) -> tuple[int, ...]:
    """The GPUs of a node with the one that ``nic`` serves first, and the nearest other last."""
    if len(group) == 1:
        return group
    first = next(gpu for gpu in group if layout.own_nic[gpu] == nic)
    others = [gpu for gpu in group if gpu != first]
    last = min(others, key=lambda gpu: len(layout.to_nic[gpu, nic]))
    return (first, *[gpu for gpu in others if gpu != last], last)
