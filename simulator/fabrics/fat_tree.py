"""The plain fat tree."""

from __future__ import annotations

from simulator.fabrics.fabric import Fabric
from simulator.fabrics.switches import FabricKind, Ports, Switches
from simulator.fabrics.tree import KEYS, join, leaves_lead_up, ports_down, too_many


def fat_tree(fabric: Fabric, ports: Ports) -> Switches:
    """Build a fat tree with all NICs of a node on one leaf, and as many nodes under a leaf as it has ports for.

    A node with more NICs than that has leaves of its own. Leaves are joined by spines, and these by a core, in at most
    ``fabric.tiers``. All ports are as fast as the fastest NIC.

    Raises `InputError` where the tiers do not hold the nodes.
    """
    nodes, most, down = len(ports), max(map(len, ports)), ports_down(fabric)
    per_node, per_leaf = -(-most // down), max(down // most, 1)
    leaves = tuple(
        [
            tuple([f"leaf{node // per_leaf * per_node + nic // down}" for nic in range(len(nics))])
            for node, nics in enumerate(ports)
        ]
    )
    row = list(dict.fromkeys(leaf for node_leaves in leaves for leaf in node_leaves))
    joined = join([row], fabric, max(map(max, ports)))
    if joined is None:
        raise too_many(fabric, nodes, f"{most} NICs", per_leaf / per_node, 1)
    return Switches(leaves, *joined)


KIND = FabricKind(fat_tree, KEYS, leaves_lead_up)
