"""Collectives from or to one rank, the first of the group: all at once, or along a binomial tree.

The message of a gather or a scatter is what the root holds, of which each rank has 1/n (nccl-tests, src/gather.cu).
Binomial trees: Thakur, Rabenseifner and Gropp, IJHPCA 19, 2005, sections 4.2 to 4.4.
"""

from __future__ import annotations

from simulator.cluster.cluster import Cluster
from simulator.network.moves import Moves
from simulator.network.steps import Send, exchange, step


def linear_broadcast(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """The root sends S to each other rank, all at once: (n-1) S leave it."""
    return (exchange(cluster, [Send(ranks[0], rank, 1.0) for rank in ranks[1:]], len(ranks) - 1),)


def linear_reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Each other rank sends S to the root, which sums up."""
    transfers = [Send(rank, ranks[0], 1.0) for rank in ranks[1:]]
    return (exchange(cluster, transfers, len(ranks) - 1, way="protocols"),)


def linear_scatter(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """The root sends each other rank its S/n, all at once, as NCCL's grouped sends do."""
    n = len(ranks)
    return (exchange(cluster, [Send(ranks[0], rank, 1 / n) for rank in ranks[1:]], n - 1, local_share=1 / n),)


def linear_gather(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Each other rank sends its S/n to the root, all at once."""
    n = len(ranks)
    return (exchange(cluster, [Send(rank, ranks[0], 1 / n) for rank in ranks[1:]], n - 1, local_share=1 / n),)


def binomial_broadcast(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Whoever has S sends it on: ceil(log2 n) steps of S, the farthest first."""
    return _steps(cluster, ranks, [[(a, b, 1.0) for a, b, _ in round_] for round_ in _rounds(len(ranks))])


def binomial_reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Do `binomial_broadcast` backwards, summing up on the way."""
    return _steps(cluster, ranks, [[(b, a, 1.0) for a, b, _ in round_] for round_ in reversed(_rounds(len(ranks)))])


def binomial_scatter(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Each step hands on what a whole subtree is to get: ceil(log2 n) steps, (n-1)/n S from the root in all."""
    n = len(ranks)
    return _steps(cluster, ranks, [[(a, b, parts / n) for a, b, parts in round_] for round_ in _rounds(n)])


def binomial_gather(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Do `binomial_scatter` backwards."""
    n = len(ranks)
    return _steps(cluster, ranks, [[(b, a, parts / n) for a, b, parts in round_] for round_ in reversed(_rounds(n))])


def _rounds(n: int) -> list[list[tuple[int, int, int]]]:
    """Return the rounds of a binomial tree of n ranks, farthest first: (parent, child, ranks in the child's subtree).

    >>> _rounds(5)
    [[(0, 4, 1)], [(0, 2, 2)], [(0, 1, 1), (2, 3, 1)]]
    """
    distances = [1 << k for k in reversed(range((n - 1).bit_length()))]
    return [[(a, a + d, min(d, n - a - d)) for a in range(0, n - d, 2 * d)] for d in distances]


def _steps(cluster: Cluster, ranks: tuple[int, ...], rounds: list[list[tuple[int, int, float]]]) -> tuple[Moves, ...]:
    return tuple(
        [
            step(cluster, [Send(ranks[a], ranks[b], load) for a, b, load in round_], goes_on=number > 0)
            for number, round_ in enumerate(rounds)
        ]
    )
