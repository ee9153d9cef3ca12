"""The rail-optimised fat tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.errors import InputError
from simulator.fabrics.switches import Ports, Switches, Trunk

if TYPE_CHECKING:
    from simulator.config.cluster import Fabric


def rail_fat_tree(fabric: Fabric, ports: Ports) -> Switches:
    """A rail-optimised fat tree with as few tiers as hold the nodes, at most ``fabric.tiers``.

    A pod is the nodes under one leaf per rail: NIC k of each is cabled to the pod's leaf of rail k (NVIDIA DGX SuperPOD
    reference architecture, compute fabric: 20 nodes with 40-port HDR leaves, 32 with 64-port NDR leaves). Where all
    nodes fit in one pod there is no second tier, and rails meet only inside the nodes. Two tiers: spines join all
    leaves. Three: a group of spines joins half a radix of leaves of one rail, so that most traffic of a rail stays
    below the core that joins the groups, and rails are alike.

    The uplinks of a leaf are one link of their total bandwidth, and so are those of a spine group: adaptive routing
    spreads the packets of each flow over them (InfiniBand; packet spraying on Ethernet), so that no two flows collide
    by chance. ``oversubscription`` splits the ports of a leaf; the spines above do not block. All ports of switches are
    as fast as the fastest NIC.

    Raises `InputError` where the tiers do not hold the nodes.
    """
    nodes, rails, radix = len(ports), max(map(len, ports)), fabric.radix
    port_Bps = max(map(max, ports))
    if fabric.tiers == 1:
        down = radix
    else:
        down = min(max(int(radix * fabric.oversubscription / (1 + fabric.oversubscription)), 1), radix - 1)
    uplink_Bps = (radix - down) * port_Bps
    pods = -(-nodes // down)
    of_pod = [tuple([_leaf(rail, pod) for rail in range(rails)]) for pod in range(pods)]
    leaves = tuple([of_pod[node // down] for node in range(nodes)])
    if pods == 1:
        return Switches(leaves, (), 1)
    if fabric.tiers >= 2 and pods * rails <= radix:
        every = [_leaf(rail, pod) for rail in range(rails) for pod in range(pods)]
        return Switches(leaves, tuple(Trunk(f"{leaf}.up", leaf, "spine0", uplink_Bps) for leaf in every), 2)
    half = radix // 2
    groups = [
        [_leaf(rail, pod) for pod in range(first, min(first + half, pods))]
        for rail in range(rails)
        for first in range(0, pods, half)
    ]
    if fabric.tiers >= 3 and len(groups) <= radix:
        lower = [Trunk(f"{leaf}.up", leaf, f"spine{g}", uplink_Bps) for g, group in enumerate(groups) for leaf in group]
        upper = [Trunk(f"spine{g}.up", f"spine{g}", "core", uplink_Bps * len(group)) for g, group in enumerate(groups)]
        return Switches(leaves, tuple(lower + upper), 3)
    holds = {1: down, 2: radix // rails * down, 3: radix // rails * half * down}[fabric.tiers]
    raise InputError(
        f"{fabric.tiers} tier(s) of {radix}-port switches do not hold {nodes} nodes with {rails} rails",
        key="fabric.tiers",
        found=fabric.tiers,
        allowed=f"at most {holds} nodes",
        fix="more tiers, or a larger fabric.radix" if fabric.tiers < 3 else "a larger fabric.radix",
    )


def _leaf(rail: int, pod: int) -> str:
    return f"rail{rail}.leaf{pod}"
