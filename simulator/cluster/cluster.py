"""Clusters: GPUs and links, where they are, and the routes between GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from simulator.arrays import Ints
from simulator.cluster.columns import ClusterColumns
from simulator.cluster.device_routes import HOST_ENDS, MEMORY
from simulator.cluster.inner_routes import Route
from simulator.cluster.link import Link, Spread
from simulator.cluster.nic_pairs import NicPair, joined_pair, no_way_between
from simulator.cluster.node import NodeLayout
from simulator.cluster.switch_tree import NodePlaces
from simulator.cluster.trunk_ways import TrunkWays
from simulator.errors import InputError

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, slots=True)
class BackgroundFlow:
    """Traffic of others that never ends: ``rate_Bps`` where its fair share allows that, ``loads`` of it on links."""

    name: str
    loads: Spread
    rate_Bps: float


@dataclass(frozen=True, eq=False)
class Cluster(ClusterColumns):
    """GPUs, numbered node by node, and the links between them. Rank i of a job sits on GPU i.

    ``memo`` keeps what others work out about this cluster, under keys of their own, for as long as it lives.
    """

    background: tuple[BackgroundFlow, ...] = ()
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def name(self) -> str:
        return self.spec.name

    def layout_of(self, node: int) -> NodeLayout:
        """Return the layout of a node."""
        return self.layouts[node]

    def kind_of(self, link: Link) -> str:
        """Return the word for a link's kind.

        Links between GPUs have their node's own word (nvlink, xgmi), others the name of their transport."""
        if link.kind != "nvlink":
            return link.kind
        return self.spec.node_at(self.links.node_of(link.index)).nvlink.name

    def node_of(self, gpu: int) -> int:
        return self._places[0][gpu]

    def types_of(self, gpus: Sequence[int]) -> tuple[str, ...]:
        """Return the type of each of these GPUs."""
        return self._types * len(gpus) if len(self._types) == 1 else tuple([self.gpus[gpu].type for gpu in gpus])

    def gpu_types(self, ends: Iterable[int]) -> tuple[str, ...]:
        """Return the types of these GPUs, each once, in the order of the nodes; of a host those of its node's GPUs."""
        if len(self._types) == 1:
            return self._types
        present = set[str]()
        for end in ends:
            is_gpu = end < len(self.gpus)
            present.update((self.gpus[end].type,) if is_gpu else self.layouts[self.locate(end)[0]].types)
        return tuple(gpu for gpu in self._types if gpu in present)

    def locate(self, end: int) -> tuple[int, int]:
        """Return the node of an end point, and its number in the routes of `NodeLayout`.

        End points are the GPUs by their numbers, and after them the `HOST_ENDS` of every node.
        """
        nodes, slots = self._places
        count = len(nodes)
        if end < count:
            return nodes[end], slots[end]
        node, which = divmod(end - count, len(HOST_ENDS))
        return node, self.layouts[node].host + which

    def end(self, node: int, slot: int) -> int:
        """Return the end point that `locate` finds there."""
        layout = self.layouts[node]
        if slot < layout.host:
            return self.first_gpu[node] + layout.gpus.index(slot)
        return len(self.gpus) + node * len(HOST_ENDS) + slot - layout.host

    @overload
    def host(self, node: int, which: int = MEMORY) -> int: ...

    @overload
    def host(self, node: Ints, which: int = MEMORY) -> Ints: ...

    def host(self, node: int | Ints, which: int = MEMORY) -> int | Ints:
        """Return the end point of a node's host, or of several: its memory, or another one of `HOST_ENDS`."""
        return len(self.gpus) + node * len(HOST_ENDS) + which

    def own_nics(self, gpu: int) -> Route:
        """Return the NICs, counted within its node, that serve this GPU."""
        node, slot = self.locate(gpu)
        return self.layouts[node].own_nics[slot]

    def route(self, a: int, b: int, nic: int | None = None) -> Route:
        """Return the links from end point ``a`` to ``b`` (GPUs, or the memory of hosts), in order; none of a to a.
        Where `spread` has several ways, the first of them."""
        out, trunks, back = self._ways(a, b, nic)[0]
        way: list[int] = []
        for link, _ in trunks:
            if not way or self.links[way[-1]].dst == self.links[link].src:
                way.append(link)
        return (*out, *way, *back)

    def spread(self, a: int, b: int, nic: int | None = None) -> Spread:
        """Return the links from end point ``a`` to ``b``, with the share of the traffic that crosses each.

        Inside a node: NVLink where it joins the two, else PCIe. Between nodes: through the NICs that `nics_between`
        names, and the fabric. ``nic`` makes both ends use that NIC.
        """
        ways = self._ways(a, b, nic)
        shares: dict[int, float] = {}
        for out, trunks, back in ways:
            for link, share in (*[(link, 1.0) for link in out], *trunks, *[(link, 1.0) for link in back]):
                shares[link] = shares.get(link, 0.0) + share / len(ways)
        return tuple(shares.items())

    def _ways(self, a: int, b: int, nic: int | None) -> tuple[tuple[Route, Spread, Route], ...]:
        """Return links in the sender's node, between switches, and in the receiver's node if that is another one.

        There is an entry for each pair of NICs, which carry equal parts."""
        node_a, slot_a = self.locate(a)
        node_b, slot_b = self.locate(b)
        layout_a, layout_b = self.layouts[node_a], self.layouts[node_b]
        base_a, base_b = self.first_link[node_a], self.first_link[node_b]
        if a == b:
            return (((), (), ()),)
        if node_a == node_b:
            return ((tuple([base_a + i for i in layout_a.between[slot_a, slot_b]]), (), ()),)
        pairs = self.nics_between(node_a, slot_a, node_b, slot_b, nic)
        return tuple(
            [
                (
                    tuple([base_a + i for i in layout_a.out(slot_a, nic_a)]),
                    self.trunks_between(node_a, nic_a, node_b, nic_b),
                    tuple([base_b + i for i in layout_b.back(nic_b, slot_b)]),
                )
                for nic_a, nic_b in pairs
            ]
        )

    def nics_between(
        self, node_a: int, slot_a: int, node_b: int, slot_b: int, nic: int | None = None
    ) -> tuple[NicPair, ...]:
        """Return the NICs by which a message leaves ``slot_a`` of one node and reaches ``slot_b`` of another.

        ``nic`` makes both ends use that NIC. Where dead links leave no way between two NICs, others that are still
        joined take over, of one number if possible. Raises `InputError` where there are none.

        There is a pair for each of the receiver's NICs, with equal parts of the message. The rail is that of the
        receiver's NIC where the sender is no farther from that rail's NIC than from its own. So it is where the sender
        reaches that NIC over NVLink (NCCL's PXN), or the fabric does not join the rails. Else each uses its own NIC. A
        host uses the NIC of the same rail as the GPU at the other end. Where the fabric does not join the rails and a
        node lacks that NIC, the rail is one that both have, the sender's own if possible.

        Nodes of the same `way_kinds` have one answer.
        """
        key = ("nics", self.way_kinds[node_a], slot_a, self.way_kinds[node_b], slot_b, nic)
        pairs: tuple[NicPair, ...] | None = self.memo.get(key)
        if pairs is None:
            pairs = self.memo[key] = self._joined_nics(node_a, slot_a, node_b, slot_b, nic)
        return pairs

    def _joined_nics(self, node_a: int, slot_a: int, node_b: int, slot_b: int, nic: int | None) -> tuple[NicPair, ...]:
        a, b = self.layouts[node_a], self.layouts[node_b]
        all_a, all_b = a.own_nics.get(slot_a), b.own_nics.get(slot_b)
        if nic is not None:
            pairs = [(nic, nic)]
        elif not all_a or not all_b:
            pairs = [self._same_nic(node_a, node_b, (all_a or all_b or (0,))[0])]
        else:
            ends = [(all_a[i % len(all_a)], nic_b) for i, nic_b in enumerate(all_b)]
            pairs = [self._nics_of_rail(node_a, slot_a, node_b, *pair) for pair in ends]
        leaves_a, leaves_b = self.switches.leaves[node_a], self.switches.leaves[node_b]

        def joins(pair: NicPair) -> bool:
            start, goal = leaves_a[pair[0]], leaves_b[pair[1]]
            return start == goal or self._trunk_ways.joins(start, goal)

        joined = [joined_pair(pair, (a.nics, b.nics), joins) for pair in pairs]
        if None in joined:
            leaves = [
                [on_node[nic] for nic in layout.nics]
                for on_node, layout in zip(self.switches.leaves, self.layouts, strict=True)
            ]
            raise no_way_between((node_a, node_b), leaves, self._trunk_ways.hops_to)
        return tuple([pair for pair in joined if pair is not None])

    def _nics_of_rail(self, node_a: int, slot_a: int, node_b: int, own_a: int, own_b: int) -> tuple[int, int]:
        a = self.layouts[node_a]
        if own_b not in a.nics:
            return (own_a, own_b) if self._joins_rails else self._same_nic(node_a, node_b, own_a)
        near = len(a.to_nic[slot_a, own_b]) <= len(a.to_nic[slot_a, own_a])
        by_nvlink = a.edges[a.to_nic[slot_a, own_b][0]].kind == "nvlink"
        return (own_b if near or by_nvlink or not self._joins_rails else own_a), own_b

    def _same_nic(self, node_a: int, node_b: int, wanted: int) -> tuple[int, int]:
        """Return a NIC of one number on both nodes, if possible the ``wanted`` one; any if the fabric joins rails."""
        on_a, on_b = self.layouts[node_a].nics, self.layouts[node_b].nics
        common = [nic for nic in on_a if nic in on_b]
        if common:
            return (wanted, wanted) if wanted in common else (common[0], common[0])
        if not self._joins_rails:
            raise InputError(
                f"node{node_a} and node{node_b} have no network card on one rail, and the fabric does not join rails",
                key="fabric.kind",
                found=self.spec.fabric.kind,
                fix="fat_tree",
            )
        return on_a[0], on_b[0]

    def trunks_between(self, node_a: int, nic_a: int, node_b: int, nic_b: int) -> Spread:
        """Return the links from the switch of one NIC to that of another, with the share of the traffic on each.

        `TrunkWays` says which ways these are. Raises `InputError` where dead links leave none."""
        start, goal = self.switches.leaves[node_a][nic_a], self.switches.leaves[node_b][nic_b]
        if start == goal:
            return ()
        spread = self._trunk_ways.between(start, goal)
        if spread is None:
            raise InputError(f"dead links leave no way from {start} to {goal}", key="cluster.overrides")
        return spread

    @cached_property
    def _types(self) -> tuple[str, ...]:
        layouts = {id(layout): layout for layout in self.layouts}.values()
        return tuple(dict.fromkeys(gpu for layout in layouts for gpu in layout.types))

    @cached_property
    def _joins_rails(self) -> bool:
        """Trunks lead from any leaf to any other where none is dead."""
        leaves = {leaf for on_node in self.switches.leaves for leaf in on_node}
        if len(leaves) == 1:
            return True
        return leaves <= self._trunk_ways.whole_hops_to(min(leaves)).keys()  # trunks lead both ways

    @property
    def trunks(self) -> tuple[Link, ...]:
        """The links between switches."""
        return self.links[self.links.n_inside :]

    @cached_property
    def _trunk_ways(self) -> TrunkWays:
        ends = [(trunk.lower, trunk.upper) for trunk in self.switches.dead]
        return TrunkWays(self.trunks, [*ends, *((upper, lower) for lower, upper in ends)])

    @cached_property
    def node_places(self) -> NodePlaces | None:
        """The places of nodes in a tree of trunks, of which nodes share all switches of a level or none; else None."""
        tree = self._trunk_ways.tree
        return None if tree is None else NodePlaces.in_tree(tree, self.switches.leaves)

    @cached_property
    def graph(self) -> nx.DiGraph:
        """Graph of GPUs, switches, hosts and NICs as vertices, and links as edges with their fields as attributes."""
        import networkx as nx

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
        """Return the bytes/s that the first half of the GPUs can send to the second at line rate: a maximum flow.

        Halves are of whole nodes where several have GPUs; inside a node only links of routes between GPUs count.
        """
        count = len(self.gpus)
        if count == 1:
            return 0.0
        peopled = [node for node in range(self.n_nodes) if len(self.gpus_of(node))]
        if len(peopled) > 1:
            half, usable = self.first_gpu[peopled[len(peopled) // 2]], tuple(self.links)
        else:
            layout, first = self.layouts[peopled[0]], self.first_link[peopled[0]]
            half, usable = count // 2, tuple([self.links[first + at] for at in layout.links_between_gpus])
        at = self._merged(half)
        capacity: dict[tuple[str, str], float] = {}
        for link in usable:
            ends = at.get(link.src, link.src), at.get(link.dst, link.dst)
            capacity[ends] = capacity.get(ends, 0.0) + link.bandwidth_Bps
        import networkx as nx

        graph = nx.DiGraph()
        graph.add_edges_from((*ends, {"capacity": total_Bps}) for ends, total_Bps in capacity.items())
        graph.add_edges_from(("source", at.get(gpu.name, gpu.name)) for gpu in self.gpus[:half])
        graph.add_edges_from((at.get(gpu.name, gpu.name), "sink") for gpu in self.gpus[half:])
        return float(nx.maximum_flow_value(graph, "source", "sink"))

    def _merged(self, half: int) -> dict[str, str]:
        """Return the vertex that each vertex is merged with, in the first of the alike nodes.

        Alike nodes are in the same half of the GPUs and cabled to the same switches, with links as fast. Flow may as
        well be spread evenly over alike nodes, so that one node with the links of all is as good."""
        first: dict[object, int] = {}
        at: dict[str, str] = {}
        for node, (layout, start) in enumerate(zip(self.layouts, self.first_link, strict=True)):
            rates = tuple([link.bandwidth_Bps for link in self.links[start : start + len(layout.edges)]])
            key = self.first_gpu[node] < half, layout, self.switches.leaves[node], rates
            like = first.setdefault(key, node)
            if like != node:
                for edge in layout.edges:
                    for vertex in (edge.src, edge.dst):
                        at[f"node{node}.{vertex}"] = f"node{like}.{vertex}"
        return at
