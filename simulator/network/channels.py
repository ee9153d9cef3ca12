"""NCCL's channels: the orders in which a group of ranks is strung on the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from simulator.arrays import Bools, Ints, run_starts
from simulator.cluster.cluster import Cluster
from simulator.cluster.node import NodeLayout
from simulator.network.search import path, rings


@dataclass(frozen=True, eq=False)
class Channel:
    """One of the parallel rings or trees among which a message is split evenly.

    ``members`` holds the group's GPUs node by node, those of each node from its place in ``first`` on. Data enters a
    node at its first GPU and leaves it at its last. ``nic``: the NIC of the node by which it does (None: inside one
    node, or each GPU through its own NIC).
    """

    nic: int | None
    members: Ints
    first: Ints

    @classmethod
    def through(cls, nic: int | None, nodes: Sequence[Sequence[int]]) -> Channel:
        """Return the channel through the GPUs of these nodes."""
        sizes = np.fromiter(map(len, nodes), dtype=np.int64, count=len(nodes))
        members = np.fromiter((gpu for node in nodes for gpu in node), dtype=np.int64, count=int(sizes.sum()))
        return cls(nic, members, np.cumsum(sizes) - sizes)

    @cached_property
    def heads(self) -> Ints:
        """The first GPU of every node."""
        return self.members[self.first]

    @cached_property
    def sizes(self) -> Ints:
        """Number of GPUs of every node."""
        return np.diff(self.first, append=len(self.members))

    @cached_property
    def ends_node(self) -> Bools:
        """True of the last GPU of every node."""
        ends = np.zeros(len(self.members), dtype=bool)
        ends[self.first[1:] - 1] = True
        ends[-1:] = True
        return ends

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs of every node."""
        return tuple([tuple(gpus.tolist()) for gpus in np.split(self.members, self.first[1:])])


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
    strung: tuple[Channel, ...] | None = cluster.memo.get(("channels", ranks))
    if strung is None:
        strung = cluster.memo["channels", ranks] = _strung(cluster, ranks)
    return strung


def _strung(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Channel, ...]:
    members = by_node(cluster, ranks)
    if len(members) == 1:
        ((node, gpus),) = ((node, [cluster.locate(rank)[1] for rank in group]) for node, group in members.items())
        orders = _orders(cluster.layout_of(node), dict(zip(gpus, ranks, strict=True)))
        return tuple([Channel.through(None, (order,)) for order in orders])
    groups = Channel.through(None, list(members.values()))
    kinds = _alike_nodes(cluster, list(members), groups)
    served = [{nic for slot in kind.slots for nic in kind.layout.own_nics[slot]} for kind in kinds]
    common = sorted(served[0].intersection(*served[1:]))
    if not common:
        return (groups,)
    if all(len(kind.slots) > 2 and kind.layout.meshed(kind.slots) for kind in kinds):
        return tuple(
            [
                Channel.through(
                    None,
                    [_zigzag(group, start)[:: -1 if odd % 2 else 1] for odd, group in enumerate(members.values())],
                )
                for start in range(min(map(len, members.values())))
            ]
        )
    return tuple([_reordered(groups, kinds, nic) for nic in common])


@dataclass(frozen=True, eq=False)
class _AlikeNodes:
    """Nodes of one ``layout`` on which a group has the same ``slots``; ``rows``: their places among its nodes."""

    layout: NodeLayout
    slots: tuple[int, ...]
    rows: list[int]


def _alike_nodes(cluster: Cluster, nodes: Sequence[int], groups: Channel) -> list[_AlikeNodes]:
    """Return the nodes of a group, those together whose layout and slots are equal."""
    kinds: dict[object, _AlikeNodes] = {}
    slots, bounds = cluster.gpu_places[1][groups.members].tolist(), [*groups.first.tolist(), len(groups.members)]
    for row, (node, (start, end)) in enumerate(zip(nodes, pairwise(bounds), strict=True)):
        layout, in_node = cluster.layout_of(node), tuple(slots[start:end])
        key = id(layout), in_node
        if key not in kinds:
            kinds[key] = _AlikeNodes(layout, in_node, [])
        kinds[key].rows.append(row)
    return list(kinds.values())


def _reordered(groups: Channel, kinds: Sequence[_AlikeNodes], nic: int) -> Channel:
    """Return the channel that goes through every node in the order of `_through`."""
    members = np.empty_like(groups.members)
    for kind in kinds:
        places = groups.first[kind.rows][:, None] + np.arange(len(kind.slots))
        members[places] = groups.members[places[:, _through(kind.layout, kind.slots, nic)]]
    return Channel(nic, members, groups.first)


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
    nodes = cluster.gpu_places[0][list(ranks)]
    starts = run_starts(nodes)
    members: dict[int, tuple[int, ...]] = {}
    for node, (start, end) in zip(nodes[starts].tolist(), pairwise([*starts.tolist(), len(ranks)]), strict=True):
        members[node] = members.get(node, ()) + ranks[start:end]
    return members


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


def _through(layout: NodeLayout, slots: tuple[int, ...], nic: int) -> list[int]:
    """Return the places among ``slots`` of the GPU that ``nic`` serves, of all others, and of the nearest other one.

    Between them the order follows links of their own where these lead through all, else it goes from near to near."""
    if len(slots) == 1:
        return [0]
    first = next(slot for slot in slots if nic in layout.own_nics[slot])
    inner = [slot for slot in slots if slot != first]
    last = min(inner, key=lambda slot: len(layout.to_nic[slot, nic]))
    gpus = (first, *[slot for slot in inner if slot != last], last)
    order = path(gpus, first, last, layout.direct_Bps(gpus)) or (*_chain(layout, gpus[:-1]), last)
    return [slots.index(slot) for slot in order]
