"""Capacity and label of every link, worked out once for each link of a layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.arrays import Floats
from simulator.cluster import Cluster, Link
from simulator.cluster.node import NodeLayout
from simulator.cluster.wires import Edge
from simulator.costs import Costs
from simulator.engine.colours import Colours, mixed
from simulator.engine.placement import Placed

_DIGITS = str.maketrans("", "", "0123456789")


def link_capacities(jobs: Sequence[Placed], cluster: Cluster) -> Floats:
    """Return the bytes/s that each link can carry.

    In a node they are by its types of GPU; between switches, and in nodes of types that have no rank, by the costs of
    all.
    """
    all_costs = jobs[0].costs
    used = {kind.gpu for placed in jobs for kind in placed.kinds(cluster)}
    costs_of_types: dict[tuple[str, ...], Costs] = {(): all_costs}

    def capacity_Bps(layout: NodeLayout | None, _: int, link: Edge | Link) -> float:
        types = () if layout is None else tuple([gpu for gpu in dict.fromkeys(layout.types) if gpu in used])
        if types not in costs_of_types:
            costs_of_types[types] = all_costs.for_gpu(types[0]) if len(types) == 1 else all_costs.among(types)
        return costs_of_types[types].reachable_Bps(link.kind, link.bandwidth_Bps)

    return cluster.link_column(capacity_Bps, np.float64)


def link_labels(cluster: Cluster, capacity: Floats) -> Colours:
    """Return a label of every link; links of one kind, capacity and latency and of one name share it.

    Numbers and directions in names do not count. Links of different names count as different, so that rows of links say
    how many there are of a name.
    """
    families: dict[object, int] = {}

    def family(layout: NodeLayout | None, at: int, link: Edge | Link) -> int:
        edge = link if layout is None else layout.edges[at]
        leaves_gpu = layout is not None and edge.src.startswith("gpu")
        name = edge.name.partition(":")[0].translate(_DIGITS)
        key = layout is None, link.kind, link.latency_s, leaves_gpu, name
        return families.setdefault(key, len(families))

    return mixed(cluster.link_column(family, np.int64), capacity.view(np.uint64))
