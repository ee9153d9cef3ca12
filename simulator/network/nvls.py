"""NVLink SHARP: NVSwitches sum up what GPUs hand over, and multicast what one GPU stores.

A part of the message belongs to a GPU, its head (NCCL src/device/all_reduce.h, src/transport/nvls.cc). The head loads
the sum of that part, for which every GPU, itself included, sends its own to the switch. It stores the result, which
the switch hands to every GPU. With h heads in a node a GPU sends and receives the whole message S, and S/h more as a
head. A GPU of a ring sends 2 (n-1)/n S.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.arrays import Ints
from simulator.cluster.cluster import Cluster
from simulator.cluster.node import NodeLayout
from simulator.errors import InputError
from simulator.network.channels import Channel, by_node, channels
from simulator.network.collnet import check, through_fabric
from simulator.network.moves import SWITCH, HopTable, Moves
from simulator.network.tree import between_nodes


def all_reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Reduce in one node with each GPU the head of S/n: it sends and receives ``(1 + 1/n) S``.

    In several nodes whose fabric sums up, the heads are those beside NICs, as in `tree_all_reduce`, and the switches of
    the fabric join them.

    Raises `InputError` where the NVSwitches of the nodes cannot do it, and for several nodes whose fabric cannot.
    """
    if cluster.spec.fabric.sharp and len(by_node(cluster, ranks)) > 1:
        check(cluster, ranks, "nvls")
        _require_switches(cluster, ranks, several=True, other="nvls")
        ways = channels(cluster, ranks)
        return _in_nodes(ranks, ways, [through_fabric(channel, 1 / len(ways)) for channel in ways])
    _require_switches(cluster, ranks, several=False, other="nvls_tree")
    n, gpus = len(ranks), np.array(ranks, dtype=np.int64)
    up, down = _reduce_hops(gpus, gpus, 1 / n), _multicast_hops(gpus, gpus, 1 / n)
    return (Moves(HopTable.joined([*up, *down]), way="in_switch", channels=n),)


def reduce_scatter(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Each GPU sends S, and loads the sum of its S/n. Raises `InputError` as `all_reduce`."""
    _require_switches(cluster, ranks, several=False, other="ring")
    n, gpus = len(ranks), np.array(ranks, dtype=np.int64)
    return (Moves(HopTable.joined(_reduce_hops(gpus, gpus, 1 / n)), way="in_switch", channels=n),)


def all_gather(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Each GPU stores its S/n once, and receives S: no less than in a ring. Raises `InputError` as `all_reduce`."""
    _require_switches(cluster, ranks, several=False, other="ring")
    n, gpus = len(ranks), np.array(ranks, dtype=np.int64)
    return (Moves(HopTable.joined(_multicast_hops(gpus, gpus, 1 / n)), way="in_switch", channels=n),)


def tree_all_reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Reduce as NVLSTree does: between the heads of a channel is NCCL's double binary tree.

    A channel's head in a node is the GPU beside its NIC. All is one kernel, in which chunks of the message are under
    way everywhere at once.

    Raises `InputError` where NVSwitches cannot do it, for one node, and where a node has one member.
    """
    _require_switches(cluster, ranks, several=True, other="nvls")
    ways = channels(cluster, ranks)
    return _in_nodes(ranks, ways, [between_nodes(channel, 1 / len(ways)) for channel in ways])


def _in_nodes(ranks: tuple[int, ...], ways: Sequence[Channel], between: Sequence[HopTable]) -> tuple[Moves, ...]:
    """Return the moves up to the heads of every node and down from them; ``between``: the hops between the heads."""
    gpus, heads = np.array(ranks, dtype=np.int64), np.concatenate([channel.heads for channel in ways])
    inside = [*_reduce_hops(gpus, heads, 1 / len(ways)), *_multicast_hops(gpus, heads, 1 / len(ways))]
    return (Moves(HopTable.joined([*between, *inside]), way="in_switch", channels=len(ways)),)


def _reduce_hops(gpus: Ints, heads: Ints, share: float) -> list[HopTable]:
    """Return the hops of a sum: every GPU hands all of its message to the switch, every head loads its ``share``."""
    return [_switch_hops(gpus, 1.0, up=True), _switch_hops(heads, share, up=False)]


def _multicast_hops(gpus: Ints, heads: Ints, share: float) -> list[HopTable]:
    """Return the hops of a multicast: every head stores its ``share``, the switch hands all shares to every GPU."""
    return [_switch_hops(heads, share, up=True), _switch_hops(gpus, 1.0, up=False)]


def _switch_hops(gpus: Ints, load: float, *, up: bool) -> HopTable:
    """Return a hop of each GPU to its switch, or from there; that of the first is on the critical path."""
    switch = np.full(len(gpus), SWITCH)
    sender, receiver = (gpus, switch) if up else (switch, gpus)
    return HopTable.alike(sender, receiver, None, load, np.where(np.arange(len(gpus)) == 0, 1.0, 0.0))


def _require_switches(cluster: Cluster, ranks: tuple[int, ...], *, several: bool, other: str) -> None:
    """Raise `InputError` where NVSwitches do not sum up, or the group does not sit as the algorithm needs; ``other`` is
    what the operation has for groups that sit otherwise."""
    name = "nvls_tree" if several else "nvls"
    node = cluster.gpu_places[0][list(ranks)]
    _, first_of_make = np.unique(cluster.node_makes[node], return_index=True)
    links = [cluster.spec.node_at(one).nvlink for one in node[first_of_make].tolist()]
    if not all(link.sharp for link in links):
        able = all(link.kind == "nvswitch" for link in links)
        raise InputError(
            f"{name} needs NVSwitches that sum up (NVLink SHARP, from Hopper on), which {cluster.name} lacks",
            key="algorithm",
            found=name,
            fix="algorithm ring"
            + (", or nvlink: {sharp: true} in the cluster file, where its switches can" if able else ""),
        )
    nodes = by_node(cluster, ranks)
    for number, members in nodes.items():
        layout = cluster.layout_of(number)
        if not layout.joins_all and not _joins_first(layout, [cluster.locate(rank)[1] for rank in members]):
            raise InputError(
                f"{name} needs NVLink from every member to the switches, and links of node{number} are dead",
                key="algorithm",
                found=name,
                fix="algorithm ring",
            )
    if several != (len(nodes) > 1):
        where = "between nodes" if several else "inside one node"
        raise InputError(f"{name} is for groups {where}", key="algorithm", found=name, fix=f"algorithm {other}")
    if min(map(len, nodes.values())) < 2:
        raise InputError(
            f"{name} needs two members or more in each node", key="algorithm", found=name, fix="algorithm tree or ring"
        )


def _joins_first(layout: NodeLayout, slots: Sequence[int]) -> bool:
    """Return whether NVLinks join the first of some GPUs of a node with each other one."""
    return all(layout.joins(slots[0], other) for other in slots[1:])
