"""The rail-optimised fat tree."""

from __future__ import annotations

from simulator.fabrics.fabric import Fabric
from simulator.fabrics.switches import FabricKind, Ports, Switches
from simulator.fabrics.tree import KEYS, join, leaves_lead_up, ports_down, too_many


def rail_fat_tree(fabric: Fabric, ports: Ports) -> Switches:
    """Build a rail-optimised fat tree with as few tiers as hold the nodes, at most ``fabric.tiers``.

    A pod is the nodes under one leaf per rail: NIC k of each is cabled to the pod's leaf of rail k. NVIDIA's DGX
    SuperPOD has 20 nodes with 40-port HDR leaves, 32 with 64-port NDR leaves (reference architecture, compute fabric).
    Where all nodes fit in one pod there is no second tier, and rails meet only inside the nodes, unless the site is
    joined to others. In three tiers spine groups are of one rail each. All ports are as fast as the fastest NIC.

    Raises `InputError` where the tiers do not hold the nodes.
    """
    nodes, rails, down = len(ports), max(map(len, ports)), ports_down(fabric)
    pod_leaves = [tuple([f"rail{rail}.leaf{pod}" for rail in range(rails)]) for pod in range(-(-nodes // down))]
    leaves = tuple([pod_leaves[node // down] for node in range(nodes)])
    if len(pod_leaves) == 1 and (fabric.sites is None or fabric.tiers == 1):
        return Switches(leaves, (), 1)
    joined = join(list(zip(*pod_leaves, strict=True)), fabric, max(map(max, ports)))
    if joined is None:
        raise too_many(fabric, nodes, f"{rails} rails", down, rails)
    return Switches(leaves, *joined)


KIND = FabricKind(rail_fat_tree, KEYS, leaves_lead_up)
