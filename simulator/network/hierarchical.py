"""Collectives inside nodes and between them by turns, so that little crosses the slower network.

Groups have equally many members in each node; members of one place in their nodes form a rail.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from simulator.cluster.cluster import Cluster
from simulator.errors import InputError
from simulator.network import ring
from simulator.network.channels import by_node
from simulator.network.moves import Moves
from simulator.network.steps import Send, exchange


def all_reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Reduce-scatter inside each node of g members, all-reduce S/g along all g rails at once, all-gather inside.

    Each of the three is a kernel of its own (Jia et al., arXiv 1807.11205, section 3.3). With N nodes, a NIC per member
    carries 2 (N-1)/N S/g. Rings have 2 (g-1) + 2 (N-1) hops instead of 2 (n-1).

    Raises `InputError` where nodes have different numbers of members.
    """
    nodes = _even(cluster, ranks, "hierarchical")
    rails = list(zip(*nodes, strict=True))
    moves = []
    if len(rails) > 1:
        moves.append(_together([ring.reduce_scatter(cluster, members) for members in nodes], 1.0))
    if len(nodes) > 1:
        moves.append(_together([ring.all_reduce(cluster, rail) for rail in rails], 1 / len(rails)))
    if len(rails) > 1:
        moves.append(_together([ring.all_gather(cluster, members) for members in nodes], 1.0))
    return tuple(moves)


def all_to_all(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Send first inside the nodes, to the member on the rail of the receiver, then along the rails.

    As with NCCL's PXN (NCCL 2.12 release notes), n/N messages to a node become one. Of each message (g-1)/g cross
    NVLink, (N-1)/N the network.

    Raises `InputError` where nodes have different numbers of members.
    """
    nodes = _even(cluster, ranks, "rail")
    rails = list(zip(*nodes, strict=True))
    g, local_share = len(rails), 1 / len(ranks)
    moves = []
    if g > 1:
        inside = [Send(a, b, 1 / g) for members in nodes for a in members for b in members if a != b]
        moves.append(exchange(cluster, inside, g - 1, local_share=local_share))
    if len(nodes) > 1:
        along = [Send(a, b, 1 / len(nodes)) for rail in rails for a in rail for b in rail if a != b]
        moves.append(exchange(cluster, along, len(nodes) - 1, local_share=0.0 if g > 1 else local_share))
    return tuple(moves)


def _even(cluster: Cluster, ranks: tuple[int, ...], name: str) -> tuple[tuple[int, ...], ...]:
    nodes = tuple(by_node(cluster, ranks).values())
    sizes = sorted({len(members) for members in nodes})
    if len(sizes) > 1:
        raise InputError(
            f"{name} needs equally many members in each node, and there are {' and '.join(map(str, sizes))}",
            key="algorithm",
            found=name,
            fix="algorithm auto",
        )
    return nodes


def _together(groups: Sequence[tuple[Moves, ...]], share: float) -> Moves:
    """Join the one set of moves of each group, made at once, each with ``share`` of the message.

    The sets are equal, so that the critical path is that of the first."""
    (first,) = groups[0]
    hops = chain(
        [hop._replace(load=share * hop.load) for hop in first.hops],
        [hop._replace(load=share * hop.load, weight=0.0) for (moves,) in groups[1:] for hop in moves.hops],
    )
    return Moves(list(hops), local_share=share * first.local_share, channels=first.channels * len(groups))
