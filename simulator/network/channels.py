"""NCCL's channels: the orders in which a group of ranks is strung on the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.cluster.cluster import Cluster
from simulator.cluster.node import NodeLayout
from simulator.network.search import path, rings


@dataclass(frozen=True, slots=True)
class Channel:
    """One of the parallel rings or trees among which a message is split evenly.

    ``nodes`` holds the group's GPUs node by node. Data enters a node at its first GPU and leaves it at its last.
    ``nic``: the NIC of the node by which it does (None: inside one node, or each GPU through its own NIC).
    """

    nic: int | None
    nodes: tuple[tuple[int, ...], ...]


def channels(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Channel, ...]:
    """Return the channels of a group.

    Across nodes there is one per NIC index that serves members on every node, so that all their NICs carry an equal
    part. In each node it enters at the GPU that the NIC serves and leaves from the next nearest, through the same NIC
    (NCCL src/graph/search.cc, with crossNic off). Groups without a common NIC run one channel, each GPU on its own NIC.

    Between nodes where every two GPUs have a link of their own there is one per GPU, on orders that together use all
    links once. It leaves a node through the NIC of its last GPU and so enters the next at the GPU of the same rail.

    Inside a node one is enough, as its switch or host treats all orders alike. Where every two GPUs have a link of
    their own, there are rings that together use all of these links equally. Where some have, there are as many rings
    along them as there are, or one that keeps near GPUs side by side.
    """
    members = by_node(cluster, ranks)
    slots = {node: [cluster.locate(rank)[1] for rank in group] for node, group in members.items()}
    if len(members) == 1:
        ((node, gpus),) = slots.items()
        orders = _orders(cluster.layout_of(node), dict(zip(gpus, ranks, strict=True)))
        return tuple(Channel(None, (order,)) for order in orders)
    served = [{nic for rank in group for nic in cluster.own_nics(rank)} for group in members.values()]
    common = sorted(served[0].intersection(*served[1:]))
    if not common:
        return (Channel(None, tuple(members.values())),)
    if all(len(gpus) > 2 and cluster.layout_of(node).meshed(gpus) for node, gpus in slots.items()):
        groups = list(members.values())
        return tuple(
            Channel(None, tuple([_zigzag(group, start)[:: -1 if odd % 2 else 1] for odd, group in enumerate(groups)]))
            for start in range(min(map(len, groups)))
        )
    return tuple(
        Channel(
            nic,
            tuple(_through(cluster, node, group, nic) for node, group in members.items()),
        )
        for nic in common
    )


def _orders(layout: NodeLayout, rank_of: dict[int, int]) -> tuple[tuple[int, ...], ...]:
    """Return the orders of a group inside a node. ``rank_of``: the rank on each of its GPUs."""
    gpus = tuple(rank_of)
    if layout.meshed(gpus):
        return _mesh_rings(tuple(rank_of.values()))
    orders = rings(gpus, layout.direct_Bps(gpus)) or (_chain(layout, gpus),)
    return tuple(tuple([rank_of[gpu] for gpu in order]) for order in orders)


def _chain(layout: NodeLayout, gpus: tuple[int, ...]) -> tuple[int, ...]:
    """Return the GPUs from the first on, each followed by the nearest that is left.

    Where several are equally near, they come in the group's order."""
    order, left = [gpus[0]], list(gpus[1:])
    while left:
        order.append(min(left, key=lambda gpu: len(layout.between[order[-1], gpu])))
        left.remove(order[-1])
    return tuple(order)


def by_node(cluster: Cluster, ranks: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Return the members on each node, nodes and members in the order of the group."""
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(cluster.node_of(rank), []).append(rank)
    return {node: tuple(group) for node, group in members.items()}


def _mesh_rings(ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return rings that cross each of the n (n-1) directed links between n ranks equally often.

    For odd n they cross them once. For even n twice, as n (n-1) links are then no whole number of rings that are each
    other's reverse. The construction is Walecki's (Alspach, Bull. Inst. Combin. Appl. 52, 2008). One rank is in the
    centre, the others on a circle, joined in a zigzag. Each turn of it is one ring.

    >>> _mesh_rings((0, 1, 2))
    ((0, 1, 2), (0, 2, 1))
    >>> len(_mesh_rings(tuple(range(7)))), len(_mesh_rings(tuple(range(8))))
    (6, 14)
    """
    centre, *circle = ranks
    m = len(circle)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(m)]
    turns = [tuple([circle[(step + turn) % m] for step in zigzag]) for turn in range(m)]
    return tuple(dict.fromkeys((centre, *way) for turn in turns for way in (turn, turn[::-1])))


def _zigzag(group: tuple[int, ...], start: int) -> tuple[int, ...]:
    """Return all of a group, from ``start`` on to either side in turn.

    The steps 1, -2, 3 ... around the group are all different. The orders of all starts thus cross each directed link
    once.

    >>> _zigzag((0, 1, 2, 3), 0), _zigzag((0, 1, 2, 3), 1)
    ((0, 1, 3, 2), (1, 2, 0, 3))
    """
    steps = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(len(group))]
    return tuple([group[(start + step) % len(group)] for step in steps])


def _through(cluster: Cluster, node: int, group: tuple[int, ...], nic: int) -> tuple[int, ...]:
    """Return the GPUs of a node with the one that ``nic`` serves first, and the nearest other last.

    Between them the order follows links of their own where these lead through all, else it goes from near to near."""
    if len(group) == 1:
        return group
    first = next(gpu for gpu in group if nic in cluster.own_nics(gpu))
    inner = [gpu for gpu in group if gpu != first]
    layout = cluster.layout_of(node)
    last = min(inner, key=lambda gpu: len(layout.to_nic[cluster.locate(gpu)[1], nic]))
    rank_of = {cluster.locate(gpu)[1]: gpu for gpu in (first, *[gpu for gpu in inner if gpu != last], last)}
    slots = tuple(rank_of)
    order = path(slots, slots[0], slots[-1], layout.direct_Bps(slots)) or (*_chain(layout, slots[:-1]), slots[-1])
    return tuple([rank_of[slot] for slot in order])
