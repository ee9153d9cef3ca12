"""Drawings of fabrics: nodes below, switches above them tier by tier, coloured by rail.

A torus is drawn as its grid, any other network without tiers as a ring.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING

from simulator.cluster import Cluster
from simulator.output.topology_bundles import Drawing, bundled, narrowest
from simulator.output.topology_style import NETWORK, RED, bandwidth, curve, line_width, rail_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _LEVEL = 24.0, 1.4
#: Most boxes of a row, or of half a ring, with their whole label, and with their names alone.
_ROOM, _LITTLE_ROOM = 16, 40
_ROW, _PLANE_GAP = 0.8, 1.2
Places = Mapping[str, tuple[float, float]]


def draw_fabric(axes: Axes, cluster: Cluster) -> bool:
    """Draw nodes and switches, with the bandwidth of each tier; return whether a narrowest cut is marked."""
    cut_Bps, cut, nics_Bps = narrowest(cluster)
    drawing = bundled(cluster, cut)
    shape = cluster.spec.fabric.shape or ()
    if drawing.form == "tiers":
        at = _tiers(drawing)
        _draw_tiers(axes, drawing, at)
    elif drawing.form == "torus":
        at = _torus(drawing, shape)
        _draw_torus(axes, drawing, at, shape)
    else:
        at = _ring(drawing)
        for line, total_Bps in drawing.lines.items():
            ends, marked = (at[line[0]], at[line[1]]), line in drawing.marked
            curve(axes, *ends, total_Bps, NETWORK, marked=marked, thin=len(drawing.lines))
    beside = Counter(box.level for box in drawing.boxes.values())
    for name, box in drawing.boxes.items():
        face, edge = ("#E3E3E3", "#333333") if not box.level else ("white", rail_colour(box.rail))
        row = beside[box.level] if drawing.form == "tiers" else len(at) // 2
        if row <= _LITTLE_ROOM:
            label, size = (box.label, 8) if row <= _ROOM else (box.label.split("\n")[-1 if box.level else 0], 6)
            style = {"boxstyle": "round,pad=0.3", "facecolor": face, "edgecolor": edge, "linewidth": 1.4}
            axes.text(*at[name], label, ha="center", va="center", fontsize=size, zorder=4, bbox=style)
        else:
            axes.plot(*at[name], marker="s", markersize=4, color=edge, zorder=4)
    narrow = "as much as their NICs" if cut_Bps > 0.999 * nics_Bps else f"their NICs could {bandwidth(nics_Bps)}"
    axes.set_title(
        f"Fabric: {cluster.spec.fabric.kind}, {cluster.spec.fabric.transport}; "
        f"between two halves of the nodes {bandwidth(cut_Bps)}, {narrow}",
        fontsize=10, loc="left",
    )  # fmt: skip
    axes.margins(0.03, 0.12)
    if drawing.form == "tiers":
        axes.set_xlim(-0.4, _WIDTH * 1.12)
    axes.set_axis_off()
    return bool(drawing.marked)


def _tiers(drawing: Drawing) -> Places:
    """Place boxes of a level side by side over the whole width, by site and rail; nodes in their order."""
    at = {}
    for level in sorted({box.level for box in drawing.boxes.values()}):
        row = [name for name, box in drawing.boxes.items() if box.level == level]
        row.sort(key=lambda name: _order(drawing, name))
        for i, name in enumerate(row):
            at[name] = ((i + 0.5) / len(row) * _WIDTH, level * _LEVEL)
    return at


def _order(drawing: Drawing, name: str) -> tuple[int, int]:
    box = drawing.boxes[name]
    return -1 if box.site is None else box.site, 1_000 if box.rail is None else box.rail


def _draw_tiers(axes: Axes, drawing: Drawing, at: Places) -> None:
    """Draw lines between boxes, those between sites over the top.

    Beside each tier stands the bandwidth of all its links upwards, and the ratio to the tier below where it is less.
    """
    total: dict[int, float] = {}
    for line, total_Bps in drawing.lines.items():
        lower, upper = (drawing.boxes[name] for name in line)
        wan = line in drawing.wan
        colour = rail_colour(lower.rail if lower.level else upper.rail)
        curve(axes, at[line[0]], at[line[1]], total_Bps, colour, bend=0.12 * wan, marked=line in drawing.marked)
        if not wan:
            total[lower.level] = total.get(lower.level, 0.0) + total_Bps
    for level, up_Bps in total.items():
        text = bandwidth(up_Bps) + ("\nfrom all NICs" if level == 0 else " upwards")
        narrower = level and total.get(level - 1, up_Bps) > 1.001 * up_Bps
        if narrower:
            text += f"\n{total[level - 1] / up_Bps:.3g}:1"
        axes.text(
            _WIDTH * 1.005, (level + 0.5) * _LEVEL, text, fontsize=9, va="center", color=RED if narrower else "black"
        )
    if drawing.wan:
        each = max(drawing.lines[line] for line in drawing.wan)
        axes.text(_WIDTH * 1.005, (max(total) + 1.5) * _LEVEL, f"WAN {bandwidth(each)} each", fontsize=9, color=RED)


def _torus(drawing: Drawing, shape: tuple[int, ...]) -> Places:
    """Place boxes in rows and columns, the planes of a third dimension side by side."""
    at = {}
    for name, place in zip(drawing.boxes, product(*map(range, shape)), strict=True):
        plane = place[0] if len(shape) > 2 else 0
        at[name] = (plane * (shape[-1] + _PLANE_GAP) + place[-1], -_ROW * place[-2])
    return at


def _draw_torus(axes: Axes, drawing: Drawing, at: Places, shape: tuple[int, ...]) -> None:
    """Draw links around the torus as curves and detours, links from plane to plane as one line below."""
    wide = shape[-1] + _PLANE_GAP
    between: dict[tuple[int, int], float] = {}
    marked: set[tuple[int, int]] = set()
    for line, total_Bps in drawing.lines.items():
        (x0, y0), (x1, y1) = (at[name] for name in line)
        planes = int(x0 // wide), int(x1 // wide)
        if len(shape) > 2 and planes[0] != planes[1]:
            between[planes] = between.get(planes, 0.0) + total_Bps
            marked |= {planes} if line in drawing.marked else set()
        elif abs(y1 - y0) > 1.5 * _ROW:
            width, xs, ys = line_width(total_Bps), [x0, x0 + 0.42, x1 + 0.42, x1], [y0, y0, y1, y1]
            if line in drawing.marked:
                axes.plot(xs, ys, color=RED, linewidth=width + 7, alpha=0.35, zorder=1)
            axes.plot(xs, ys, color=NETWORK, linewidth=width, zorder=1.5)
        else:
            bend = 0.5 / shape[-1] if abs(x1 - x0) > 1.5 else 0.0
            curve(axes, (x0, y0), (x1, y1), total_Bps, NETWORK, bend=bend, marked=line in drawing.marked)
    low = -_ROW * shape[-2] - 0.3
    for (a, b), total_Bps in between.items():
        (x0, x1), far = [(plane + 0.5) * wide - _PLANE_GAP for plane in (a, b)], abs(a - b) > 1
        bend = -0.5 / (wide * abs(a - b)) if far else 0.0
        curve(axes, (x0, low), (x1, low), total_Bps, NETWORK, bend=bend, marked=(a, b) in marked)
        if not far:
            text = f"{bandwidth(total_Bps)} to the next"
            axes.text((x0 + x1) / 2, low + 0.12, text, ha="center", fontsize=7)
    for plane in range(shape[0] if len(shape) > 2 else 0):
        style = {"boxstyle": "round,pad=0.3", "facecolor": "#E3E3E3", "edgecolor": "#333333"}
        x = (plane + 0.5) * wide - _PLANE_GAP
        axes.text(x, low, f"plane {plane}", ha="center", va="center", fontsize=8, zorder=5, bbox=style)


def _ring(drawing: Drawing) -> Places:
    """Place all boxes on an ellipse, equally far apart."""
    steps = [2 * math.pi * i / 2000 for i in range(2000)]
    ellipse = [(11.0 * math.cos(angle), 2.8 * math.sin(angle)) for angle in steps]
    way = [0.0]
    for a, b in zip(ellipse, [*ellipse[1:], ellipse[0]], strict=True):
        way.append(way[-1] + math.dist(a, b))
    count, at, i = len(drawing.boxes), {}, 0
    for number, name in enumerate(drawing.boxes):
        while way[i] < way[-1] * number / count:
            i += 1
        at[name] = ellipse[i % len(ellipse)]
    return at
