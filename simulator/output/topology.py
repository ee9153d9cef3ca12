"""Pictures of clusters: the inside of each kind of node, and the fabric between nodes.

Colours tell rails apart, widths of lines are bandwidths, and the narrowest cut between two halves is marked.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from simulator.cluster import Cluster
from simulator.output.topology_fabric import draw_fabric
from simulator.output.topology_node import draw_node
from simulator.output.topology_style import KINDS, MOST_KINDS, RED, bandwidth, line_width
from simulator.units import GB, counted, in_brackets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Sizes of a slide, inches.
_WIDTH_IN, _NODE_IN, _FABRIC_IN = 14.0, 4.2, 4.4
_MOST_NOTES = 4
#: Key of an override -> its name in a note.
_SPEEDS = {
    "bandwidth_scale": "bandwidth",
    "speed_scale": "speed",
    "host_speed": "host's speed",
    "autograd_speed": "autograd's speed",
}


def draw_topology(cluster: Cluster) -> Figure:
    """Draw each kind of node (the first few), and below them the fabric between several nodes."""
    from matplotlib.figure import Figure

    kinds: dict[int, int] = {}
    for node, layout in enumerate(cluster.layouts):
        kinds.setdefault(id(layout), node)
    shown = list(kinds.values())[:MOST_KINDS]
    several = cluster.n_nodes > 1
    heights = [_NODE_IN] * len(shown) + [_FABRIC_IN] * several
    figure = Figure(figsize=(_WIDTH_IN, 0.9 + sum(heights)), layout="constrained", facecolor="white")
    rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    marked = [draw_node(figure.add_subplot(rows[row]), cluster, node) for row, node in enumerate(shown)]
    if several:
        marked.append(draw_fabric(figure.add_subplot(rows[-1]), cluster))
    figure.suptitle(_title(cluster), fontsize=14, fontweight="bold", x=0.01, ha="left")
    _legend(figure, cluster, marked=any(marked))
    return figure


def _title(cluster: Cluster) -> str:
    if cluster.n_nodes == 1:
        return f"{cluster.name}: {cluster.layouts[0].gpu_text}"
    nodes = Counter(in_brackets(layout.gpu_text) for layout in cluster.layouts)
    kinds = " + ".join(f"{counted(count, 'node')} x {gpus}" for gpus, count in nodes.items())
    return f"{cluster.name}: {kinds} = {counted(len(cluster.gpus), 'GPU')}"


def _legend(figure: Figure, cluster: Cluster, *, marked: bool) -> None:
    from matplotlib.lines import Line2D

    present = {link.kind for link in cluster.links}
    handles = [
        Line2D([], [], color=colour, linewidth=4, label=label)
        for kinds, colour, label in KINDS
        if present.intersection(kinds)
    ]
    handles += [
        Line2D([], [], color="#777777", linewidth=line_width(each * GB), label=bandwidth(each * GB))
        for each in (25, 100, 400)
    ]
    if marked:
        handles.append(Line2D([], [], color=RED, linewidth=8, alpha=0.35, label="narrowest cut between two halves"))
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        columnspacing=1.2,
        title="; ".join(_differences(cluster)) or None,
        title_fontsize=9,
        alignment="left",
    )


def _differences(cluster: Cluster) -> list[str]:
    """Return notes on links, GPUs and NICs that differ from others of their kind."""
    notes = []
    for override in cluster.spec.overrides:
        data = asdict(override)
        name = data.get("link") or data.get("gpu") or data.get("nic")
        scales = [f"{_SPEEDS[key]} {value:g}" for key, value in data.items() if key in _SPEEDS and value is not None]
        notes.append(
            f"{name} is missing" if data.get("missing") else f"{name}: {', '.join(scales)} times what it would be"
        )
    more = [f"{len(notes) - _MOST_NOTES} more differ"] if len(notes) > _MOST_NOTES else []
    return notes[:_MOST_NOTES] + more
