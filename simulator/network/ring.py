"""Rings: every rank sends to the next, n - 1 times around (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009).

S is the size of a message in bytes, as nccl-tests count it. Of n ranks each sends ``(n-1)/n S`` in an all-gather or
reduce-scatter, ``2 (n-1)/n S`` in an all-reduce, and S in a broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from simulator.cluster.cluster import Cluster
from simulator.network.channels import Channel, channels
from simulator.network.moves import Hop, Moves


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
    hops = []
    strung = channels(cluster, ranks)
    for channel in strung:
        ring = list(_ring(channel))
        start = next(i for i, (sender, _, _) in enumerate(ring) if sender == ranks[0])
        for hop in (ring[start:] + ring[:start])[:-1]:
            hops.append(Hop(*hop, 1 / len(strung), 1 / len(strung)))
    return (Moves(hops, channels=len(strung)),)


def reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Do `broadcast` backwards: the message comes through all ranks to the first, added up on the way."""
    (moves,) = broadcast(cluster, ranks)
    return (replace(moves, hops=[hop._replace(sender=hop.receiver, receiver=hop.sender) for hop in moves.hops]),)


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
    hops = [Hop(*hop, each, each) for channel in strung for hop in _ring(channel)]
    return (Moves(hops, local_share=1 / n, channels=len(strung)),)


def _ring(channel: Channel) -> Iterator[tuple[int, int, int | None]]:
    """Yield sender, receiver and, between nodes, NIC of every hop."""
    following = channel.nodes[1:] + channel.nodes[:1]
    for chain, after in zip(channel.nodes, following, strict=True):
        for sender, receiver in pairwise(chain):
            yield sender, receiver, None
        yield chain[-1], after[0], channel.nic
