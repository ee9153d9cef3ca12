"""The nouns of the hardware: `Gpu`, `Link`, and the `Cluster` that they form."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import networkx as nx

from simulator.cluster.node import HOST_ENDS, MEMORY, NodeLayout, Route
from simulator.config.cluster import ClusterSpec
from simulator.config.transport import TransportKind
from simulator.fabrics import Switches


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a full-duplex link.

    ``kind`` is the transport whose efficiency and latency apply: nvlink, pcie, infiniband, roce or tcp, nvme for the
    drives of a node, memory for its host's (one link for both directions). A NIC's port is
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


@dataclass(frozen=True, slots=True)
class BackgroundFlow:
    """Traffic of others that never ends: along ``route``, ``rate_Bps`` where its fair share allows that."""

    name: str
    route: Route
    rate_Bps: float


@dataclass(frozen=True, eq=False)
class Cluster:
    """GPUs, numbered node by node, and the links between them. Rank i of a job sits on GPU i.

    Node n's links are those of ``layout`` in the same order, from ``n * len(layout.edges)`` on; trunks follow.
    ``memo`` keeps what others work out about this cluster, under keys of their own, for as long as it lives.
    """

    spec: ClusterSpec
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    layout: NodeLayout
    switches: Switches
    background: tuple[BackgroundFlow, ...] = ()
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    _between_leaves: dict[tuple[str, str], Route] = field(default_factory=dict, init=False, repr=False)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def gpus_per_node(self) -> int:
        return self.spec.node.gpus.count

    def node_of(self, gpu: int) -> int:
        return gpu // self.gpus_per_node

    def locate(self, end: int) -> tuple[int, int]:
        """The node of an end point, and which one of that node it is, as in the routes of `NodeLayout`.

        End points are the GPUs by their numbers, and after them the `HOST_ENDS` of every node.
        """
        count = len(self.gpus)
        if end < count:
            return divmod(end, self.gpus_per_node)
        node, which = divmod(end - count, len(HOST_ENDS))
        return node, self.gpus_per_node + which

    def end(self, node: int, slot: int) -> int:
        """The end point that `locate` finds there."""
        if slot < self.gpus_per_node:
            return node * self.gpus_per_node + slot
        return len(self.gpus) + node * len(HOST_ENDS) + slot - self.gpus_per_node

    def host(self, node: int, which: int = MEMORY) -> int:
        """The end point of a node's host: its memory, or another one of `HOST_ENDS`."""
        return self.end(node, self.gpus_per_node + which)

    def own_nic(self, gpu: int) -> int:
        """The NIC, counted within its node, that serves this GPU."""
        return self.layout.own_nic[gpu % self.gpus_per_node]

    def route(self, a: int, b: int, nic: int | None = None) -> Route:
        """Links from end point ``a`` to ``b`` (GPUs, or the memory of hosts), in order; none where they are the same.

        Inside a node: NVLink where it joins the two, else PCIe. Between nodes: through the NICs that `nics_between`
        names, and the fabric. ``nic`` makes both ends use that NIC.
        """
        layout = self.layout
        node_a, gpu_a = self.locate(a)
        node_b, gpu_b = self.locate(b)
        base_a, base_b = node_a * len(layout.edges), node_b * len(layout.edges)
        if node_a == node_b:
            return tuple([base_a + i for i in layout.between[gpu_a, gpu_b]]) if a != b else ()
        nic_a, nic_b = self.nics_between(gpu_a, gpu_b) if nic is None else (nic, nic)
        return (
            *[base_a + i for i in layout.out(gpu_a, nic_a)],
            *self.trunks_between(node_a, nic_a, node_b, nic_b),
            *[base_b + i for i in layout.back(nic_b, gpu_b)],
        )

    def nics_between(self, gpu_a: int, gpu_b: int) -> tuple[int, int]:
        """By which NICs a message leaves GPU ``gpu_a`` of one node and reaches ``gpu_b`` of another.

        On the rail of the receiver's own NIC, when the sender is no farther from that rail's NIC than from its own, or
        reaches it over NVLink (NCCL's PXN), or the fabric does not join the rails; else from own NIC to own NIC. A host
        uses the NIC of the same rail as the GPU at the other end.
        """
        hosts = self.gpus_per_node
        if gpu_a >= hosts or gpu_b >= hosts:
            nic = self.layout.own_nic[min(gpu_a, gpu_b)] if min(gpu_a, gpu_b) < hosts else 0
            return nic, nic
        to_nic, own, nic_b = self.layout.to_nic, self.layout.own_nic[gpu_a], self.layout.own_nic[gpu_b]
        near = len(to_nic[gpu_a, nic_b]) <= len(to_nic[gpu_a, own])
        by_nvlink = self.layout.edges[to_nic[gpu_a, nic_b][0]].kind == "nvlink"
        return (nic_b if near or by_nvlink or not self._joins_rails else own), nic_b

    def trunks_between(self, node_a: int, nic_a: int, node_b: int, nic_b: int) -> Route:
        """Links from the switch of one NIC to that of another, as few as possible."""
        ends = self.switches.leaves[node_a][nic_a], self.switches.leaves[node_b][nic_b]
        if ends[0] == ends[1]:
            return ()
        if ends not in self._between_leaves:
            path = nx.shortest_path(self._trunks, *ends)
            self._between_leaves[ends] = tuple(self._trunks.edges[hop]["link"] for hop in pairwise(path))
        return self._between_leaves[ends]

    @cached_property
    def _joins_rails(self) -> bool:
        """Whether trunks lead from any leaf to any other."""
        leaves = {leaf for of_node in self.switches.leaves for leaf in of_node}
        return len(leaves) == 1 or (
            leaves <= self._trunks.nodes
            and all(leaves <= part for part in nx.strongly_connected_components(self._trunks))
        )

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
        # The channels of a host's memory lead both ways.
        both = [(b, a, graph.edges[a, b]) for a, b in graph.edges if graph.edges[a, b]["kind"] == "memory"]
        graph.add_edges_from(both)
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
            used = {i for (a, b), route in self.layout.between.items() if max(a, b) < count for i in route}
            half, usable = count // 2, tuple(link for link in self.links if link.index in used)
        graph = nx.DiGraph()
        graph.add_edges_from((link.src, link.dst, {"capacity": link.bandwidth_Bps}) for link in usable)
        graph.add_edges_from(("source", gpu.name) for gpu in self.gpus[:half])
        graph.add_edges_from((gpu.name, "sink") for gpu in self.gpus[half:])
        return float(nx.maximum_flow_value(graph, "source", "sink"))
