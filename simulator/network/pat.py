"""PAT, parallel aggregated trees: few steps between nodes of one GPU, of which the far ones carry little.

It has all-gathers and reduce-scatters (Jeaugey, arXiv 2506.20252; NCCL from 2.23 on, src/include/collectives.h,
PatAGAlgorithm). Its steps are Bruck's in the other order. Where the parts of a step do not fit in a buffer, NCCL sends
them one after another. Chunks of the message then follow each other through the steps. Links carry as many bytes, and
what that costs beside them is in the two constants.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.arrays import distinct
from simulator.cluster.cluster import Cluster
from simulator.errors import InputError
from simulator.network.moves import Moves
from simulator.network.steps import around

#: Bandwidth relative to a ring of the same load (NCCL src/graph/tuning.cc, ncclTopoTuneModel).
EFFICIENCY = 0.75
#: Software of a step, and of each part in it, relative to a hop of a ring (the same place). The tuner counts log2(n)
#: hops of 14/3.5 microseconds on n nodes, and 2.8 for every rank; a hop of a ring takes 14.
PER_STEP, PER_PART = 1 / 3.5, 2.8 / 14


def all_gather(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Send each rank's part down a binomial tree of its own: first to the rank farthest before it, then nearer ones.

    With d = ..., 4, 2, 1 below n, a rank sends the parts whose way has that step, one for each odd multiple of d below
    n. That is (n-1)/n S in ceil(log2 n) steps.

    Raises `InputError` where two members share a node.
    """
    return _steps(cluster, ranks, [(-d, parts) for d, parts in reversed(_rounds(len(ranks)))])


def reduce_scatter(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Do `all_gather` backwards, summing up on the way. Raises `InputError` as it does."""
    return _steps(cluster, ranks, _rounds(len(ranks)))


def _rounds(n: int) -> list[tuple[int, int]]:
    """Return distances, and the parts that each of n ranks sends over each.

    >>> _rounds(8), _rounds(6)
    ([(1, 4), (2, 2), (4, 1)], [(1, 3), (2, 1), (4, 1)])
    """
    return [(1 << k, len(range(1 << k, n, 2 << k))) for k in range((n - 1).bit_length())]


def _steps(cluster: Cluster, ranks: tuple[int, ...], rounds: list[tuple[int, int]]) -> tuple[Moves, ...]:
    if len(distinct(cluster.gpu_places[0][list(ranks)])) < len(ranks):
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
