"""Parts of nodes that dead links cut off, and the overrides that leave them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.cluster.inner_routes import NoWayError
from simulator.cluster.node import NodeLayout, lay_out
from simulator.cluster.wires import inner_edges, tree_of
from simulator.hardware.node import NodeSpec
from simulator.hardware.transport import TransportKind


@dataclass(frozen=True)
class ThinnedNode:
    """A node without its ``missing`` GPUs and cards (``gpu4``) and without its ``dead`` links (``gpu4.pcie``)."""

    spec: NodeSpec
    missing: frozenset[str]
    dead: frozenset[str]

    def layout(self, transport: TransportKind) -> NodeLayout:
        """Lay it out. Raises `NoWayError` where the dead links leave no way between two of its parts."""
        return lay_out(self.spec, transport, self.missing, self.dead)


def overrides_without_cut_off(nodes: Sequence[ThinnedNode], transport: TransportKind) -> str | None:
    """Return the overrides that leave out all GPUs and cards which dead links cut off, as entries of a YAML list.

    A part that every node lacks is written with ``node*``. The answer is None where a node would be left without GPUs,
    several nodes without cards, or other ways would still be missing.
    """
    parts_of: dict[ThinnedNode, tuple[str, ...]] = {}
    without: dict[str, list[int]] = {}
    for number, node in enumerate(nodes):
        if node not in parts_of:
            parts_of[node] = _cut_off_parts(node, transport)
            rest = replace(node, missing=node.missing.union(parts_of[node]))
            try:
                layout = rest.layout(transport)
            except NoWayError:
                return None
            if not layout.gpus or (len(nodes) > 1 and not layout.nics):
                return None
        for part in parts_of[node]:
            without.setdefault(part, []).append(number)
    names = [
        (part, name)
        for part, numbers in without.items()
        for name in (["*"] if len(numbers) == len(nodes) else map(str, numbers))
    ]
    return ", ".join(f"{{{part.rstrip('0123456789')}: node{name}.{part}, missing: true}}" for part, name in names)


def _cut_off_parts(node: ThinnedNode, transport: TransportKind) -> tuple[str, ...]:
    """Return the GPUs and cards beside the largest piece of a node that PCIe still joins; none if no way is missing.

    The largest piece is that with the most GPUs, then the most cards, then the first."""
    try:
        node.layout(transport)
    except NoWayError:
        pass
    else:
        return ()
    import networkx as nx

    graph = nx.Graph()
    parts = [part for part in tree_of(node.spec) if part.startswith(("gpu", "nic")) and part not in node.missing]
    graph.add_nodes_from(parts)
    for edge in inner_edges(node.spec):
        if edge.kind == "pcie" and edge.name.partition(":")[0] not in node.dead:
            graph.add_edge(edge.src, edge.dst)
    pieces = [[part for part in parts if part in piece] for piece in nx.connected_components(graph)]

    def size(piece: list[str]) -> tuple[int, int]:
        gpus = sum(part.startswith("gpu") for part in piece)
        return gpus, len(piece) - gpus

    largest = max(pieces, key=size)
    return tuple([part for part in parts if part not in largest])
