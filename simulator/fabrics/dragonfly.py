"""The dragonfly."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from simulator.errors import InputError
from simulator.fabrics.fabric import Fabric
from simulator.fabrics.switches import FabricKind, Ports, Switches, Trunk


def dragonfly(fabric: Fabric, ports: Ports) -> Switches:
    """Build a balanced dragonfly of ``fabric.radix``-port routers (Kim, Dally, Scott and Abts, ISCA 2008, section 3.1).

    A router has p NICs, h = p cables to other groups, and one to each other router of its group of a = 2p routers. So
    4p - 1 ports are used. There are as few groups as hold the nodes, NICs dealt to routers in order. The a h cables of
    a group are dealt evenly to the other groups, in turn over its routers. Those left over are not plugged in.

    Messages go the shortest way, over one cable between groups at most; several such ways share them (adaptive minimal
    routing). Detours over a third group (Valiant) are not taken. Outside traffic enters at the first router.

    Raises `InputError` where ``radix`` is too small, or a h + 1 groups do not hold the nodes.
    """
    nodes, most = len(ports), max(map(len, ports))
    p = (fabric.radix + 1) // 4
    a, cables = 2 * p, 2 * p * p
    per_group = a * p // most
    if per_group == 0:
        raise InputError(
            f"groups of {a} routers have {a * p} ports for NICs, and a node has {most}",
            key="fabric.radix",
            found=fabric.radix,
            fix="a larger fabric.radix",
        )
    groups = -(-nodes // per_group)
    if groups > cables + 1:
        raise InputError(
            f"a dragonfly of {fabric.radix}-port routers has at most {cables + 1} groups",
            key="fabric.radix",
            found=fabric.radix,
            allowed=f"at most {(cables + 1) * per_group} nodes of {most} NICs",
            fix="a larger fabric.radix",
        )
    port_Bps = max(map(max, ports))
    leaves = []
    for node, nics in enumerate(ports):
        group, seat = divmod(node, per_group)
        leaves.append(tuple([_router(group, (seat * most + nic) // p) for nic in range(len(nics))]))
    trunks = [
        Trunk(f"{_router(group, i)}-router{j}", _router(group, i), _router(group, j), port_Bps)
        for group in range(groups)
        for i, j in combinations(range(a), 2)
    ]
    for ends, count in _between_groups(groups, cables, p).items():
        trunks.append(Trunk("-".join(ends), *ends, count * port_Bps))
    return Switches(tuple(leaves), tuple(trunks), 1, _router(0, 0))


def _router(group: int, number: int) -> str:
    return f"group{group}.router{number}"


def _between_groups(groups: int, cables: int, h: int) -> dict[tuple[str, str], int]:
    """Return the cables between every two routers of different groups.

    Port q of a group, the (q mod h)-th of router q / h, leads to the (q mod (groups - 1) + 1)-th group after it."""
    count: dict[tuple[str, str], int] = {}
    if groups == 1:
        return count
    other_groups = groups - 1
    for turn in range(cables // other_groups):
        for i, j in combinations(range(groups), 2):
            there, back = turn * other_groups + j - i - 1, turn * other_groups + groups - 1 - (j - i)
            ends = _router(i, there // h), _router(j, back // h)
            count[ends] = count.get(ends, 0) + 1
    return count


def _large_enough(fabric: Fabric) -> Iterator[InputError]:
    if fabric.radix < 7:
        yield InputError("is too small for a dragonfly", key="fabric.radix", found=fabric.radix, allowed=">= 7")


KIND = FabricKind(dragonfly, ("radix",), _large_enough)
