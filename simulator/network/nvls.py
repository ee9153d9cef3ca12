"""NVLink SHARP: NVSwitches sum up what GPUs hand over, and multicast what one GPU stores.

A part of the message belongs to a GPU, its head (NCCL src/device/all_reduce.h, src/transport/nvls.cc). The head loads
the sum of that part, for which every GPU, itself included, sends its own to the switch. It stores the result, which
the switch hands to every GPU. With h heads in a node a GPU sends and receives the whole message S, and S/h more as a
head. A GPU of a ring sends 2 (n-1)/n S.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simulator.cluster.cluster import Cluster
from simulator.errors import InputError
from simulator.network.channels import by_node, channels
from simulator.network.collnet import check, through_fabric
from simulator.network.moves import SWITCH, Hop, Moves
from simulator.network.tree import between_nodes


def all_reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Reduce in one node with each GPU the head of S/n: it sends and receives ``(1 + 1/n) S``.

    In several nodes whose fabric sums up, the heads are those beside NICs, as in `tree_all_reduce`, and the switches of
    the fabric join them.

    Raises `InputError` where the NVSwitches of the nodes cannot do it, and for several nodes whose fabric cannot.
    """
    if cluster.spec.fabric.sharp and len(by_node(cluster, ranks)) > 1:
        check(cluster, ranks, "nvls")
        _check(cluster, ranks, several=True, other="nvls")
        strung = channels(cluster, ranks)
        return _in_nodes(
            cluster, ranks, [hop for channel in strung for hop in through_fabric(channel, 1 / len(strung))]
        )
    _check(cluster, ranks, several=False, other="nvls_tree")
    n = len(ranks)
    hops = [*_up(ranks, 1.0), *_to_heads(ranks, 1 / n), *_from_heads(ranks, 1 / n), *_down(ranks, 1.0)]
    return (Moves(hops, way="in_switch", channels=n),)


def reduce_scatter(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Each GPU sends S, and loads the sum of its S/n. Raises `InputError` as `all_reduce`."""
    _check(cluster, ranks, several=False, other="ring")
    n = len(ranks)
    return (Moves([*_up(ranks, 1.0), *_to_heads(ranks, 1 / n)], way="in_switch", channels=n),)


def all_gather(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Each GPU stores its S/n once, and receives S: no less than in a ring. Raises `InputError` as `all_reduce`."""
    _check(cluster, ranks, several=False, other="ring")
    n = len(ranks)
    return (Moves([*_from_heads(ranks, 1 / n), *_down(ranks, 1.0)], way="in_switch", channels=n),)


def tree_all_reduce(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Reduce as NVLSTree does: between the heads of a channel is NCCL's double binary tree.

    A channel's head in a node is the GPU beside its NIC. All is one kernel, in which chunks of the message are under
    way everywhere at once.

    Raises `InputError` where NVSwitches cannot do it, for one node, and where a node has one member.
    """
    _check(cluster, ranks, several=True, other="nvls")
    strung = channels(cluster, ranks)
    return _in_nodes(cluster, ranks, [hop for channel in strung for hop in between_nodes(channel, 1 / len(strung))])


def _in_nodes(cluster: Cluster, ranks: tuple[int, ...], between: list[Hop]) -> tuple[Moves, ...]:
    """Return the moves up to the heads of every node and down from them; ``between``: the hops between the heads."""
    strung = channels(cluster, ranks)
    share = 1 / len(strung)
    hops = between
    for number, members in enumerate(by_node(cluster, ranks).values()):
        heads = [channel.nodes[number][0] for channel in strung]
        weight = 1.0 if number == 0 else 0.0
        hops += [*_up(members, weight), *_to_heads(heads, share, weight)]
        hops += [*_from_heads(heads, share, weight), *_down(members, weight)]
    return (Moves(hops, way="in_switch", channels=len(strung)),)


def _up(members: Sequence[int], weight: float) -> Iterator[Hop]:
    """Every member hands its whole message to the switch, as heads ask for it."""
    for position, gpu in enumerate(members):
        yield Hop(gpu, SWITCH, None, 1.0, 0.0 if position else weight)


def _to_heads(heads: Sequence[int], share: float, weight: float = 1.0) -> Iterator[Hop]:
    for position, gpu in enumerate(heads):
        yield Hop(SWITCH, gpu, None, share, 0.0 if position else weight)


def _from_heads(heads: Sequence[int], share: float, weight: float = 1.0) -> Iterator[Hop]:
    for position, gpu in enumerate(heads):
        yield Hop(gpu, SWITCH, None, share, 0.0 if position else weight)


def _down(members: Sequence[int], weight: float) -> Iterator[Hop]:
    for position, gpu in enumerate(members):
        yield Hop(SWITCH, gpu, None, 1.0, 0.0 if position else weight)


def _check(cluster: Cluster, ranks: tuple[int, ...], *, several: bool, other: str) -> None:
    """Raise `InputError` where NVSwitches do not sum up, or the group does not sit as the algorithm needs; ``other`` is
    what the operation has for groups that sit otherwise."""
    name = "nvls_tree" if several else "nvls"
    nodes = by_node(cluster, ranks)
    if not all(cluster.spec.node_at(node).nvlink.sharp for node in nodes):
        raise InputError(
            f"{name} needs NVSwitches that sum up (NVLink SHARP, from Hopper on), which {cluster.name} lacks",
            key="algorithm",
            found=name,
            fix="node.nvlink.sharp: true in the cluster file, where its switches can",
        )
    slots = {node: [cluster.locate(rank)[1] for rank in members] for node, members in nodes.items()}
    for node, (first, *rest) in slots.items():
        if not all((first, other) in cluster.layout_of(node).nvlink for other in rest):
            raise InputError(
                f"{name} needs NVLink from every member to the switches, and links of node{node} are dead",
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
