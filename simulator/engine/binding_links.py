"""Links that can limit a communication, told from those that never do."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

from simulator.cluster import Cluster
from simulator.engine.folding import Classes, link_labels
from simulator.engine.group_comms import LinkLoads


def binding_classes(
    cluster: Cluster, capacity: NDArray[np.float64], all_loads: LinkLoads, classes: Classes
) -> list[bool]:
    """Tell for each class of links whether one of them can ever limit a communication.

    A link cannot where everything that crosses it comes in over neighbours that together carry no more than it can. The
    same holds of neighbours over which everything goes on. An example are the uplinks of a leaf switch without
    oversubscription. The neighbours themselves must be able to limit a communication, and must have another label. Of
    two alike links that everything crosses, both bind, in one class or in two. Links of a class have alike neighbours,
    so that its first one decides.
    """
    loads, label = _loads_on_first_links(all_loads, classes), link_labels(cluster, capacity)
    src, dst = _ends(cluster, np.unique(loads.link))
    limiters: dict[int, list[NDArray[np.int64]]] = {}  # of each link the sets of links that limit before it
    is_first = np.zeros(len(capacity), dtype=bool)
    is_first[classes.first] = True
    for near_end, far_end in ((src, dst), (dst, src)):
        link, neighbour = _neighbours(loads, near_end, far_end)
        room = np.bincount(link, weights=capacity[neighbour], minlength=len(capacity))
        enough = is_first & (room <= capacity * (1 + 1e-12))
        starts = np.flatnonzero(np.diff(link, prepend=-1))
        for low, high in pairwise([*starts.tolist(), len(link)]):
            if enough[first := int(link[low])]:
                limiters.setdefault(first, []).append(neighbour[low:high])
    binds = np.ones(len(classes.first), dtype=bool)
    for first in sorted(limiters, key=lambda link: (-capacity[link], label[link], link)):
        for neighbours in limiters[first]:
            if binds[classes.class_of[neighbours]].all() and not (label[neighbours] == label[first]).any():
                binds[classes.class_of[first]] = False
    return cast(list[bool], binds.tolist())


def _ends(cluster: Cluster, links: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the vertices that every link leads from and to, as numbers; 0 for all but ``links``."""
    numbers: dict[str, int] = {}
    src, dst = np.zeros((2, len(cluster.links)), dtype=np.int64)
    loaded = [cluster.links[link] for link in links.tolist()]
    src[links] = [numbers.setdefault(link.src, len(numbers)) for link in loaded]
    dst[links] = [numbers.setdefault(link.dst, len(numbers)) for link in loaded]
    return src, dst


def _loads_on_first_links(loads: LinkLoads, classes: Classes) -> LinkLoads:
    """Return the loads of the communications that cross the first link of a class."""
    crosses = np.isin(loads.comm, np.unique(loads.comm[np.isin(loads.link, classes.first)]))
    return LinkLoads([], loads.comm[crosses], loads.phase[crosses], loads.link[crosses], loads.load[crosses])


def _neighbours(
    loads: LinkLoads, near_end: NDArray[np.int64], far_end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sorted pairs of a link and a neighbour at its ``near_end`` that carries the same phase.

    The vertex ``near_end[link]`` is ``far_end[neighbour]``. A link where a phase begins or ends has no pairs: the phase
    loads it more than all of those neighbours.
    """
    links = loads.link
    n_links, n_vertices = len(near_end), int(max(near_end.max(), far_end.max())) + 1
    phase = loads.comm * int(loads.phase.max(initial=0) + 1) + loads.phase
    far = phase * n_vertices + far_end[links]
    order = np.argsort(far, kind="stable")
    near = phase * n_vertices + near_end[links]
    low, high = (np.searchsorted(far[order], near, side) for side in ("left", "right"))
    count = high - low
    entry = np.repeat(np.arange(len(links)), count)
    neighbour = order[np.arange(len(entry)) - np.repeat(np.cumsum(count) - count - low, count)]
    load_before = np.bincount(entry, weights=loads.load[neighbour], minlength=len(links))
    begins = np.zeros(n_links, dtype=bool)
    begins[links[load_before < loads.load * (1 - 1e-12)]] = True
    pairs = np.unique(links[entry] * n_links + links[neighbour])
    link, other = np.divmod(pairs, n_links)
    return link[~begins[link]], other[~begins[link]]
