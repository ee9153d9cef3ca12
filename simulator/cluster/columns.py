"""Facts of all nodes, GPUs and links of a cluster as arrays, worked out once for what is alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Bools, Floats, Ints, joined
from simulator.cluster.device_routes import HOST_ENDS
from simulator.cluster.gpu import Gpu
from simulator.cluster.link import Link
from simulator.cluster.node import NodeLayout
from simulator.cluster.parts import ClusterGpus, ClusterLinks
from simulator.cluster.wires import Edge
from simulator.fabrics import Switches
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.hardware.transport import TransportKind

#: Function of a link, of the layout of its node (None: it is between switches), and of its position there or in trunks.
LinkFigure = Callable[[NodeLayout | None, int, Edge | Link], Any]


class _NodeRun(NamedTuple):
    """Nodes of one layout in a row: ``first`` is the number of the first of them."""

    layout: NodeLayout
    first: int
    n_nodes: int


@dataclass(frozen=True, eq=False)
class ClusterColumns:
    """The parts of a `simulator.cluster.cluster.Cluster`, and arrays over all of its nodes, GPUs or links.

    ``layouts``: what each node is inside; alike nodes share one. Node n's links are those of its layout in the same
    order, from ``first_link[n]`` on, and its GPUs are numbered from ``first_gpu[n]`` on; trunks follow all nodes.
    """

    spec: ClusterSpec
    gpus: Sequence[Gpu]
    links: ClusterLinks
    layouts: tuple[NodeLayout, ...]
    first_gpu: tuple[int, ...]
    first_link: tuple[int, ...]
    switches: Switches

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return len(self.layouts)

    def gpus_of(self, node: int) -> range:
        """Return the GPUs of a node."""
        return range(self.first_gpu[node], self.first_gpu[node] + len(self.layouts[node].gpus))

    @cached_property
    def gpu_places(self) -> tuple[Ints, Ints]:
        """Node of every GPU, and its number in it."""
        counts = [len(layout.gpus) for layout in self.layouts]
        slots = np.concatenate([np.array(layout.gpus, dtype=np.int64) for layout in self.layouts])
        return np.repeat(np.arange(self.n_nodes), counts), slots

    @cached_property
    def gpu_kinds(self) -> tuple[Ints, tuple[Gpu, ...]]:
        """Number of every GPU's kind, and the first GPU of each; those of a kind are of one type and as fast."""
        numbers: dict[object, int] = {}
        firsts: list[Gpu] = []

        def number(gpu: Gpu) -> int:
            kind = numbers.setdefault((gpu.type, gpu.speed_scale, gpu.host_speed, gpu.autograd_speed), len(numbers))
            if kind == len(firsts):
                firsts.append(gpu)
            return kind

        if not isinstance(self.gpus, ClusterGpus):
            return np.array([number(gpu) for gpu in self.gpus], dtype=np.int64), tuple(firsts)
        changed: dict[int, list[int]] = {}
        for gpu in self.gpus.changed:
            changed.setdefault(self.gpus.node_of(gpu), []).append(gpu)
        columns: dict[object, Ints] = {}
        parts = []
        for node, (layout, spec) in enumerate(zip(self.layouts, self.spec.node_specs, strict=True)):
            key = (id(layout), id(spec)) if node not in changed else node
            if key not in columns:
                columns[key] = np.array([number(self.gpus[gpu]) for gpu in self.gpus_of(node)], dtype=np.int64)
            parts.append(columns[key])
        return np.concatenate(parts), tuple(firsts)

    @cached_property
    def first_links(self) -> Ints:
        """`first_link` as an array."""
        return np.array(self.first_link, dtype=np.int64)

    def located(self, ends: Ints) -> tuple[Ints, Ints]:
        """Return the nodes and numbers of many end points, each as `locate` does."""
        nodes, slots = self.gpu_places
        is_gpu = ends < len(nodes)
        if is_gpu.all():
            return nodes[ends], slots[ends]
        host, which = np.divmod(np.maximum(ends - len(nodes), 0), len(HOST_ENDS))
        gpu = np.minimum(ends, len(nodes) - 1)
        first_slots = np.array([layout.host for layout in self.layouts], dtype=np.int64)
        return np.where(is_gpu, nodes[gpu], host), np.where(is_gpu, slots[gpu], first_slots[host] + which)

    @cached_property
    def _places(self) -> tuple[list[int], list[int]]:
        """`gpu_places` as lists, which are faster for one GPU at a time."""
        nodes, slots = self.gpu_places
        return nodes.tolist(), slots.tolist()

    @cached_property
    def bandwidths_Bps(self) -> Floats:
        """Bandwidth of every link."""
        return self.link_column(lambda _layout, _at, link: link.bandwidth_Bps, np.float64)

    @cached_property
    def kinds(self) -> Ints:
        """Number of every link's kind in `TransportKind`."""
        number = {kind: place for place, kind in enumerate(get_args(TransportKind))}
        return self.link_column(lambda _layout, _at, link: number[link.kind], np.int64)

    def link_column(self, figure: LinkFigure, dtype: type) -> NDArray[Any]:
        """Return a figure of every link as an array.

        It is asked once for each link of a layout, and for trunks and links that an override changes.
        """
        columns: dict[int, NDArray[Any]] = {}
        parts = []
        for layout, _, n_nodes in self._runs:
            if id(layout) not in columns:
                edges = enumerate(layout.edges)
                columns[id(layout)] = np.array([figure(layout, at, edge) for at, edge in edges], dtype=dtype)
            parts.append(np.tile(columns[id(layout)], n_nodes))
        trunks: NDArray[Any] = np.array(
            [figure(None, at, link) for at, link in enumerate(self.links.trunks)], dtype=dtype
        )
        column = np.concatenate([*parts, trunks])
        for number, link in self.links.changed.items():
            if number < self.links.n_inside:
                node = self.links.node_of(number)
                column[number] = figure(self.layouts[node], number - self.first_link[node], link)
            else:
                column[number] = figure(None, number - self.links.n_inside, link)
        return column

    @cached_property
    def link_ends(self) -> tuple[Ints, Ints]:
        """The vertices that every link leads from and to, as numbers."""
        inner: dict[str, int] = {}  # vertices of nodes, by their names in it
        for layout in {id(run.layout): run.layout for run in self._runs}.values():
            for edge in layout.edges:
                inner.setdefault(edge.src, len(inner))
                inner.setdefault(edge.dst, len(inner))
        src, dst = np.empty((2, len(self.links)), dtype=np.int64)
        for layout, node, n_nodes in self._runs:
            first = self.n_switches + np.arange(node, node + n_nodes)[:, None] * len(inner)
            run = slice(self.first_link[node], self.first_link[node] + n_nodes * len(layout.edges))
            src[run] = (first + np.array([inner[edge.src] for edge in layout.edges], dtype=np.int64)).reshape(-1)
            dst[run] = (first + np.array([inner[edge.dst] for edge in layout.edges], dtype=np.int64)).reshape(-1)
        links, from_switch, to_switch = self.switch_ends
        src[links[from_switch >= 0]] = from_switch[from_switch >= 0]
        dst[links[to_switch >= 0]] = to_switch[to_switch >= 0]
        return src, dst

    @cached_property
    def switch_ends(self) -> tuple[Ints, Ints, Ints]:
        """The links with a switch at an end, trunks last, and the numbers of the switches that each leads from and to.

        A switch has the number -1 where that end of the link is in a node.
        """
        links, src, dst = list[Ints](), list[Ints](), list[Ints]()
        for layout, node, n_nodes in self._runs:
            nodes = slice(node, node + n_nodes)
            for nic in layout.nics:
                leaf, inside = self.leaf_numbers[nodes, nic], np.full(n_nodes, -1, dtype=np.int64)
                links += [self.first_links[nodes] + port[nic] for port in (layout.port_out, layout.port_in)]
                src += [inside, leaf]
                dst += [leaf, inside]
        trunks, number = self.links.trunks, self._switch_numbers
        links.append(np.arange(self.links.n_inside, len(self.links)))
        src.append(np.array([number[link.src] for link in trunks], dtype=np.int64))
        dst.append(np.array([number[link.dst] for link in trunks], dtype=np.int64))
        return joined(links), joined(src), joined(dst)

    @property
    def n_switches(self) -> int:
        """Number of switches that links lead to."""
        return len(self._switch_numbers)

    @cached_property
    def _switch_numbers(self) -> dict[str, int]:
        """The number of every switch: leaves first, then those that trunks alone lead to."""
        leaves = itertools.chain.from_iterable(dict.fromkeys(self.switches.leaves))
        upper = (end for link in self.links.trunks for end in (link.src, link.dst))
        return {switch: number for number, switch in enumerate(dict.fromkeys(itertools.chain(leaves, upper)))}

    @cached_property
    def leaf_numbers(self) -> Ints:
        """Number of the switch that each NIC is cabled to, a row for each node; -1 where it has no such NIC."""
        leaves, numbers = self.switches.leaves, self._switch_numbers
        kinds = list(dict.fromkeys(leaves))
        table = np.full((len(kinds), max(map(len, kinds), default=0)), -1, dtype=np.int64)
        for row, on_node in enumerate(kinds):
            table[row, : len(on_node)] = [numbers[leaf] for leaf in on_node]
        row_of = {on_node: row for row, on_node in enumerate(kinds)}
        return table[np.array([row_of[on_node] for on_node in leaves], dtype=np.int64)]

    @cached_property
    def _runs(self) -> list[_NodeRun]:
        """All nodes, those of one layout in a row together."""
        runs, node = [], 0
        for _, alike in itertools.groupby(self.layouts, key=id):
            n_nodes = sum(1 for _ in alike)
            runs.append(_NodeRun(self.layouts[node], node, n_nodes))
            node += n_nodes
        return runs

    @cached_property
    def node_kinds(self) -> tuple[int, ...]:
        """Number of every node's kind: nodes of a kind share a layout, hang on the same switches, and are as fast.

        What moves between nodes then crosses the same trunks, and links of the same positions inside the nodes. Their
        NVSwitches sum up, or none of them do.
        """
        numbers: dict[object, int] = {}
        keys = zip(self.node_makes.tolist(), self.switches.leaves, strict=True)
        return tuple([numbers.setdefault(key, len(numbers)) for key in keys])

    @cached_property
    def node_kind_column(self) -> Ints:
        """The `node_kinds` as an array."""
        return np.array(self.node_kinds, dtype=np.int64)

    @cached_property
    def way_kind_column(self) -> Ints:
        """The `way_kinds` as an array."""
        return np.array(self.way_kinds, dtype=np.int64)

    @cached_property
    def way_kinds(self) -> tuple[int, ...]:
        """A number that nodes share which a hop leaves and enters alike: by their layout.

        Dead trunks make hops take other NICs under some switches, so that then it is that of `node_kinds`.
        """
        if self.switches.dead:
            return self.node_kinds
        numbers: dict[int, int] = {}
        return tuple([numbers.setdefault(id(layout), len(numbers)) for layout in self.layouts])

    @cached_property
    def node_makes(self) -> Ints:
        """Number of every node's make: nodes of a make are alike but for the switches that they hang on."""
        changed: dict[int, list[tuple[int, float]]] = {}
        for number, link in sorted(self.links.changed.items()):
            if number < self.links.n_inside:
                node = self.links.node_of(number)
                changed.setdefault(node, []).append((number - self.first_link[node], link.bandwidth_Bps))
        numbers: dict[object, int] = {}
        nodes = enumerate(zip(self.layouts, self.spec.node_specs, strict=True))
        keys = ((id(layout), spec.nvlink.sharp, tuple(changed.get(node, ()))) for node, (layout, spec) in nodes)
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)

    @cached_property
    def is_port(self) -> Bools:
        """True of every link that is a port of a NIC, either way."""
        return self.link_column(lambda layout, at, _: layout is not None and at in layout.nic_of_port, np.bool_)
