"""Networks between nodes, one file each. Adding one: write its file, add it to the list below.

The function of a `FabricKind` gets the section ``fabric`` of a cluster file and the bytes/s of every NIC, node by node.
It says which switch each NIC is cabled to, and what joins the switches. Trunks must lead from NIC k of every node to
NIC k of every other; whether they also join different NICs is the fabric's choice. Routes have the fewest trunks; where
several ways are equally short, traffic is spread over them at every switch, as their bandwidths are. A detour around
dead trunks is one way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields

from simulator.errors import InputError
from simulator.fabrics import dragonfly, fat_tree, rail_fat_tree, rail_only, switch_tree, torus
from simulator.fabrics.fabric import Fabric, FabricSwitch, NetworkKind, Sites
from simulator.fabrics.sites import join_sites
from simulator.fabrics.switches import FabricKind, Ports, Switches, Trunk
from simulator.fabrics.tree import ports_down
from simulator.input_files import brief, closest

FABRICS: dict[str, FabricKind] = {
    "rail_fat_tree": rail_fat_tree.KIND,
    "rail_only": rail_only.KIND,
    "fat_tree": fat_tree.KIND,
    "dragonfly": dragonfly.KIND,
    "torus": torus.KIND,
    "switch_tree": switch_tree.KIND,
}


def switches(fabric: Fabric, ports: Ports) -> Switches:
    """The network of a cluster, of one site or of several. Raises `InputError` where it cannot be built."""
    build = FABRICS[fabric.kind].build
    return build(fabric, ports) if fabric.sites is None else join_sites(fabric, ports, build)


def fabric_problems(fabric: Fabric) -> Iterator[InputError]:
    """Yield what is wrong with the section ``fabric`` of a cluster file."""
    if fabric.kind not in FABRICS:
        near = closest(fabric.kind, FABRICS)
        yield InputError(
            "is none of the known values",
            key="fabric.kind",
            found=brief(fabric.kind),
            allowed=", ".join(FABRICS),
            fix=f"kind: {near}" if near else None,
        )
        return
    for field in fields(fabric):
        value = getattr(fabric, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name in keys_of_kinds() - set(FABRICS[fabric.kind].keys) and value != default:
            allowed = f"with kind {', '.join(kind for kind, entry in FABRICS.items() if field.name in entry.keys)}"
            yield InputError(f"{fabric.kind} has none", key=f"fabric.{field.name}", found=brief(value), allowed=allowed)
    if fabric.sharp and fabric.transport != "infiniband":
        fix = "transport: infiniband"
        yield InputError("only InfiniBand switches sum up", key="fabric.sharp", found=fabric.transport, fix=fix)
    yield from FABRICS[fabric.kind].check(fabric)


def keys_of_kinds() -> set[str]:
    """Return the keys that some kinds of fabric read and others do not."""
    return {name for entry in FABRICS.values() for name in entry.keys}


__all__ = [
    "FABRICS",
    "Fabric",
    "FabricKind",
    "FabricSwitch",
    "NetworkKind",
    "Ports",
    "Sites",
    "Switches",
    "Trunk",
    "fabric_problems",
    "keys_of_kinds",
    "ports_down",
    "switches",
]
