"""What is drawn of a fabric: nodes and switches as boxes, those that are alike as one, and what lines between carry."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import networkx as nx

from simulator.cluster import Cluster

#: Nodes, and switches, up to which each has a box of its own.
_MOST_NODES, _MOST_SWITCHES = 12, 40
#: Rails beyond which leaves of all rails are one box.
_MOST_RAILS = 20


@dataclass(frozen=True)
class Box:
    """Switches or nodes that are drawn as one. ``level``: 0 of nodes, 1 of leaves ...; ``rail``, ``site``: None where
    of several."""

    label: str
    level: int
    rail: int | None = None
    site: int | None = None


@dataclass(frozen=True)
class Drawing:
    """Boxes by name; bytes/s of the lines between them, and which of them the narrowest cut crosses; of ``wan`` lines,
    each joins two sites. ``form``: how the boxes are placed."""

    form: Literal["tiers", "torus", "ring"]
    boxes: dict[str, Box]
    lines: dict[tuple[str, str], float]
    marked: frozenset[tuple[str, str]]
    wan: frozenset[tuple[str, str]]


def narrowest(cluster: Cluster) -> tuple[float, set[tuple[str, str]], float]:
    """What the first half of the nodes can send to the second, the pairs of vertices where that is bounded (none where
    the NICs bound it), and what the NICs of the smaller half can."""
    graph = nx.DiGraph()
    sides = [0.0, 0.0]
    for first, part in _parts(cluster).items():
        near = first < cluster.n_nodes // 2
        graph.add_edge(*(("source", _nodes(first)) if near else (_nodes(first), "sink")))
        for leaf, total_Bps in _ports(cluster, part).items():
            sides[near] += total_Bps
            graph.add_edge(*((_nodes(first), leaf) if near else (leaf, _nodes(first))), capacity=total_Bps)
    for link in cluster.trunks:
        before = graph.edges[link.src, link.dst]["capacity"] if graph.has_edge(link.src, link.dst) else 0.0
        graph.add_edge(link.src, link.dst, capacity=before + link.bandwidth_Bps)
    value, (reached, _) = nx.minimum_cut(graph, "source", "sink")
    crossing = {(a, b) for a, b in graph.edges if a in reached and b not in reached}
    narrow = value < 0.999 * min(sides)
    return float(value), crossing | {(b, a) for a, b in crossing} if narrow else set(), min(sides)


def bundled(cluster: Cluster, cut: set[tuple[str, str]]) -> Drawing:
    """The boxes of a fabric and the lines between them; ``cut``: pairs of vertices, as from `narrowest`."""
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
    # Of a bundle about half of the links are on the side where the cut was found.
    marked = frozenset(line for line, Bps in in_cut.items() if Bps > 0.25 * lines[line])
    return Drawing(form, boxes, lines, marked, frozenset(wan & lines.keys()))


def _nodes(first: int) -> str:
    return f"nodes{first}"


def _site(switch: str) -> int | None:
    match = re.match(r"site(\d+)\.", switch)
    return int(match[1]) if match else None


def _parts(cluster: Cluster) -> dict[int, tuple[int, int]]:
    """Nodes that follow one another under the same switches, the first half apart: first -> (first, after the last)."""
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
    """Bytes/s from the nodes of a part into each leaf."""
    total: dict[str, float] = {}
    for node in range(*part):
        layout, first = cluster.layouts[node], cluster.first_link[node]
        for out in layout.port_out.values():
            link = cluster.links[first + out]
            total[link.dst] = total.get(link.dst, 0.0) + link.bandwidth_Bps
    return total


def _levels(cluster: Cluster) -> dict[str, int] | None:
    """Tier of every switch, leaves 1; None where there are no tiers: trunks lead in circles, or from leaf to leaf of a
    site."""
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
    """The box of every switch and part, and what it is: alike are switches of one level, site and rail under the same
    boxes, and nodes of one kind under the same boxes."""
    rails: dict[str, set[int]] = {}
    for leaves in cluster.switches.leaves:
        for nic, leaf in enumerate(leaves):
            rails.setdefault(leaf, set()).add(nic)
    by_rail = len({tuple(sorted(of)) for of in rails.values()}) <= _MOST_RAILS
    above: dict[str, set[str]] = {}
    for trunk in sorted(cluster.switches.trunks, key=lambda trunk: levels[trunk.lower]):
        if _site(trunk.lower) == _site(trunk.upper):
            rails.setdefault(trunk.upper, set()).update(rails.get(trunk.lower, ()))
            above.setdefault(trunk.lower, set()).add(trunk.upper)
    every = by_rail and len(levels) <= _MOST_SWITCHES
    box_of: dict[str, str] = {}
    same: dict[Hashable, str] = {}
    for name in sorted(levels, key=lambda name: -levels[name]):
        of = tuple(sorted(rails.get(name, ()))) if by_rail else ()
        under = tuple(sorted({box_of[up] for up in above.get(name, ())}))
        key = name if every else (levels[name], _site(name), of, under)
        box_of[name] = same.setdefault(key, name)
    held = Counter(box_of.values())
    boxes = {}
    for name, count in held.items():
        what = "leaves" if levels[name] == 1 else "switches"
        label = name.replace(".", "\n") if count == 1 else f"{count} {what}"
        crossed = rails.get(name, set())
        rail = min(crossed) if len(crossed) == 1 and (by_rail or count == 1) else None
        boxes[name] = Box(label, levels[name], rail, _site(name))
    counted: Counter[str] = Counter()
    for first in ports:
        here = tuple(sorted({box_of[leaf] for leaf in ports[first]})), id(cluster.layouts[first])
        alone = every or cluster.n_nodes <= _MOST_NODES
        box = box_of[_nodes(first)] = _nodes(first) if alone else same.setdefault(here, _nodes(first))
        counted[box] += _parts(cluster)[first][1] - first
    for box, count in counted.items():
        first = int(box.removeprefix("nodes"))
        gpus = len(cluster.layouts[first].gpus)
        label = f"node {first}\n{gpus} GPUs" if count == 1 else f"{count:,} nodes\nof {gpus} GPUs"
        boxes[box] = Box(label, 0, None, _site(cluster.switches.leaves[first][0]))
    return box_of, boxes


def _in_groups(cluster: Cluster, ports: dict[int, dict[str, float]]) -> tuple[dict[str, str], dict[str, Box]]:
    """Of a fabric without tiers: the switches of a group with their nodes are one box, and so is a switch that is in no
    group."""
    names = {name for trunk in cluster.switches.trunks for name in (trunk.lower, trunk.upper)}
    names |= {leaf for leaves in cluster.switches.leaves for leaf in leaves}
    ordered = sorted(names, key=_natural)
    box_of = {name: re.sub(r"((?:^|\.)group\d+)\..*", r"\1", name) for name in ordered}
    held = Counter(box_of.values())
    nodes: dict[str, list[int]] = {box: [] for box in held}
    for first, leaves in ports.items():
        box = box_of[next(iter(leaves))] if leaves else next(iter(held))
        box_of[_nodes(first)] = box
        nodes[box] += range(*_parts(cluster)[first])
    boxes = {}
    for box, count in held.items():
        of = nodes[box]
        label = f"node {of[0]}" if len(of) == 1 else f"{len(of)} nodes" if of else box
        boxes[box] = Box(f"{box}\n{label}\n{count} switches" if count > 1 else label, 1, None, _site(box))
    return box_of, boxes


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
