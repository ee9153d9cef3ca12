"""Several data centres."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

from simulator.errors import InputError
from simulator.fabrics.fabric import Fabric
from simulator.fabrics.switches import Ports, Switches, Trunk


def join_sites(fabric: Fabric, ports: Ports, inside: Callable[[Fabric, Ports], Switches]) -> Switches:
    """Build ``fabric.sites.count`` fabrics of the same kind, with equal parts of the nodes in order.

    A WAN link joins each two of them, from the top of one to the top of the other. It carries what its bandwidth allows
    and no more than its window per round trip (RFC 1323, section 1.1: rate <= window / RTT). The window is the number
    of bytes that may be on their way, unacknowledged, in each direction.

    Raises `InputError` where the nodes do not divide, or the fabric has no one top.
    """
    sites = fabric.sites
    assert sites is not None
    if len(ports) % sites.count:
        raise InputError(
            f"{len(ports)} nodes do not divide by {sites.count} sites",
            key="fabric.sites.count",
            found=sites.count,
            fix=f"nodes: a multiple of {sites.count}",
        )
    each = len(ports) // sites.count
    parts = [inside(fabric, ports[site * each : (site + 1) * each]) for site in range(sites.count)]
    if not parts[0].top:
        raise InputError(
            f"{fabric.kind} of {parts[0].tiers} tier(s) has no switch above all nodes, from which to leave the site",
            key="fabric.sites",
            fix="kind: fat_tree",
        )
    leaves: list[tuple[str, ...]] = []
    trunks: list[Trunk] = []
    for site, part in enumerate(parts):
        leaves += [tuple([f"site{site}.{leaf}" for leaf in node_leaves]) for node_leaves in part.leaves]
        trunks += [
            replace(
                trunk,
                name=f"site{site}.{trunk.name}",
                lower=f"site{site}.{trunk.lower}",
                upper=f"site{site}.{trunk.upper}",
            )
            for trunk in part.trunks
        ]
    bandwidth_Bps = sites.bandwidth_bps / 8
    if sites.window_bytes is not None and sites.latency_s:
        bandwidth_Bps = min(bandwidth_Bps, sites.window_bytes / (2 * sites.latency_s))
    for i, j in combinations(range(sites.count), 2):
        ends = f"site{i}.{parts[i].top}", f"site{j}.{parts[j].top}"
        trunks.append(Trunk(f"site{i}-site{j}.wan", *ends, bandwidth_Bps, sites.latency_s))
    return Switches(tuple(leaves), tuple(trunks), parts[0].tiers)
