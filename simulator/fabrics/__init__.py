"""Networks between nodes, one file each. Adding one: write its function in a file, add it to the list below.

The function gets the section ``fabric`` of a cluster file and the bytes/s of every NIC, node by node, and says which
switch each NIC is cabled to, and what joins the switches. Trunks must lead from NIC k of every node to NIC k of every
other; whether they also join different NICs is the fabric's choice. Routes have the fewest trunks; where several ways
are equally short, traffic is spread over them at every switch, as their bandwidths are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulator.fabrics.rail_fat_tree import rail_fat_tree
from simulator.fabrics.switch_tree import switch_tree
from simulator.fabrics.switches import Ports, Switches, Trunk

if TYPE_CHECKING:
    from simulator.config.cluster import Fabric

FABRICS: dict[str, Callable[[Fabric, Ports], Switches]] = {
    "rail_fat_tree": rail_fat_tree,
    "switch_tree": switch_tree,
}

__all__ = ["FABRICS", "Ports", "Switches", "Trunk"]
