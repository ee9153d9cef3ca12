"""Recursive halving and doubling: few steps, each with one partner, and as few bytes as a ring.

Rabenseifner, Optimization of collective reduction operations, ICCS 2004; Thakur, Rabenseifner and Gropp, Optimization
of collective communication operations in MPICH, IJHPCA 19, 2005, section 4.5.
"""

from __future__ import annotations

from simulator.cluster.cluster import Cluster
from simulator.network.moves import Moves
from simulator.network.steps import Send, step


def all_reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Reduce-scatter in log2 p steps, then the same backwards as an all-gather, for the largest power of two p <= n.

    Partners at distances 1, 2, 4 ... exchange S/2, S/4, S/8 ...: 2 (p-1)/p S in 2 log2 p steps. Each of the n - p ranks
    beyond p first hands its message to a neighbour, and receives the result in the end: 2 S, 2 steps.
    """
    n = len(ranks)
    p = 1 << (n.bit_length() - 1)
    beyond = [(ranks[2 * i + 1], ranks[2 * i]) for i in range(n - p)]
    active = [*(partner for _, partner in beyond), *ranks[2 * (n - p) :]]
    distances = [1 << k for k in range(p.bit_length() - 1)]
    halving = [[Send(active[i], active[i ^ distance], 1 / (2 * distance)) for i in range(p)] for distance in distances]
    rounds = [*halving, *reversed(halving)]
    if beyond:
        rounds.insert(0, [Send(extra, partner, 1.0) for extra, partner in beyond])
        rounds.append([Send(partner, extra, 1.0) for extra, partner in beyond])
    # In all rounds together a rank adds up the 1/p of the message that it ends with.
    local_share = 1 / p / len(rounds)
    return tuple(
        [step(cluster, round_, local_share=local_share, goes_on=number > 0) for number, round_ in enumerate(rounds)]
    )
