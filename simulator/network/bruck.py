"""Bruck's algorithms: as few steps as there can be, for any number of ranks (Bruck, Ho, Kipnis, Upfal and Weathersby,
Efficient algorithms for all-to-all communications in multiport message-passing systems, IEEE TPDS 8, 1997)."""

from __future__ import annotations

from simulator.cluster.cluster import Cluster
from simulator.network.pattern import Moves
from simulator.network.steps import around


def all_gather(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """In step k a rank sends the 2^k parts that it has by then, or what is still lacking, to the one 2^k before it:
    (n-1)/n S in ceil(log2 n) steps."""
    n = len(ranks)
    return around(cluster, ranks, [(-(1 << k), min(1 << k, n - (1 << k))) for k in range(_steps(n))])


def all_to_all(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """A part that has d ranks to go takes the steps of the bits of d: in step k all parts whose d has bit k go on to
    the rank 2^k further, about half of the message: ceil(log2 n) steps, but log2(n)/2 S instead of (n-1)/n S."""
    n = len(ranks)
    return around(cluster, ranks, [(1 << k, sum(distance >> k & 1 for distance in range(n))) for k in range(_steps(n))])


def _steps(n: int) -> int:
    return (n - 1).bit_length()
