"""Transfers straight from sender to receiver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from simulator.cluster.cluster import Cluster
from simulator.errors import InputError
from simulator.network.moves import AllPairs, Hop, Moves


class ByteShares(NamedTuple):
    """Shares of the bytes of an all-to-all by the members of its group.

    Member i sends the share ``send[i]`` of all bytes, and the share ``receive[j]`` of each member's bytes goes to
    member j (empty: equal parts). ``per_node`` > 0: bytes for several members of another node travel there once, and
    are copied on there. The node takes this share of all bytes.
    """

    send: tuple[float, ...] = ()
    receive: tuple[float, ...] = ()
    per_node: float = 0.0


EVEN = ByteShares()


def all_to_all(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Send 1/n of every rank's buffer to each other rank, all at once, as NCCL does with grouped sends and receives.

    On the critical path stands one transfer, the average one.
    """
    return spread(EVEN, cluster, ranks)


@lru_cache(maxsize=1024)
def uneven(shares: ByteShares) -> Callable[[Cluster, tuple[int, ...]], tuple[Moves, ...]]:
    """Return `all_to_all` with these shares; equal shares give one function."""
    return partial(spread, shares)


def spread(shares: ByteShares, cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Send from every rank to every other, all at once.

    Per byte of size (the mean send buffer) member i sends ``n * send[i] * receive[j]`` to member j. The slowest port
    decides, as all are done when the last one is."""
    n = len(ranks)
    send, receive = shares.send or (1 / n,) * n, shares.receive or (1 / n,) * n
    local_share = max(n * a * b for a, b in zip(send, receive, strict=True))
    by_node = _by_node(shares.per_node, cluster, ranks, send, receive)
    hops = list(by_node) if shares.per_node else _pairs(ranks, send, receive)
    return (Moves(hops, local_share=local_share, way="p2p", peers=n - 1),)


def all_reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """`reduce_scatter`, then `all_gather`: as many bytes as a ring in 2 steps."""
    (scattered,), (gathered,) = reduce_scatter(cluster, ranks), all_gather(cluster, ranks)
    return scattered, replace(gathered, local_share=0.0, goes_on=True)


def reduce_scatter(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Every rank sends each other one that one's 1/n of the message, to be added up there: one step."""
    n = len(ranks)
    return (Moves(_pairs(ranks, (1 / n,) * n, (1 / n,) * n), local_share=1 / n),)


def all_gather(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Every rank sends its 1/n of the message to each other one: one step."""
    return reduce_scatter(cluster, ranks)


def _pairs(ranks: tuple[int, ...], send: Sequence[float], receive: Sequence[float]) -> AllPairs | list[Hop]:
    n = len(ranks)
    weight = 1 / (n * (n - 1))
    if len({*send, *receive}) == 1:
        return AllPairs(ranks, n * send[0] * receive[0], weight)
    return [
        Hop(a, b, None, n * sent * received, weight)
        for a, sent in zip(ranks, send, strict=True)
        for b, received in zip(ranks, receive, strict=True)
        if a != b
    ]


def _by_node(
    per_node: float, cluster: Cluster, ranks: Sequence[int], send: Sequence[float], receive: Sequence[float]
) -> Iterator[Hop]:
    """Yield hops between ranks of one place in their nodes, over the same rail, and on over NVLink.

    This is DeepSeek-V3's way (arXiv 2412.19437, section 3.2.2; DeepEP). A combine is the same the other way round,
    summing up before the network. Its loads are those of a dispatch with senders and receivers exchanged.

    On the critical path stands one hop between nodes and one inside.
    """
    n = len(ranks)
    members: dict[int, list[int]] = {}
    for position, rank in enumerate(ranks):
        members.setdefault(cluster.node_of(rank), []).append(position)
    nodes = list(members.values())
    crossing = n * (len(nodes) - 1)
    inside = sum(len(node_members) * (len(node_members) - 1) for node_members in nodes)
    gathers = len(set(send)) > 1
    if gathers:
        send, receive = receive, send
    onward: dict[tuple[int, int], float] = {}

    def hop(a: int, b: int, load: float, weight: float) -> Hop:
        ends = (ranks[b], ranks[a]) if gathers else (ranks[a], ranks[b])
        return Hop(*ends, None, load, weight)

    for node_members in nodes:
        for place, a in enumerate(node_members):
            for other in nodes:
                met = a if other is node_members else other[place % len(other)]
                share = sum(receive[b] for b in other)
                if other is not node_members and share:
                    yield hop(a, met, per_node * n * send[a] * share, 1 / crossing)
                for b in other:
                    if b != met:
                        onward[met, b] = onward.get((met, b), 0.0) + n * send[a] * receive[b]
    for (a, b), load in onward.items():
        yield hop(a, b, load, 1 / inside)


def send(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """The first rank sends the message to the second. Raises `InputError` for more than two."""
    if len(ranks) > 2:
        raise InputError(
            "a send is from one rank to one other",
            key="ranks",
            found=f"{len(ranks)} ranks",
            allowed="2, such as --ranks 0,8",
            fix="op send_recv, which is a ring of any number",
        )
    a, b = ranks
    return (Moves([Hop(a, b, None, 1.0, 1.0)], way="p2p", peers=1),)


def send_recv(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Every rank sends the message to the next one, the last to the first, and receives that of the one before, all at
    once (nccl-tests, src/sendrecv.cu)."""
    n = len(ranks)
    hops = [Hop(a, b, None, 1.0, 1 / n) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]
    return (Moves(hops, way="p2p", peers=1),)
