"""The GPUs and links of a cluster as sequences that make each of them when asked.

Nodes of one layout are alike but for their number. A cluster of thousands of nodes keeps one layout, and beside it only
the GPUs and links that an override changes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar, overload

from simulator.cluster.gpu import Gpu
from simulator.cluster.link import Link
from simulator.cluster.node import FABRIC, NodeLayout
from simulator.fabrics import Switches
from simulator.hardware.node import NodeSpec

ClusterPart = TypeVar("ClusterPart", Gpu, Link)


class NodeParts(Sequence[ClusterPart]):
    """Parts of all nodes, numbered node by node, then others; each is made when it is asked for.

    ``first[n]`` is the number of the first part of node n. ``changed``: parts that an override changes, by number.
    """

    def __init__(self, first: Sequence[int], size: int, changed: Mapping[int, ClusterPart]) -> None:
        self.first = first
        self.changed: Mapping[int, ClusterPart] = changed
        self._size = size

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, at: int) -> ClusterPart: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[ClusterPart, ...]: ...

    def __getitem__(self, at: int | slice) -> ClusterPart | tuple[ClusterPart, ...]:
        if isinstance(at, slice):
            return tuple([self._part(number) for number in range(self._size)[at]])
        return self._part(range(self._size)[at])

    def __iter__(self) -> Iterator[ClusterPart]:
        return map(self._part, range(self._size))

    def node_of(self, number: int) -> int:
        """Return the node that holds part ``number``; the last node for parts of none."""
        return bisect_right(self.first, number) - 1

    def _part(self, number: int) -> ClusterPart:
        part = self.changed.get(number)
        return self._new(number) if part is None else part

    def _new(self, number: int) -> ClusterPart:
        """Return a part as no override changes it."""
        raise NotImplementedError


class ClusterGpus(NodeParts[Gpu]):
    """The GPUs of a cluster, numbered node by node."""

    def __init__(
        self, specs: Sequence[NodeSpec], layouts: Sequence[NodeLayout], first: Sequence[int], changed: Mapping[int, Gpu]
    ) -> None:
        super().__init__(first, first[-1] + len(layouts[-1].gpus), changed)
        self.layouts, self._specs = layouts, specs

    def _new(self, number: int) -> Gpu:
        node = self.node_of(number)
        spec, index = self._specs[node], self.layouts[node].gpus[number - self.first[node]]
        return Gpu(
            f"node{node}.gpu{index}",
            node,
            index,
            spec.gpus.by_number[index],
            host_speed=spec.host_speed,
            autograd_speed=spec.autograd_speed,
        )


class ClusterLinks(NodeParts[Link]):
    """The links of a cluster: those of each node in the order of its layout, then those between switches."""

    def __init__(
        self,
        layouts: Sequence[NodeLayout],
        first: Sequence[int],
        switches: Switches,
        trunks: Sequence[Link],
        changed: Mapping[int, Link],
    ) -> None:
        self.n_inside = first[-1] + len(layouts[-1].edges)
        super().__init__(first, self.n_inside + len(trunks), changed)
        self.layouts, self.trunks = layouts, trunks
        self._switches = switches

    def _new(self, number: int) -> Link:
        if number >= self.n_inside:
            return self.trunks[number - self.n_inside]
        node = self.node_of(number)
        layout, position = self.layouts[node], number - self.first[node]
        edge, prefix = layout.edges[position], f"node{node}."
        src, dst = prefix + edge.src, prefix + edge.dst
        port = layout.nic_of_port.get(position)
        if port is not None:
            leaf = self._switches.leaves[node][port]
            src, dst = (leaf, dst) if edge.src == FABRIC else (src, leaf)
        return Link(number, prefix + edge.name, edge.kind, src, dst, edge.bandwidth_Bps, edge.latency_s)
