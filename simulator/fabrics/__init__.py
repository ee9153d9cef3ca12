"""Networks between nodes, one file each. Adding one: write its function in a file, add it to the list below.

The function gets the section ``fabric`` of a cluster file and the bytes/s of every NIC, node by node, and says which
switch each NIC is cabled to, and what joins the switches. Trunks must lead from NIC k of every node to NIC k of every
other; whether they also join different NICs is the fabric's choice. Routes have the fewest trunks; where several ways
are equally short, traffic is spread over them at every switch, as their bandwidths are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulator.fabrics.dragonfly import dragonfly
from simulator.fabrics.fat_tree import fat_tree
from simulator.fabrics.rail_fat_tree import rail_fat_tree
from simulator.fabrics.rail_only import rail_only
from simulator.fabrics.sites import join_sites
from simulator.fabrics.switch_tree import switch_tree
from simulator.fabrics.switches import Ports, Switches, Trunk
from simulator.fabrics.torus import torus
from simulator.fabrics.tree import ports_down

if TYPE_CHECKING:
    from simulator.config.cluster import Fabric

FABRICS: dict[str, Callable[[Fabric, Ports], Switches]] = {
    "rail_fat_tree": rail_fat_tree,
    "rail_only": rail_only,
    "fat_tree": fat_tree,
    "dragonfly": dragonfly,
    "torus": torus,
    "switch_tree": switch_tree,
}
#: Which keys of the section a fabric reads, where that is not all of them.
KEYS: dict[str, tuple[str, ...]] = {
    "rail_fat_tree": ("tiers", "radix", "oversubscription"),
    "rail_only": ("tiers", "radix", "oversubscription"),
    "fat_tree": ("tiers", "radix", "oversubscription"),
    "dragonfly": ("radix",),
    "torus": ("shape",),
    "switch_tree": ("switches", "oversubscription"),
}


def switches(fabric: Fabric, ports: Ports) -> Switches:
    """The network of a cluster, of one site or of several. Raises `InputError` where it cannot be built."""
    build = FABRICS[fabric.kind]
    return build(fabric, ports) if fabric.sites is None else join_sites(fabric, ports, build)


__all__ = ["FABRICS", "KEYS", "Ports", "Switches", "Trunk", "ports_down", "switches"]
