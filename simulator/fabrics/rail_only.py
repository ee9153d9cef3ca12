"""Rails that never meet."""

from __future__ import annotations

from simulator.fabrics.fabric import Fabric
from simulator.fabrics.switches import FabricKind, Ports, Switches, Trunk
from simulator.fabrics.tree import KEYS, join, leaves_lead_up, ports_down, too_many


def rail_only(fabric: Fabric, ports: Ports) -> Switches:
    """Build a fat tree per rail, and nothing between rails (Wang et al., arXiv 2307.12169).

    Messages change rails inside a node, over NVLink (NCCL's PXN). NIC k of every node hangs in the tree of rail k.

    Raises `InputError` where the tiers of a rail do not hold the nodes.
    """
    nodes, rails, down = len(ports), max(map(len, ports)), ports_down(fabric)
    rows = [[f"rail{rail}.leaf{pod}" for pod in range(-(-nodes // down))] for rail in range(rails)]
    leaves = tuple([tuple([row[node // down] for row in rows]) for node in range(nodes)])
    trunks: list[Trunk] = []
    tiers = 1
    for rail, row in enumerate(rows):
        joined = join([row], fabric, max(map(max, ports)), f"rail{rail}.")
        if joined is None:
            raise too_many(fabric, nodes, "a tree per rail", down, 1)
        trunks += joined[0]
        tiers = joined[1]
    return Switches(leaves, tuple(trunks), tiers)


KIND = FabricKind(rail_only, KEYS, leaves_lead_up)
