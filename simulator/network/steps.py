"""Moves of algorithms with real steps: the next begins when the last transfer of one has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simulator.cluster.cluster import Cluster
from simulator.hardware.transport import Way
from simulator.network.moves import Hop, Moves


class Send(NamedTuple):
    """``load`` bytes per byte of message from one GPU to another."""

    sender: int
    receiver: int
    load: float


def step(cluster: Cluster, transfers: Sequence[Send], *, local_share: float = 0.0, goes_on: bool = True) -> Moves:
    """Return the moves of sends made at once, each rank having one to send and one to receive at most.

    One between nodes, where there is one, stands on the critical path. ``local_share`` and ``goes_on`` as in
    `Moves`.
    """
    return Moves(_hops(cluster, transfers), local_share=local_share, goes_on=goes_on)


def around(cluster: Cluster, ranks: Sequence[int], rounds: Sequence[tuple[int, int]]) -> tuple[Moves, ...]:
    """Return the steps of one kernel, each of ``rounds`` a distance around the group and a number of parts.

    Every rank sends so many parts, each 1/n of the message, so far on around the group. In all steps together it
    handles 1/n without a link."""
    n = len(ranks)
    return tuple(
        [
            step(
                cluster,
                [Send(rank, ranks[(i + distance) % n], parts / n) for i, rank in enumerate(ranks)],
                local_share=1 / n / len(rounds),
                goes_on=number > 0,
            )
            for number, (distance, parts) in enumerate(rounds)
        ]
    )


def exchange(
    cluster: Cluster, transfers: Sequence[Send], peers: int, *, local_share: float = 0.0, way: Way = "p2p"
) -> Moves:
    """Return the moves of sends and receives posted at once, to or from ``peers`` others at most."""
    return Moves(_hops(cluster, transfers), local_share=local_share, way=way, peers=peers if way == "p2p" else 0)


def _hops(cluster: Cluster, transfers: Sequence[Send]) -> list[Hop]:
    far = (cluster.node_of(sender) != cluster.node_of(receiver) for sender, receiver, _ in transfers)
    longest = next((position for position, crosses in enumerate(far) if crosses), 0)
    return [
        Hop(sender, receiver, None, load, float(position == longest))
        for position, (sender, receiver, load) in enumerate(transfers)
    ]
