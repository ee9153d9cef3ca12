"""Dead links of a cluster: which they are, and a fabric without them."""

from __future__ import annotations

import re
from dataclasses import replace

from simulator.cluster import names
from simulator.cluster.parts import ClusterLinks
from simulator.errors import InputError
from simulator.fabrics import Switches
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.hardware.overrides import LinkOverride

#: Kinds of link of which every node needs all.
_NEEDED = ("memory", "nvme")


def dead_links(spec: ClusterSpec, links: ClusterLinks) -> frozenset[str]:
    """Return the names, without direction, of the dead ones of a cluster's ``links``.

    Raises `InputError` for names that stand for no link, and for a host's memory and drives.
    """
    named, dead = names.link_names(links), set()
    for index, override in enumerate(spec.overrides):
        if not isinstance(override, LinkOverride) or not override.missing:
            continue
        key = f"overrides[{index}].link"
        for at in names.matching(override.link, named, key, "link"):
            if links[at].kind in _NEEDED:
                raise InputError("is inside the host, and no node runs without it", key=key, found=override.link)
            dead.add(links[at].name.partition(":")[0])
    return frozenset(dead)


def dead_by_node(dead: frozenset[str]) -> dict[int, frozenset[str]]:
    """Return by node the names of its dead links, without the node's own."""
    by_node: dict[int, set[str]] = {}
    for name in dead:
        if match := re.match(r"node(\d+)\.", name):
            by_node.setdefault(int(match[1]), set()).add(name.removeprefix(match[0]))
    return {node: frozenset(inside) for node, inside in by_node.items()}


def without_trunks(fabric: Switches, dead: frozenset[str]) -> Switches:
    """Return the fabric with its dead trunks apart from the others."""
    alive = tuple([trunk for trunk in fabric.trunks if trunk.name not in dead])
    return replace(fabric, trunks=alive, dead=tuple([trunk for trunk in fabric.trunks if trunk.name in dead]))
