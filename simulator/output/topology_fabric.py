"""The fabric of a cluster: nodes below, switches above, tier by tier, coloured by rail; what is alike is one box."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import networkx as nx

from simulator.cluster import Cluster
from simulator.output.topology_style import RED, bandwidth, line_width, rail_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Nodes, and switches, up to which each has a box of its own.
_MOST_NODES, _MOST_SWITCHES = 12, 40
#: Rails beyond which leaves of all rails are one box.
_MOST_RAILS = 20
_WIDTH = 24.0
_LEVEL = 1.4


@dataclass(frozen=True)
class _Bundle:
    """Switches or nodes that are drawn as one box. ``level``: 0 of nodes, 1 of leaves; ``rail``: None where several."""

    label: str
    level: int
    rail: int | None
    count: int


@dataclass(frozen=True)
class _Drawing:
    """Boxes by name, and between them total bandwidth and whether the narrowest cut crosses there."""

    boxes: dict[str, _Bundle]
    lines: dict[tuple[str, str], float]
    marked: frozenset[tuple[str, str]]
    tiered: bool


def draw_fabric(axes: Axes, cluster: Cluster) -> None:
    """Draw nodes and switches, and say what each tier carries."""
    cut_Bps, marked, nics_Bps = _narrowest(cluster)
    drawing = _bundled(cluster, marked)
    at = _tiers(drawing) if drawing.tiered else _circle(drawing)
    for (lower, upper), total_Bps in drawing.lines.items():
        (x0, y0), (x1, y1) = at[lower], at[upper]
        rail = drawing.boxes[lower].rail if drawing.boxes[lower].level else drawing.boxes[upper].rail
        width = line_width(total_Bps)
        if (lower, upper) in drawing.marked:
            axes.plot([x0, x1], [y0, y1], color=RED, linewidth=width + 7, alpha=0.35, solid_capstyle="round", zorder=1)
        axes.plot([x0, x1], [y0, y1], color=rail_colour(rail), linewidth=width, solid_capstyle="round", zorder=2)
    crowded = max(Counter(box.level for box in drawing.boxes.values()).values()) > 24
    for name, box in drawing.boxes.items():
        face = "#E3E3E3" if box.level == 0 else "white"
        edge = rail_colour(box.rail) if box.level else "#333333"
        style = {"boxstyle": "round,pad=0.3", "facecolor": face, "edgecolor": edge, "linewidth": 1.4}
        axes.text(*at[name], box.label, ha="center", va="center", fontsize=5.5 if crowded else 8, zorder=4, bbox=style)
    if drawing.tiered:
        _totals(axes, drawing, at)
    narrow = "as much as their NICs" if cut_Bps > 0.999 * nics_Bps else f"their NICs could {bandwidth(nics_Bps)}"
    axes.set_title(
        f"Fabric: {cluster.spec.fabric.kind}, {cluster.spec.fabric.transport}; "
        f"between two halves of the nodes {bandwidth(cut_Bps)}, {narrow}",
        fontsize=10, loc="left",
    )  # fmt: skip
    axes.margins(0.03, 0.12)
    if drawing.tiered:
        axes.set_xlim(-0.4, _WIDTH * 1.12)
    axes.set_axis_off()


def _parts(cluster: Cluster) -> dict[int, tuple[int, int]]:
    """Nodes that follow one another under the same switches, the first half apart: first -> (first, after the last)."""
    parts: dict[int, tuple[int, int]] = {}
    first = 0
    for node in range(1, cluster.n_nodes + 1):
        alone = cluster.n_nodes <= _MOST_NODES
        if (
            alone
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


def _narrowest(cluster: Cluster) -> tuple[float, set[tuple[str, str]], float]:
    """What the first half of the nodes can send to the second, the pairs of vertices where that is bounded (none where
    the NICs bound it), and what the NICs of the smaller half can."""
    graph = nx.DiGraph()
    sides = [0.0, 0.0]
    for first, part in _parts(cluster).items():
        near = first < cluster.n_nodes // 2
        graph.add_edge(*(("source", f"nodes{first}") if near else (f"nodes{first}", "sink")))
        for leaf, total_Bps in _ports(cluster, part).items():
            sides[near] += total_Bps
            graph.add_edge(*((f"nodes{first}", leaf) if near else (leaf, f"nodes{first}")), capacity=total_Bps)
    for link in cluster.trunks:
        before = graph.edges[link.src, link.dst]["capacity"] if graph.has_edge(link.src, link.dst) else 0.0
        graph.add_edge(link.src, link.dst, capacity=before + link.bandwidth_Bps)
    value, (reached, _) = nx.minimum_cut(graph, "source", "sink")
    crossing = {(a, b) for a, b in graph.edges if a in reached and b not in reached}
    nics_Bps = min(sides)
    narrow = value < 0.999 * nics_Bps
    return float(value), crossing | {(b, a) for a, b in crossing} if narrow else set(), nics_Bps


def _levels(cluster: Cluster) -> dict[str, int] | None:
    """Tier of every switch, leaves 1; None where trunks lead in circles, so that there are no tiers."""
    level = dict.fromkeys((leaf for leaves in cluster.switches.leaves for leaf in leaves), 1)
    trunks = cluster.switches.trunks
    graph = nx.DiGraph((trunk.lower, trunk.upper) for trunk in trunks)
    if not nx.is_directed_acyclic_graph(graph) or any(trunk.upper in level for trunk in trunks):
        return None
    for switch in nx.topological_sort(graph):
        level[switch] = max([level.get(switch, 1), *(level[below] + 1 for below in graph.predecessors(switch))])
    return level


def _bundled(cluster: Cluster, cut: set[tuple[str, str]]) -> _Drawing:
    """Boxes for all nodes and switches, or for those that are alike: of one rail, under the same bundles."""
    levels = _levels(cluster)
    rails: dict[str, set[int]] = {}
    for leaves in cluster.switches.leaves:
        for nic, leaf in enumerate(leaves):
            rails.setdefault(leaf, set()).add(nic)
    for trunk in sorted(cluster.switches.trunks, key=lambda trunk: (levels or {}).get(trunk.lower, 1)):
        if levels:
            rails.setdefault(trunk.upper, set()).update(rails.get(trunk.lower, ()))
    names = [*dict.fromkeys(switch for t in cluster.switches.trunks for switch in (t.lower, t.upper))]
    names = [*dict.fromkeys([*rails, *names])]
    widest = max(len({tuple(sorted(rails[leaf])) for leaf in rails if (levels or {}).get(leaf) == 1}), 1)
    by_rail = widest <= _MOST_RAILS
    every = (by_rail and len(names) <= _MOST_SWITCHES) or levels is None
    upwards: dict[str, dict[str, float]] = {}
    for trunk in cluster.switches.trunks:
        above = upwards.setdefault(trunk.lower, {})
        above[trunk.upper] = above.get(trunk.upper, 0.0) + trunk.bandwidth_Bps
    bundle: dict[str, str] = {}
    keys: dict[Hashable, str] = {}
    for name in sorted(names, key=lambda name: -(levels or {}).get(name, 1)):
        of = tuple(sorted(rails.get(name, ()))) if by_rail else ()
        key = (of, tuple(sorted({bundle[up] for up in upwards.get(name, ())}))) if not every else name
        bundle[name] = keys.setdefault(((levels or {}).get(name, 1), key), name)
    held = Counter(bundle.values())
    boxes = {
        name: _Bundle(
            name if held[name] == 1 else f"{held[name]} {'leaves' if levels and levels[name] == 1 else 'switches'}",
            (levels or {}).get(name, 1),
            next(iter(rails[name])) if len(rails.get(name, ())) == 1 and (by_rail or held[name] == 1) else None,
            held[name],
        )
        for name in held
    }
    lines: dict[tuple[str, str], float] = {}
    in_cut: dict[tuple[str, str], float] = {}
    whole: dict[Hashable, str] = {}
    counted: Counter[str] = Counter()
    for first, part in _parts(cluster).items():
        ports = _ports(cluster, part)
        here = tuple(sorted({bundle[leaf] for leaf in ports})), id(cluster.layouts[first])
        box = f"nodes{first}" if every or cluster.n_nodes <= _MOST_NODES else whole.setdefault(here, f"nodes{first}")
        counted[box] += part[1] - part[0]
        for leaf, total_Bps in ports.items():
            line = box, bundle[leaf]
            lines[line] = lines.get(line, 0.0) + total_Bps
            if (f"nodes{first}", leaf) in cut:
                in_cut[line] = in_cut.get(line, 0.0) + total_Bps
    for box, count in counted.items():
        first = int(box.removeprefix("nodes"))
        gpus = len(cluster.layouts[first].gpus)
        label = f"node {first}\n{gpus} GPUs" if count == 1 else f"{count:,} nodes\nof {gpus} GPUs"
        boxes[box] = _Bundle(label, 0, None, count)
    for lower, above in upwards.items():
        for upper, total_Bps in above.items():
            line = bundle[lower], bundle[upper]
            lines[line] = lines.get(line, 0.0) + total_Bps
            if (lower, upper) in cut:
                in_cut[line] = in_cut.get(line, 0.0) + total_Bps
    # Of a bundle about half of the links are on the side where the cut was found.
    marked = frozenset(line for line, Bps in in_cut.items() if Bps > 0.25 * lines[line])
    return _Drawing(boxes, lines, marked, levels is not None)


def _tiers(drawing: _Drawing) -> dict[str, tuple[float, float]]:
    """Boxes of a level side by side over the whole width, by rail; nodes in their order."""
    at = {}
    for level in sorted({box.level for box in drawing.boxes.values()}):
        row = [name for name, box in drawing.boxes.items() if box.level == level]
        if level:
            row.sort(key=lambda name: (drawing.boxes[name].rail is None, drawing.boxes[name].rail or 0))
        for i, name in enumerate(row):
            at[name] = ((i + 0.5) / len(row) * _WIDTH, level * _LEVEL)
    return at


def _circle(drawing: _Drawing) -> dict[str, tuple[float, float]]:
    """Switches that are not in tiers on an ellipse, their nodes outside."""
    switches = [name for name, box in drawing.boxes.items() if box.level]
    at = {}
    for i, name in enumerate(switches):
        turn = 2 * math.pi * i / len(switches)
        at[name] = (8.0 * math.cos(turn), 2.6 * math.sin(turn))
    beside: Mapping[str, list[str]] = {name: [] for name in switches}
    for lower, upper in drawing.lines:
        if not drawing.boxes[lower].level and not any(lower in nodes for nodes in beside.values()):
            beside[upper].append(lower)
    for switch, nodes in beside.items():
        x, y = at[switch]
        for i, name in enumerate(nodes):
            out = 1.28 + 0.2 * i
            at[name] = (x * out, y * out)
    return at


def _totals(axes: Axes, drawing: _Drawing, at: Mapping[str, tuple[float, float]]) -> None:
    """Beside each tier what all its links carry upwards, and how much less than below it."""
    total: dict[int, float] = {}
    for (lower, _), each_Bps in drawing.lines.items():
        level = drawing.boxes[lower].level
        total[level] = total.get(level, 0.0) + each_Bps
    for level, up_Bps in total.items():
        text = bandwidth(up_Bps) + (" from the NICs" if level == 0 else " upwards")
        narrower = level and total.get(level - 1, up_Bps) > 1.001 * up_Bps
        if narrower:
            text += f"\n{total[level - 1] / up_Bps:.3g}:1"
        axes.text(
            _WIDTH * 1.005, (level + 0.5) * _LEVEL, text, fontsize=9, va="center", color=RED if narrower else "black"
        )
