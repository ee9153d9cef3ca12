"""CollNet, NCCL's name for SHARP: the switches of an InfiniBand fabric sum up what NICs send, and send back the sum.

Graham et al., Scalable Hierarchical Aggregation Protocol, COMHPC 2016.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simulator.cluster.cluster import Cluster
from simulator.errors import InputError
from simulator.network.channels import Channel, by_node, channels
from simulator.network.moves import SWITCH, Hop, HopTable, Moves


def all_reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Reduce as CollNetDirect does: members send each channel's part to the head beside the channel's NIC.

    The head adds up and sends S/h through the NIC to the switches. It receives the sum, and sends it to the members.
    With h heads among g members a GPU sends (h-1)/h S to others, a head (g-1)/h S more. A NIC carries S/h each way,
    whatever the number of nodes.

    Raises `InputError` where the fabric does not sum up, and inside one node.
    """
    check(cluster, ranks, "collnet")
    strung = channels(cluster, ranks)
    share = 1 / len(strung)
    inside = HopTable.from_hops([hop for channel in strung for hop in _inside(channel, share)])
    hops = HopTable.joined([inside, *[through_fabric(channel, share) for channel in strung]])
    return (Moves(hops, local_share=1 / len(ranks), way="in_switch", channels=len(strung)),)


def through_fabric(channel: Channel, share: float) -> HopTable:
    """Return the hops of a channel's heads to the switches and back; those of the first are on the critical path."""
    heads = channel.heads
    ends = np.stack([heads, np.full(len(heads), SWITCH)], axis=1)
    weight = np.where(np.arange(ends.size) < 2, share, 0.0)
    return HopTable.alike(ends.reshape(-1), ends[:, ::-1].reshape(-1), channel.nic, share, weight)


def check(cluster: Cluster, ranks: tuple[int, ...], name: str) -> None:
    """Raise `InputError` where the fabric's switches do not sum up, or are not between the members."""
    if not cluster.spec.fabric.sharp:
        raise InputError(
            f"{name} needs a fabric whose switches sum up (InfiniBand SHARP), which {cluster.name} lacks",
            key="algorithm",
            found=name,
            fix="fabric: {sharp: true} in the cluster file, where they can",
        )
    if len(by_node(cluster, ranks)) == 1:
        raise InputError(f"{name} is for groups between nodes", key="algorithm", found=name, fix="algorithm auto")
    if channels(cluster, ranks)[0].nic is None:
        raise InputError(
            f"{name} needs NICs of one number that serve members in every node",
            key="algorithm",
            found=name,
            fix="algorithm auto",
        )


def _inside(channel: Channel, share: float) -> Iterator[Hop]:
    largest = int(np.argmax(channel.sizes))
    for number, (head, *members) in enumerate(channel.nodes):
        for position, gpu in enumerate(members):
            weight = share if number == largest and not position else 0.0
            yield Hop(gpu, head, None, share, weight)
            yield Hop(head, gpu, None, share, weight)
