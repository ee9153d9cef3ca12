"""Any tree of switches, as a file lists it."""

from __future__ import annotations

from collections.abc import Iterator

from simulator.errors import InputError
from simulator.fabrics.fabric import Fabric
from simulator.fabrics.switches import FabricKind, Ports, Switches, Trunk


def switch_tree(fabric: Fabric, ports: Ports) -> Switches:
    """Build the tree of ``fabric.switches``; nodes are numbered in its order, all NICs of a node cabled to one switch.

    The link above a switch carries what the links below it do together, over ``fabric.oversubscription``, unless the
    file gives it. Several cables are one link (adaptive routing).

    Raises `InputError` where it is no tree, or does not hold the nodes.
    """
    tree = fabric.switches
    depth = _depths(fabric)
    roots = [name for name, switch in tree.items() if switch.at is None]
    if len(roots) != 1:
        message = "one switch has none above it"
        raise InputError(message, key="fabric.switches", found=", ".join(roots), allowed="one root")
    leaves = [name for name, switch in tree.items() for _ in range(switch.nodes)]
    if len(leaves) < len(ports):
        raise InputError(
            "hold fewer nodes than there are", key="fabric.switches", found=len(leaves), allowed=f">= {len(ports)}",
            fix=f"nodes: {len(leaves)}",
        )  # fmt: skip
    cabled = tuple([(leaf,) * len(nics) for leaf, nics in zip(leaves, ports, strict=False)])
    below = dict.fromkeys(tree, 0.0)
    for leaf, nics in zip(leaves, ports, strict=False):
        below[leaf] += sum(nics)
    trunks = []
    for name in sorted(tree, key=lambda name: -depth[name]):
        above = tree[name].at
        if above is not None and below[name]:
            up_Bps = tree[name].bandwidth_Bps or below[name] / fabric.oversubscription
            below[above] += up_Bps
            trunks.append(Trunk(f"{name}.up", name, above, up_Bps))
    return Switches(cabled, tuple(trunks), max(depth.values()), roots[0])


def _depths(fabric: Fabric) -> dict[str, int]:
    """Return the depth of each switch: 1 for a root, 2 for what hangs under it.

    Raises `InputError` where a switch hangs under none, or under itself."""
    tree = fabric.switches
    depth: dict[str, int] = {}
    for name in tree:
        way = {name: None}  # upwards, to a root or a switch whose depth is known
        top = name
        while top not in depth and (up := tree[top].at) is not None:
            if up not in tree:
                names = ", ".join(list(tree)[:12])
                key = f"fabric.switches.{top}.at"
                raise InputError("is no switch of this fabric", key=key, found=up, allowed=names)
            if up in way:
                circle = " in ".join([*way, up])
                raise InputError("hangs under itself", key=f"fabric.switches.{name}.at", found=circle)
            way[up] = None
            top = up
        first = depth.get(top, 1)
        depth.update((one, first + above) for above, one in enumerate(reversed(way)))
    return depth


def _has_switches(fabric: Fabric) -> Iterator[InputError]:
    if not fabric.switches:
        such = "such as {s0: {}, s1: {at: s0, nodes: 8}}"
        yield InputError("must be given for a switch_tree", key="fabric.switches", allowed=such)


KIND = FabricKind(switch_tree, ("switches", "oversubscription"), _has_switches)
