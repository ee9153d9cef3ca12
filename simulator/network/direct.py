"""Transfers straight from sender to receiver."""

from __future__ import annotations

from itertools import pairwise

from simulator.cluster.cluster import Cluster
from simulator.network.pattern import Hop, Moves


def all_to_all(cluster: Cluster, ranks: tuple[int, ...]) -> Moves:
    """Every rank sends 1/n of its buffer to each other rank, all at once, as NCCL does with grouped sends and receives.

    On the critical path stands one transfer, the average one.
    """
    n = len(ranks)
    pairs = n * (n - 1)
    hops = [Hop(a, b, None, 1 / n, 1 / pairs) for a in ranks for b in ranks if a != b]
    return Moves(hops, part=1 / n, own=1 / n, peers=n - 1)


def send_recv(cluster: Cluster, ranks: tuple[int, ...]) -> Moves:
    """Every rank but the last sends the message to the next one; of two ranks, the first sends to the second."""
    n = len(ranks) - 1
    hops = [Hop(a, b, None, 1.0, 1 / n) for a, b in pairwise(ranks)]
    return Moves(hops, part=1.0, peers=1)


def shift(cluster: Cluster, ranks: tuple[int, ...]) -> Moves:
    """Every rank sends the message to the next one of its ring, the last to the first, all at once."""
    n = len(ranks)
    hops = [Hop(a, b, None, 1.0, 1 / n) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]
    return Moves(hops, part=1.0, peers=1)
