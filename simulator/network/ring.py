"""Rings: every rank sends to the next, n - 1 times around (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009).

S is the size of a message in bytes, as nccl-tests count it. Of n ranks each sends ``(n-1)/n S`` in an all-gather or
reduce-scatter, ``2 (n-1)/n S`` in an all-reduce, and S in a broadcast.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simulator.arrays import Ints
from simulator.cluster.cluster import Cluster
from simulator.network.channels import Channel, channels
from simulator.network.moves import HopTable, Moves


def all_reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Do a reduce-scatter and an all-gather: 2(n-1) steps of 1/n of the message."""
    return _around(cluster, ranks, 2 * (len(ranks) - 1))


def reduce_scatter(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Go around in n-1 steps of 1/n of the message."""
    return _around(cluster, ranks, len(ranks) - 1)


def all_gather(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Go around in n-1 steps of 1/n of the message."""
    return _around(cluster, ranks, len(ranks) - 1)


def broadcast(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Pipeline the message through all ranks from the first on: n-1 hops."""
    strung = channels(cluster, ranks)
    tables = []
    for channel in strung:
        start = int(np.flatnonzero(channel.members == ranks[0])[0])
        sender, receiver, nic = (np.roll(column, -start)[:-1] for column in _ring(channel))
        tables.append(HopTable.alike(sender, receiver, nic, 1 / len(strung), 1 / len(strung)))
    return (Moves(HopTable.joined(tables), channels=len(strung)),)


def reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Do `broadcast` backwards: the message comes through all ranks to the first, added up on the way."""
    (moves,) = broadcast(cluster, ranks)
    hops = HopTable.from_hops(list(moves.hops))
    return (replace(moves, hops=replace(hops, sender=hops.receiver, receiver=hops.sender)),)


def composed_all_reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Do a reduce-scatter and then an all-gather, each a kernel of its own."""
    return (*reduce_scatter(cluster, ranks), *all_gather(cluster, ranks))


def _around(cluster: Cluster, ranks: tuple[int, ...], steps: int) -> tuple[Moves, ...]:
    """Move each part of the message by ``steps`` consecutive hops.

    On average over where parts start, each hop of the ring is made steps/n times. A part is also handled once where it
    starts or ends, without a link."""
    n = len(ranks)
    strung = channels(cluster, ranks)
    each = steps / n / len(strung)
    hops = HopTable.joined([HopTable.alike(*_ring(channel), each, each) for channel in strung])
    return (Moves(hops, local_share=1 / n, channels=len(strung)),)


def _ring(channel: Channel) -> tuple[Ints, Ints, Ints]:
    """Return sender, receiver and, between nodes, NIC of every hop; -1 is no NIC."""
    members = channel.members
    nic = -1 if channel.nic is None else channel.nic
    return members, np.roll(members, -1), np.where(channel.ends_node, nic, -1)
