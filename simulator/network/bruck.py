"""Bruck's algorithms: as few steps as there can be, for any number of ranks.

Bruck, Ho, Kipnis, Upfal and Weathersby, Efficient algorithms for all-to-all communications in multiport
message-passing systems, IEEE TPDS 8, 1997.
"""

from __future__ import annotations

from simulator.cluster.cluster import Cluster
from simulator.network.moves import Moves
from simulator.network.steps import around


def all_gather(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Send in step k the 2^k parts that a rank has by then, or those still lacking, to the rank 2^k before it.

    A rank sends (n-1)/n S in ceil(log2 n) steps."""
    n = len(ranks)
    return around(cluster, ranks, [(-(1 << k), min(1 << k, n - (1 << k))) for k in range(_steps(n))])


def all_to_all(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Send in step k every part with bit k in its distance, the number of ranks to its goal, to the rank 2^k further.

    That is about half of the message: ceil(log2 n) steps, but log2(n)/2 S instead of (n-1)/n S."""
    n = len(ranks)
    return around(cluster, ranks, [(1 << k, sum(distance >> k & 1 for distance in range(n))) for k in range(_steps(n))])


def _steps(n: int) -> int:
    return (n - 1).bit_length()
