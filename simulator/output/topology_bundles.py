"""Bundles of a drawn fabric: boxes of nodes and switches that are alike, and lines with their bandwidth."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import networkx as nx

from simulator.bounds import is_digits
from simulator.cluster import Cluster
from simulator.units import counted

#: Most nodes, and most switches, that have a box each.
_MOST_NODES, _MOST_SWITCHES = 12, 40
#: Most rails whose leaves have a box per rail.
_MOST_RAILS = 20


@dataclass(frozen=True)
class Box:
    """Switches or nodes that are drawn as one.

    ``level``: 0 for nodes, 1 for leaves and so on. ``rail``, ``site``: None for several.
    """

    label: str
    level: int
    rail: int | None = None
    site: int | None = None


@dataclass(frozen=True)
class Drawing:
    """Boxes of a fabric by name, and the lines between them.

    ``form``: arrangement of the boxes. ``lines``: pair of boxes -> bytes/s. ``marked``: lines that the narrowest cut
    crosses. ``wan``: lines between sites.
    """

    form: Literal["tiers", "torus", "ring"]
    boxes: dict[str, Box]
    lines: dict[tuple[str, str], float]
    marked: frozenset[tuple[str, str]]
    wan: frozenset[tuple[str, str]]


def narrowest(cluster: Cluster) -> tuple[float, set[tuple[str, str]], float]:
    """Return the narrowest cut between two halves of the nodes.

    Returned are its bytes/s from the first half to the second, its pairs of vertices, and the bytes/s of the smaller
    half's NICs. There are no pairs where the NICs are what is narrowest.
    """
    graph = nx.DiGraph()
    sides = [0.0, 0.0]
    for first, part in _parts(cluster).items():
        in_first_half = first < cluster.n_nodes // 2
        nodes = _nodes(first)
        graph.add_edge(*(("source", nodes) if in_first_half else (nodes, "sink")))
        for leaf, total_Bps in _ports(cluster, part).items():
            sides[in_first_half] += total_Bps
            graph.add_edge(*((nodes, leaf) if in_first_half else (leaf, nodes)), capacity=total_Bps)
    for link in cluster.trunks:
        before = graph.edges[link.src, link.dst]["capacity"] if graph.has_edge(link.src, link.dst) else 0.0
        graph.add_edge(link.src, link.dst, capacity=before + link.bandwidth_Bps)
    value, (reached, _) = nx.minimum_cut(graph, "source", "sink")
    crossing = {(a, b) for a, b in graph.edges if a in reached and b not in reached}
    narrow = value < 0.999 * min(sides)
    return float(value), crossing | {(b, a) for a, b in crossing} if narrow else set(), min(sides)


def bundled(cluster: Cluster, cut: set[tuple[str, str]]) -> Drawing:
    """Return the boxes of a fabric and the lines between them; ``cut``: pairs of vertices on the narrowest cut."""
    parts = _parts(cluster)
    ports = {first: _ports(cluster, part) for first, part in parts.items()}
    levels = _levels(cluster)
    if levels is not None:
        box_of, boxes = _in_tiers(cluster, levels, ports)
    else:
        box_of, boxes = _in_groups(cluster, ports)
    torus = cluster.spec.fabric.kind == "torus" and cluster.spec.fabric.sites is None
    form: Literal["tiers", "torus", "ring"] = "tiers" if levels is not None else "torus" if torus else "ring"
    lines: dict[tuple[str, str], float] = {}
    in_cut: dict[tuple[str, str], float] = {}
    wan: set[tuple[str, str]] = set()

    def add(lower: str, upper: str, each_Bps: float) -> None:
        line = box_of[lower], box_of[upper]
        if line[0] == line[1]:
            return
        line = line[::-1] if line[::-1] in lines else line
        lines[line] = lines.get(line, 0.0) + each_Bps
        if (lower, upper) in cut:
            in_cut[line] = in_cut.get(line, 0.0) + each_Bps

    for first, leaves in ports.items():
        for leaf, total_Bps in leaves.items():
            add(_nodes(first), leaf, total_Bps)
    for trunk in cluster.switches.trunks:
        add(trunk.lower, trunk.upper, trunk.bandwidth_Bps)
        if _site(trunk.lower) != _site(trunk.upper):
            wan.add((box_of[trunk.lower], box_of[trunk.upper]))
    # About half of a bundle's links are on the side of the cut that was found.
    marked = frozenset(line for line, Bps in in_cut.items() if Bps > 0.25 * lines[line])
    return Drawing(form, boxes, lines, marked, frozenset(wan & lines.keys()))


def _nodes(first: int) -> str:
    return f"nodes{first}"


def _site(switch: str) -> int | None:
    match = re.match(r"site(\d+)\.", switch)
    return int(match[1]) if match else None


def _parts(cluster: Cluster) -> dict[int, tuple[int, int]]:
    """Return runs of nodes under the same switches, each in one half: first node -> (first, one after the last)."""
    parts: dict[int, tuple[int, int]] = {}
    first = 0
    for node in range(1, cluster.n_nodes + 1):
        if (
            cluster.n_nodes <= _MOST_NODES
            or node in (cluster.n_nodes // 2, cluster.n_nodes)
            or cluster.switches.leaves[node] != cluster.switches.leaves[first]
            or cluster.layouts[node] is not cluster.layouts[first]
        ):
            parts[first] = (first, node)
            first = node
    return parts


def _ports(cluster: Cluster, part: tuple[int, int]) -> dict[str, float]:
    """Return the bytes/s from the nodes of a part into each leaf."""
    total: dict[str, float] = {}
    for node in range(*part):
        layout, first = cluster.layouts[node], cluster.first_link[node]
        for out in layout.port_out.values():
            link = cluster.links[first + out]
            total[link.dst] = total.get(link.dst, 0.0) + link.bandwidth_Bps
    return total


def _levels(cluster: Cluster) -> dict[str, int] | None:
    """Return the tier of every switch, 1 for leaves; None for a fabric without tiers.

    It has none where trunks lead in circles, or from leaf to leaf of a site.
    """
    level = dict.fromkeys((leaf for leaves in cluster.switches.leaves for leaf in leaves), 1)
    trunks = [trunk for trunk in cluster.switches.trunks if _site(trunk.lower) == _site(trunk.upper)]
    graph = nx.DiGraph((trunk.lower, trunk.upper) for trunk in trunks)
    if not nx.is_directed_acyclic_graph(graph) or any(trunk.upper in level for trunk in trunks):
        return None
    for switch in nx.topological_sort(graph):
        level[switch] = max([level.get(switch, 1), *(level[below] + 1 for below in graph.predecessors(switch))])
    return level


def _in_tiers(
    cluster: Cluster, levels: dict[str, int], ports: dict[int, dict[str, float]]
) -> tuple[dict[str, str], dict[str, Box]]:
    """Return the box of every switch and part by name, and the boxes.

    Switches of one level, site and rail under the same boxes share a box. So do nodes of one kind under the same boxes.
    """
    rails = _rails_of_switches(cluster, levels)
    by_rail = len({tuple(sorted(rails[leaf])) for leaves in cluster.switches.leaves for leaf in leaves}) <= _MOST_RAILS
    above: dict[str, set[str]] = {}
    for trunk in cluster.switches.trunks:
        if _site(trunk.lower) == _site(trunk.upper):
            above.setdefault(trunk.lower, set()).add(trunk.upper)
    each_apart = by_rail and len(levels) <= _MOST_SWITCHES
    box_of: dict[str, str] = {}
    first_alike: dict[Hashable, str] = {}
    for name in sorted(levels, key=lambda name: -levels[name]):
        switch_rails = tuple(sorted(rails.get(name, ()))) if by_rail else ()
        under = tuple(sorted({box_of[up] for up in above.get(name, ())}))
        key = name if each_apart else (levels[name], _site(name), switch_rails, under)
        box_of[name] = first_alike.setdefault(key, name)
    boxes = _switch_boxes(box_of, levels, rails, by_rail)
    node_counts: Counter[str] = Counter()
    for first in ports:
        alike = tuple(sorted({box_of[leaf] for leaf in ports[first]})), id(cluster.layouts[first])
        apart = each_apart or cluster.n_nodes <= _MOST_NODES
        box = box_of[_nodes(first)] = _nodes(first) if apart else first_alike.setdefault(alike, _nodes(first))
        node_counts[box] += _parts(cluster)[first][1] - first
    for box, count in node_counts.items():
        first = int(box.removeprefix("nodes"))
        gpus = counted(len(cluster.layouts[first].gpus), "GPU")
        label = f"node {first}\n{gpus}" if count == 1 else f"{count:,} nodes\nof {gpus}"
        boxes[box] = Box(label, 0, None, _site(cluster.switches.leaves[first][0]))
    return box_of, boxes


def _rails_of_switches(cluster: Cluster, levels: dict[str, int]) -> dict[str, set[int]]:
    """Return the rails that each switch carries: numbers of the NICs below it."""
    rails: dict[str, set[int]] = {}
    for leaves in cluster.switches.leaves:
        for nic, leaf in enumerate(leaves):
            rails.setdefault(leaf, set()).add(nic)
    for trunk in sorted(cluster.switches.trunks, key=lambda trunk: levels[trunk.lower]):
        if _site(trunk.lower) == _site(trunk.upper):
            rails.setdefault(trunk.upper, set()).update(rails.get(trunk.lower, ()))
    return rails


def _switch_boxes(
    box_of: dict[str, str], levels: dict[str, int], rails: dict[str, set[int]], by_rail: bool
) -> dict[str, Box]:
    boxes = {}
    for name, count in Counter(box_of.values()).items():
        plural = "leaves" if levels[name] == 1 else "switches"
        label = name.replace(".", "\n") if count == 1 else f"{count} {plural}"
        switch_rails = rails.get(name, set())
        rail = min(switch_rails) if len(switch_rails) == 1 and (by_rail or count == 1) else None
        boxes[name] = Box(label, levels[name], rail, _site(name))
    return boxes


def _in_groups(cluster: Cluster, ports: dict[int, dict[str, float]]) -> tuple[dict[str, str], dict[str, Box]]:
    """Return the box of every switch and part by name, and the boxes, for a fabric without tiers.

    The switches of a group and their nodes share a box. A switch outside of groups has a box with its nodes.
    """
    names = {name for trunk in cluster.switches.trunks for name in (trunk.lower, trunk.upper)}
    names |= {leaf for leaves in cluster.switches.leaves for leaf in leaves}
    ordered = sorted(names, key=_natural)
    box_of = {name: re.sub(r"((?:^|\.)group\d+)\..*", r"\1", name) for name in ordered}
    switch_counts = Counter(box_of.values())
    nodes: dict[str, list[int]] = {box: [] for box in switch_counts}
    for first, leaves in ports.items():
        box = box_of[next(iter(leaves))] if leaves else next(iter(switch_counts))
        box_of[_nodes(first)] = box
        nodes[box] += range(*_parts(cluster)[first])
    boxes = {}
    for box, count in switch_counts.items():
        inside = nodes[box]
        label = f"node {inside[0]}" if len(inside) == 1 else f"{len(inside)} nodes" if inside else box
        boxes[box] = Box(f"{box}\n{label}\n{count} switches" if count > 1 else label, 1, None, _site(box))
    return box_of, boxes


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if is_digits(part) else (-1, part) for part in re.split(r"(\d+)", name)]
