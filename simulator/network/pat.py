"""PAT, parallel aggregated trees: all-gather and reduce-scatter between nodes of one GPU in few steps, of which the far
ones carry little (Jeaugey, arXiv 2506.20252; NCCL from 2.23 on, src/include/collectives.h, PatAGAlgorithm).

Bruck's steps in the other order. Where the parts of a step do not fit in a buffer NCCL sends them one after another,
and chunks of the message follow each other through the steps: as many bytes on every link, and what that costs beside
them is in the two constants.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.cluster.cluster import Cluster
from simulator.errors import InputError
from simulator.network.channels import by_node
from simulator.network.pattern import Moves
from simulator.network.steps import around

#: Bandwidth relative to a ring of the same load (NCCL src/graph/tuning.cc, ncclTopoTuneModel).
EFFICIENCY = 0.75
#: Software of a step, and of each part in it, relative to a hop of a ring: the tuner counts log2(nodes) hops of 14/3.5
#: microseconds and 2.8 for every rank, where a ring's have 14 (the same place).
PER_STEP, PER_PART = 1 / 3.5, 2.8 / 14


def all_gather(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Each rank's part goes down a binomial tree of its own: first to the one farthest before it, in the end to
    neighbours. With d = ..., 4, 2, 1 below n, a rank sends the parts whose way has that step, one for each odd multiple
    of d below n: (n-1)/n S in ceil(log2 n) steps.

    Raises `InputError` where two members share a node.
    """
    return _steps(cluster, ranks, [(-d, parts) for d, parts in reversed(_rounds(len(ranks)))])


def reduce_scatter(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """`all_gather` backwards, summing up on the way. Raises `InputError` as it does."""
    return _steps(cluster, ranks, _rounds(len(ranks)))


def _rounds(n: int) -> list[tuple[int, int]]:
    """Distance, and parts that each of n ranks sends so far.

    >>> _rounds(8), _rounds(6)
    ([(1, 4), (2, 2), (4, 1)], [(1, 3), (2, 1), (4, 1)])
    """
    return [(1 << k, len(range(1 << k, n, 2 << k))) for k in range((n - 1).bit_length())]


def _steps(cluster: Cluster, ranks: tuple[int, ...], rounds: list[tuple[int, int]]) -> tuple[Moves, ...]:
    if len(by_node(cluster, ranks)) < len(ranks):
        raise InputError(
            "pat is for groups with one GPU in each node",
            key="algorithm",
            found="pat",
            fix="algorithm ring, or --ranks with one GPU of each node",
        )
    return tuple(
        [
            replace(moves, efficiency=EFFICIENCY, way="pat", software=PER_STEP + PER_PART * parts)
            for moves, (_, parts) in zip(around(cluster, ranks, rounds), rounds, strict=True)
        ]
    )
