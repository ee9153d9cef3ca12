"""Moves of algorithms with real steps: the next begins when the last transfer of one has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.cluster.cluster import Cluster
from simulator.hardware.transport import Way
from simulator.network.moves import HopTable, Moves


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
    return Moves(_hops(cluster, *_columns(transfers)), local_share=local_share, goes_on=goes_on)


def around(cluster: Cluster, ranks: Sequence[int], rounds: Sequence[tuple[int, int]]) -> tuple[Moves, ...]:
    """Return the steps of one kernel, each of ``rounds`` a distance around the group and a number of parts.

    Every rank sends so many parts, each 1/n of the message, so far on around the group. In all steps together it
    handles 1/n without a link."""
    n, members = len(ranks), np.array(ranks, dtype=np.int64)
    return tuple(
        [
            Moves(
                _hops(cluster, members, np.roll(members, -distance), np.full(n, parts / n)),
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
    peers = peers if way == "p2p" else 0
    return Moves(_hops(cluster, *_columns(transfers)), local_share=local_share, way=way, peers=peers)


def _columns(transfers: Sequence[Send]) -> tuple[Ints, Ints, Floats]:
    """Return senders, receivers and loads."""
    sender, receiver = np.array([one[:2] for one in transfers], dtype=np.int64).reshape(-1, 2).T
    return sender, receiver, np.array([one.load for one in transfers], dtype=float)


def _hops(cluster: Cluster, sender: Ints, receiver: Ints, load: Floats) -> HopTable:
    """Return a hop for each transfer; the first between nodes, or else the first of all, is on the critical path."""
    weight = np.zeros(len(sender))
    far = cluster.located(sender)[0] != cluster.located(receiver)[0]
    if len(far):
        weight[np.argmax(far)] = 1.0
    return HopTable(sender, receiver, np.full(len(sender), -1), load, weight)
