"""A Cluster as a picture: GPUs, PCIe switches and NICs of a few nodes, and the switches above them, rail by rail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.cluster import Cluster

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, told apart with any kind of colour vision (jfly.uni-koeln.de/color).
_COLOUR = {"nvlink": "#009E73", "pcie": "#7F7F7F", "infiniband": "#0072B2", "roce": "#0072B2", "tcp": "#0072B2"}
_COLOUR |= {"memory": "#E69F00", "nvme": "#CC79A7"}
_MAX_NODES = 3
_LEVEL = {"nvswitch": -1.0, "gpu": 0.0, "pcie": 1.0, "host": 1.8, "memory": 1.8, "nvme": 1.8, "nic": 2.4}
_LEVEL |= {"leaf": 4.0, "spine": 5.2, "core": 6.2}
#: Beside the host, as shares of a node's width.
_ASIDE = {"memory": 0.25, "nvme": 0.75}


def draw_topology(cluster: Cluster) -> Figure:
    """The first two nodes and the last, with every link of theirs and the way from their leaves to the top.

    Width of a line: its bandwidth. Between leaves, spines and core a line stands for all cables together.
    """
    from matplotlib.figure import Figure

    nodes = cluster.spec.nodes
    shown = list(range(nodes)) if nodes <= _MAX_NODES else [0, 1, nodes - 1]
    places = _places(cluster, shown)
    links = [
        link for link in cluster.links if link.src in places and link.dst in places and not link.name.endswith(":rx")
    ]
    figure = Figure(figsize=(max(6.0, 5.0 * len(shown)), 6.5), layout="constrained")
    axes = figure.add_subplot()
    for link in links:
        (x0, y0), (x1, y1) = places[link.src], places[link.dst]
        width = min(max(0.4, link.bandwidth_Bps / 100e9), 4.0)
        axes.plot(
            [x0, x1], [y0, y1], color=_COLOUR[link.kind], linewidth=width, alpha=0.7, zorder=1, solid_capstyle="round"
        )
    frame = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "#4D4D4D", "linewidth": 0.6}
    for name, (x, y) in places.items():
        text = name.split(".", 1)[1] if name.startswith("node") else name
        axes.text(x, y, text, ha="center", va="center", fontsize=6, zorder=2, bbox=frame)
    for position, node in enumerate(shown):
        axes.text((position + 0.5) * _span(cluster), -1.7, f"node {node}", ha="center", fontsize=9)
    kinds = list(dict.fromkeys(link.kind for link in links))
    handles = [axes.plot([], [], color=_COLOUR[kind], linewidth=3, label=kind)[0] for kind in kinds]
    axes.legend(handles=handles, loc="upper left", frameon=False, fontsize=8)
    hidden = f", {len(shown)} of them shown" if len(shown) < nodes else ""
    axes.set_title(f"{cluster.name}: {nodes} node(s){hidden}, {len(cluster.gpus)} GPUs", fontsize=10)
    axes.set_axis_off()
    return figure


def _span(cluster: Cluster) -> float:
    """Width of a node."""
    return max(max(node.gpus.count, node.nics.count) for node in cluster.spec.kinds) + 1.5


def _places(cluster: Cluster, shown: list[int]) -> dict[str, tuple[float, float]]:
    """Where every vertex stands that belongs to the shown nodes, or lies above them."""
    span, places = _span(cluster), {}
    for position, node in enumerate(shown):
        edges = cluster.layout_of(node).edges
        inside = dict.fromkeys(end for edge in edges for end in (edge.src, edge.dst) if end != "fabric")
        most: dict[str, int] = {}
        for vertex in inside:
            family, number = _family(vertex)
            most[family] = max(number, most.get(family, 0))
        for vertex in inside:
            family, number = _family(vertex)
            x = (position + _ASIDE.get(family, (number + 0.5) / (most[family] + 1))) * span
            places[f"node{node}.{vertex}"] = (0.04 * span * (0.5 - x / (span * len(shown))) + x, _LEVEL[family])
    nics = sorted((nic, node) for node in shown for nic in cluster.layout_of(node).nics)
    leaves = list(dict.fromkeys(cluster.switches.leaves[node][nic] for nic, node in nics))
    above = leaves
    for level in ("leaf", "spine", "core"):
        for i, vertex in enumerate(above):
            places[vertex] = ((i + 0.5) / len(above) * span * len(shown), _LEVEL[level])
        above = list(dict.fromkeys(trunk.upper for trunk in cluster.switches.trunks if trunk.lower in above))
    return places


def _family(vertex: str) -> tuple[str, int]:
    """
    >>> _family("gpu12"), _family("host")
    (('gpu', 12), ('host', 0))
    """
    name = vertex.rstrip("0123456789")
    return name, int(vertex[len(name) :] or 0)
