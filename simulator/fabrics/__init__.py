"""Networks between nodes, one file each. Adding one: write its file, add it to the list below.

The function of a `Kind` gets the section ``fabric`` of a cluster file and the bytes/s of every NIC, node by node, and
says which switch each NIC is cabled to, and what joins the switches. Trunks must lead from NIC k of every node to NIC k
of every other; whether they also join different NICs is the fabric's choice. Routes have the fewest trunks; where
several ways are equally short, traffic is spread over them at every switch, as their bandwidths are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.fabrics import dragonfly, fat_tree, rail_fat_tree, rail_only, switch_tree, torus
from simulator.fabrics.sites import join_sites
from simulator.fabrics.switches import Kind, Ports, Switches, Trunk
from simulator.fabrics.tree import ports_down

if TYPE_CHECKING:
    from simulator.config.cluster import Fabric

FABRICS: dict[str, Kind] = {
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


__all__ = ["FABRICS", "Kind", "Ports", "Switches", "Trunk", "ports_down", "switches"]
