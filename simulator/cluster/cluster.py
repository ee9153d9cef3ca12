"""The nouns of the hardware: `Gpu`, `Link`, and the `Cluster` that they form."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import networkx as nx

from simulator.cluster.fabric import Switches
from simulator.cluster.node import NodeLayout, Route
from simulator.config.cluster import ClusterSpec
from simulator.config.transport import TransportKind


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a full-duplex link.

    ``kind`` is the transport whose efficiency and latency apply: nvlink, pcie, infiniband, roce or tcp. A NIC's port is
    ``node3.nic2:tx`` (towards the switch) and ``:rx``; a leaf's uplinks are ``rail2.leaf0.up:tx`` and ``:rx``.
    """

    index: int
    name: str
    kind: TransportKind
    src: str
    dst: str
    bandwidth_Bps: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU ``index`` of node ``node``; ``speed_scale`` multiplies its speed (1: as its type)."""

    name: str
    node: int
    index: int
    type: str
    speed_scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Cluster:
    """GPUs, numbered node by node, and the links between them. Rank i of a job sits on GPU i.

    Node n's links are those of ``layout`` in the same order, from ``n * len(layout.edges)`` on; trunks follow.
    """

    spec: ClusterSpec
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    layout: NodeLayout
    switches: Switches
    _between_leaves: dict[tuple[str, str], Route | None] = field(default_factory=dict, init=False, repr=False)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def gpus_per_node(self) -> int:
        return self.spec.node.gpus.count

    def node_of(self, gpu: int) -> int:
        return gpu // self.gpus_per_node

    def own_nic(self, gpu: int) -> int:
        """The NIC, counted within its node, that serves this GPU."""
        return self.layout.own_nic[gpu % self.gpus_per_node]

    def route(self, a: int, b: int, nic: int | None = None) -> Route:
        """Links from GPU ``a`` to GPU ``b``, in order; none where they are the same.

        Inside a node: NVLink where it joins the two, else PCIe. Between nodes: on the rail of ``b``'s own NIC, when
        ``a`` is no farther from that rail's NIC than from its own, or reaches it over NVLink (NCCL's PXN), or the
        fabric does not join the rails; else from own NIC to own NIC across the fabric. ``nic`` makes both ends use
        that NIC.
        """
        per_node, layout = self.gpus_per_node, self.layout
        node_a, gpu_a = divmod(a, per_node)
        node_b, gpu_b = divmod(b, per_node)
        base_a, base_b = node_a * len(layout.edges), node_b * len(layout.edges)
        if node_a == node_b:
            return tuple([base_a + i for i in layout.between[gpu_a, gpu_b]]) if a != b else ()
        if nic is None:
            nic_b = layout.own_nic[gpu_b]
            nic_a = self._exit(node_a, gpu_a, node_b, nic_b)
        else:
            nic_a = nic_b = nic
        across = self._across(self.switches.leaf(node_a, nic_a), self.switches.leaf(node_b, nic_b))
        assert across is not None  # a rail joins all nodes
        return (
            *[base_a + i for i in layout.to_nic[gpu_a, nic_a]],
            base_a + layout.port_out[nic_a],
            *across,
            base_b + layout.port_in[nic_b],
            *[base_b + i for i in layout.from_nic[gpu_b, nic_b]],
        )

    def _exit(self, node_a: int, gpu_a: int, node_b: int, nic_b: int) -> int:
        own = self.layout.own_nic[gpu_a]
        if len(self.layout.to_nic[gpu_a, nic_b]) <= len(self.layout.to_nic[gpu_a, own]):
            return nic_b
        by_nvlink = self.links[self.layout.to_nic[gpu_a, nic_b][0]].kind == "nvlink"
        joined = self._across(self.switches.leaf(node_a, own), self.switches.leaf(node_b, nic_b)) is not None
        return nic_b if by_nvlink or not joined else own

    def _across(self, leaf_a: str, leaf_b: str) -> Route | None:
        """Trunks from leaf to leaf, fewest first; None where no trunk joins them."""
        if leaf_a == leaf_b:
            return ()
        if (leaf_a, leaf_b) not in self._between_leaves:
            graph = self._trunks
            route = None
            if leaf_a in graph and leaf_b in graph:
                path = nx.shortest_path(graph, leaf_a, leaf_b)
                route = tuple(graph.edges[hop]["link"] for hop in pairwise(path))
            self._between_leaves[leaf_a, leaf_b] = route
        return self._between_leaves[leaf_a, leaf_b]

    @cached_property
    def _trunks(self) -> nx.DiGraph:
        graph = nx.DiGraph()
        first = self.spec.nodes * len(self.layout.edges)
        graph.add_edges_from((link.src, link.dst, {"link": link.index}) for link in self.links[first:])
        return graph

    @cached_property
    def graph(self) -> nx.DiGraph:
        """Every GPU, switch, host and NIC as a vertex, every link as an edge with its fields as attributes."""
        graph = nx.DiGraph(name=self.name)
        graph.add_nodes_from(gpu.name for gpu in self.gpus)
        graph.add_edges_from(
            (
                link.src,
                link.dst,
                {
                    "link": link.index,
                    "kind": link.kind,
                    "bandwidth_Bps": link.bandwidth_Bps,
                    "latency_s": link.latency_s,
                },
            )
            for link in self.links
        )
        return graph

    def bisection_Bps(self) -> float:
        """What the first half of the GPUs can send to the second, bytes/s at line rate: a maximum flow of the graph.

        Halves are of whole nodes where there are several; inside a node only links of routes between GPUs count.
        """
        count = len(self.gpus)
        if count == 1:
            return 0.0
        if self.spec.nodes > 1:
            half, usable = self.spec.nodes // 2 * self.gpus_per_node, self.links
        else:
            used = {i for route in self.layout.between.values() for i in route}
            half, usable = count // 2, tuple(link for link in self.links if link.index in used)
        graph = nx.DiGraph()
        graph.add_edges_from((link.src, link.dst, {"capacity": link.bandwidth_Bps}) for link in usable)
        graph.add_edges_from(("source", gpu.name) for gpu in self.gpus[:half])
        graph.add_edges_from((gpu.name, "sink") for gpu in self.gpus[half:])
        return float(nx.maximum_flow_value(graph, "source", "sink"))
