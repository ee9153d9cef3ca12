"""Drawings of nodes: GPUs and NICs on top of their PCIe trees, sockets below, NVLink above."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import networkx as nx

from simulator.cluster import Cluster
from simulator.cluster.node import NodeLayout
from simulator.output.topology_style import (
    GPUS,
    MEMORY,
    NVLINK,
    PCIE,
    SOCKETS,
    bandwidth,
    curve,
    port_rate,
    rail_colour,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Most GPUs and NICs that are drawn; others are counted.
_MOST_LEAVES = 40
#: Most sockets that are all joined in the picture; of more, neighbours alone are.
_MOST_SOCKETS = 4
#: Space between children of different switches, and of different sockets, in widths of a GPU.
_GAP, _SOCKET_GAP = 0.35, 0.9
_LEVEL = 1.15


@dataclass(frozen=True)
class _Tree:
    """Places of a node's vertices. ``sockets``: those that are drawn. ``hidden``: GPUs and NICs that are not drawn."""

    at: dict[str, tuple[float, float]]
    sockets: list[str]
    hidden: int
    width: float


def draw_node(axes: Axes, cluster: Cluster, node: int) -> bool:
    """Draw the inside of node number ``node`` and its kind; return whether a narrowest cut is marked."""
    layout = cluster.layouts[node]
    tree = _tree(layout)
    cut_Bps, cut = _narrowest(layout)
    for edge in layout.edges:
        ends = tree.at.get(edge.src), tree.at.get(edge.dst)
        if edge.name.endswith(":rx") or edge.kind == "nvlink" or ends[0] is None or ends[1] is None:
            continue
        between = edge.src in tree.sockets and edge.dst in tree.sockets
        colour = SOCKETS if between else MEMORY if edge.kind in ("memory", "nvme") else PCIE
        apart = abs(tree.sockets.index(edge.src) - tree.sockets.index(edge.dst)) if between else 0
        if apart > 1 and len(tree.sockets) > _MOST_SOCKETS:
            continue
        bend = -0.9 / abs(ends[0][0] - ends[1][0]) if apart > 1 else 0.0
        curve(axes, ends[0], ends[1], edge.bandwidth_Bps, colour, bend=bend, marked=edge.name.split(":")[0] in cut)
    _nvlink(axes, layout, tree, cut)
    crowded = tree.width > 20
    for name, (x, y) in tree.at.items():
        _box(axes, layout, name, x, y, crowded)
    if tree.hidden:
        axes.text(tree.width + 0.9, 0.0, f"... and {tree.hidden} more\nGPUs and NICs,\nalike", fontsize=9, va="center")
    _caption(axes, cluster, node, cut_Bps)
    lowest = min(y for _, y in tree.at.values())
    top = 2.4 if any(edge.kind == "nvlink" for edge in layout.edges) else 0.7
    axes.set_xlim(-0.9, max(tree.width + (4.0 if tree.hidden else 0.9), 9.0))
    axes.set_ylim(lowest - 0.9, top)
    axes.set_axis_off()
    return bool(cut)


def _tree(layout: NodeLayout) -> _Tree:
    """Place leaves side by side in the order of the tree, switches above the middle of their children."""
    below, sockets = _children(layout)
    placement = _Placement(below)
    lowest = -_LEVEL * (
        1 + max((placement.height(child) for socket in sockets for child in below.get(socket, ())), default=0)
    )
    drawn = [socket for socket in sockets if placement.place_socket(socket, lowest)]
    _place_memory(layout, placement.at, [placement.at[socket][0] for socket in drawn], lowest)
    return _Tree(placement.at, drawn, placement.hidden, max(placement.x - _SOCKET_GAP - 1.0, 1.0))


def _children(layout: NodeLayout) -> tuple[dict[str, list[str]], list[str]]:
    """Return the vertices below each vertex of the PCIe trees, and the sockets at their roots."""
    uplinks = [
        edge
        for edge in layout.edges
        if edge.kind == "pcie" and edge.name.endswith(":tx") and not edge.src.startswith("cpu")
    ]
    below: dict[str, list[str]] = {}
    for edge in uplinks:
        below.setdefault(edge.dst, []).append(edge.src)
    children = {edge.src for edge in uplinks}
    sockets = sorted((vertex for vertex in below if vertex not in children), key=_natural)
    empty = {edge.src for edge in layout.edges if re.fullmatch(r"cpu\d+", edge.src)}.difference(sockets)
    return below, sockets + sorted(empty, key=_natural)


class _Placement:
    """Places of vertices, from left to right. ``below``: children of each vertex."""

    def __init__(self, below: dict[str, list[str]]) -> None:
        self.at: dict[str, tuple[float, float]] = {}
        self.hidden = 0
        self.x = 0.0
        self._leaves = 0
        self._below = below

    def height(self, vertex: str) -> int:
        """Return the levels below a vertex."""
        return 1 + max(map(self.height, self._below[vertex])) if self._below.get(vertex) else 0

    def place_socket(self, socket: str, lowest: float) -> bool:
        """Place a socket and its tree; return False where all of its tree is beyond `_MOST_LEAVES`."""
        first = self.x
        children = self._sorted_children(socket)
        whole = self._leaves < _MOST_LEAVES and not any(child in self._below for child in children)
        xs: list[float] = []
        for child in children:
            if self._leaves >= _MOST_LEAVES and not whole:
                self.hidden += self._leaves_below(child)
                continue
            self._place(child)
            self.x += _GAP if child in self._below else 0.0
            xs.append(self.at[child][0])
        if children and not xs:
            return False
        self.at[socket] = ((min(xs) + max(xs)) / 2 if xs else first, lowest)
        self.x = max(self.x, first + 1.0) + _SOCKET_GAP
        return True

    def _place(self, vertex: str) -> None:
        children = self._sorted_children(vertex)
        if not children:
            self.at[vertex] = (self.x, 0.0)
            self.x, self._leaves = self.x + 1.0, self._leaves + 1
            return
        for child in children:
            self._place(child)
            self.x += _GAP if child in self._below else 0.0
        xs = [self.at[child][0] for child in children]
        self.at[vertex] = ((min(xs) + max(xs)) / 2, -_LEVEL * self.height(vertex))

    def _sorted_children(self, vertex: str) -> list[str]:
        return sorted(self._below.get(vertex, ()), key=self._order)

    def _order(self, vertex: str) -> tuple[tuple[bool, str, int], ...]:
        return min(map(self._order, self._below.get(vertex, ())), default=(_natural(vertex),))

    def _leaves_below(self, vertex: str) -> int:
        return sum(map(self._leaves_below, self._below[vertex])) if self._below.get(vertex) else 1


def _place_memory(layout: NodeLayout, at: dict[str, tuple[float, float]], sockets: list[float], lowest: float) -> None:
    """Place host memory and drives below the middle of the sockets, or beside a single host."""
    if not any(edge.dst == "memory" for edge in layout.edges):
        return
    middle = sum(sockets) / len(sockets)
    beside_host = "host" in at
    y = lowest if beside_host else lowest - _LEVEL
    # Between several sockets the host is their memory, and has no other box for it.
    at["memory" if beside_host else "host"] = (middle + (2.2 if beside_host else 0.0), y)
    if any(edge.dst == "nvme" for edge in layout.edges):
        at["nvme"] = (middle + (4.4 if beside_host else 2.2), y)


def _natural(vertex: str) -> tuple[bool, str, int]:
    """Return a key that orders GPUs before NICs, both by number."""
    name = vertex.rstrip("0123456789")
    return name == "nic", name, int(vertex[len(name) :] or 0)


def _nvlink(axes: Axes, layout: NodeLayout, tree: _Tree, cut: set[str]) -> None:
    """Draw arcs between GPUs, or a bar for the NVSwitches."""
    from matplotlib.patches import FancyBboxPatch

    edges = [
        edge for edge in layout.edges if edge.kind == "nvlink" and edge.name.endswith(":tx") and edge.src in tree.at
    ]
    if not edges:
        return
    gpus = [tree.at[edge.src][0] for edge in edges]
    if edges[0].dst == "nvswitch":
        for edge in edges:
            x, y = tree.at[edge.src]
            curve(axes, (x, y), (x, 1.5), edge.bandwidth_Bps, NVLINK, marked=edge.name.split(":")[0] in cut)
        box = FancyBboxPatch(
            (min(gpus) - 0.4, 1.45), max(gpus) - min(gpus) + 0.8, 0.4, boxstyle="round,pad=0.05", facecolor="#DDF0DD",
            edgecolor=NVLINK, linewidth=1.2, zorder=3,
        )  # fmt: skip
        axes.add_patch(box)
        label = f"NVSwitch: {bandwidth(edges[0].bandwidth_Bps)} per GPU"
        axes.text((min(gpus) + max(gpus)) / 2, 1.65, label, ha="center", va="center", fontsize=9, zorder=4)
        return
    for edge in edges:
        if edge.dst in tree.at:
            distance = abs(tree.at[edge.src][0] - tree.at[edge.dst][0])
            rise = (0.8 + 1.9 * distance / tree.width) / distance  # a curve of this kind rises by 3/4 of that
            curve(
                axes, tree.at[edge.src], tree.at[edge.dst], edge.bandwidth_Bps, NVLINK, bend=rise,
                marked=edge.name.split(":")[0] in cut,
            )  # fmt: skip


def _box(axes: Axes, layout: NodeLayout, name: str, x: float, y: float, crowded: bool) -> None:
    number = name.lstrip("abcdefghijklmnopqrstuvwxyz")
    edge, text = "#333333", name
    face = "white"
    if name.startswith("gpu"):
        kinds = list(dict.fromkeys(layout.types))
        kind = layout.types[layout.gpus.index(int(number))]
        face, text = GPUS[kinds.index(kind) % len(GPUS)], f"GPU\n{number}"
        if len(kinds) > 1:
            text += f"\n{kind.rpartition('-')[0]}"
    elif name.startswith("nic"):
        face, text = rail_colour(int(number)), f"NIC\n{number}"
        edge = face
    elif name.startswith("pcie"):
        below = sum(e.dst == name and e.name.endswith(":tx") for e in layout.edges)
        face, text = "#F4F4F4", "switch" if below > 1 else "slot"
    elif name.startswith("cpu"):
        face, text = "#FFF6D6", f"CPU {number}"
    elif name == "host" and not any(e.src.startswith("cpu") for e in layout.edges):
        face, text = "#FFF6D6", "CPU"
    else:
        rate = next(e.bandwidth_Bps for e in layout.edges if e.dst == ("nvme" if name == "nvme" else "memory"))
        face, text = "#FBF1DC", f"{'drives' if name == 'nvme' else 'memory'}\n{bandwidth(rate)}"
    style = {"boxstyle": "round,pad=0.3", "facecolor": face, "edgecolor": edge, "linewidth": 0.9}
    axes.text(
        x, y, text, ha="center", va="center", fontsize=6 if crowded else 8, zorder=5, bbox=style,
        color="white" if name.startswith("nic") else "black",
    )  # fmt: skip


def _narrowest(layout: NodeLayout) -> tuple[float, set[str]]:
    """Return the bytes/s from the first half of the GPUs to the second, and the links on that cut.

    There are no links where the cut is wide enough for GPUs that send as much as they can, evenly to all others.
    """
    if len(layout.gpus) < 2:
        return 0.0, set()
    half = set(layout.gpus[: len(layout.gpus) // 2])
    graph = nx.DiGraph()
    for i in layout.links_between_gpus:
        edge = layout.edges[i]
        graph.add_edge(edge.src, edge.dst, capacity=edge.bandwidth_Bps, link=edge.name.split(":")[0])
    for gpu in layout.gpus:
        graph.add_edge(*(("source", f"gpu{gpu}") if gpu in half else (f"gpu{gpu}", "sink")))
    value, (reached, _) = nx.minimum_cut(graph, "source", "sink")
    crossing = {data["link"] for a, b, data in graph.edges(data=True) if a in reached and b not in reached}
    sent_Bps = sum(data["capacity"] for a, _, data in graph.edges(data=True) if a in {f"gpu{gpu}" for gpu in half})
    across = (len(layout.gpus) - len(half)) / (len(layout.gpus) - 1)
    return float(value), crossing if value < 0.999 * sent_Bps * across else set()


def _caption(axes: Axes, cluster: Cluster, node: int, cut_Bps: float) -> None:
    layout = cluster.layouts[node]
    alike = sum(other is layout for other in cluster.layouts)
    title = f"Inside a node: {layout.gpu_text}"
    if alike < cluster.n_nodes:
        title = f"{alike} of {cluster.n_nodes} nodes, such as node {node}: {layout.gpu_text}"
    facts = []
    rates = sorted(
        {round(e.bandwidth_Bps, -8) for e in layout.edges if e.kind == "pcie" and not e.src.startswith("cpu")}
    )
    if rates:
        facts.append("PCIe " + " and ".join(bandwidth(rate) for rate in rates[-3:]))
    links = sorted({e.bandwidth_Bps for e in layout.edges if e.kind == "nvlink" and not e.dst.startswith("nv")})
    if links and not any(e.dst == "nvswitch" for e in layout.edges):
        facts.append("GPU to GPU " + " and ".join(bandwidth(rate) for rate in links[-3:]))
    between = {e.bandwidth_Bps for e in layout.edges if e.src.startswith("cpu") and e.dst.startswith("cpu")}
    if between:
        facts.append(f"between sockets {bandwidth(max(between))}")
    if layout.nics:
        port = layout.edges[layout.port_out[layout.nics[0]]]
        facts.append(f"NICs {port_rate(port.bandwidth_Bps)} {port.kind}")
    if cut_Bps:
        facts.append(f"between halves of the GPUs {bandwidth(cut_Bps)}")
    axes.set_title(title + "\n" + ", ".join(facts), fontsize=10, loc="left")
