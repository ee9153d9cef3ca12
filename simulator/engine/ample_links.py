"""Links between switches that never limit a transfer, told from the fabric alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from simulator.arrays import Bools, Floats, Ints
from simulator.cluster import Cluster
from simulator.engine.carried import Carriage
from simulator.engine.folding import Folding

#: Class of communications and phase -> classes of ample links, and the load of all of that class on one link.
AmpleLoads = Mapping[tuple[int, int], Sequence[tuple[int, float]]]


def ample_links(cluster: Cluster, capacity: Floats) -> Bools:
    """Tell which links between switches carry as much as all links together that lead to where they begin.

    The same holds of all links that lead on from where they end. An example are the uplinks of a leaf switch without
    oversubscription. ``capacity``: bytes/s of each link. No communication puts more on a link between switches than on
    the links into the switch where it begins, together. Nor does it put more there than on the links out of the switch
    where it ends. That holds where switches sum up and multicast too: a sum is no larger than what is summed. The way
    back, between the same two switches, does not count. So where the smaller links are not overloaded, these are not,
    whatever is sent. Each rests on smaller links alone, so that none rests on itself. Background traffic may begin at a
    switch: what it crosses is not among them.
    """
    key = "ample", capacity.tobytes()
    ample: Bools | None = cluster.memo.get(key)
    if ample is None:
        ample = cluster.memo[key] = _ample(cluster, capacity)
    return ample


def _ample(cluster: Cluster, capacity: Floats) -> Bools:
    links, src, dst = cluster.switch_ends
    trunks = slice(cluster.links.n_inside, None)
    ample = np.zeros(len(capacity), dtype=bool)
    for near, far in ((src, dst), (dst, src)):
        room_Bps, count = _neighbours(len(cluster.links.trunks), near, far, capacity[links], cluster.n_switches)
        ample[trunks] |= (count > 1) & (room_Bps <= capacity[trunks] * (1 + 1e-12))
    for flow in cluster.background:
        ample[[link for link, _ in flow.loads]] = False
    return ample


def _neighbours(n_trunks: int, near: Ints, far: Ints, capacity: Floats, n_switches: int) -> tuple[Floats, Ints]:
    """Return what the links whose ``far`` end is the ``near`` end of a trunk carry together, and their number.

    Ends and ``capacity`` are of links with a switch at an end; the last ``n_trunks`` of them are the trunks, and -1 is
    an end in a node. Links of the way back, between the same two switches, do not count.
    """
    leads, first = far >= 0, len(far) - n_trunks
    start, end, trunk_Bps = near[first:], far[first:], capacity[first:]
    room_Bps = np.bincount(far[leads], weights=capacity[leads], minlength=n_switches)[start]
    count = np.bincount(far[leads], minlength=n_switches)[start]
    ways, way = np.unique(start * n_switches + end, return_inverse=True)
    back = end * n_switches + start
    at = np.minimum(np.searchsorted(ways, back), len(ways) - 1)
    returns = ways[at] == back
    back_Bps, n_back = np.bincount(way, weights=trunk_Bps), np.bincount(way)
    other_Bps = room_Bps - np.where(returns, back_Bps[at], 0.0)
    return other_Bps.astype(np.float64), count - np.where(returns, n_back[at], 0)


def ample_loads(carried: Sequence[Carriage], folding: Folding, ample: Bools) -> AmpleLoads:
    """Return what communications of each class put on the first link of each class of ``ample`` ones.

    Communications of a class may cross different numbers of ample links. But each ample link of a class is crossed by
    as many of them, so that the load of all on one link is told from the first.
    """
    class_of_first = np.full(len(ample), -1, dtype=np.int64)
    firsts = folding.loaded[folding.links.first]
    class_of_first[firsts] = np.where(ample[firsts], np.arange(len(firsts)), -1)
    loads: dict[tuple[int, int], dict[int, float]] = {}
    for one in carried:
        rows, columns = np.nonzero(class_of_first[one.links] >= 0)
        if not len(rows):
            continue
        crossed, phases, load = class_of_first[one.links[rows, columns]], one.phase[columns], one.load[columns]
        for routed in one.comms:
            comms = folding.comms.class_of[routed.alike.number[routed.rows[rows]]]
            entries = np.stack((comms, phases, crossed))
            kinds, entry = np.unique(entries, axis=1, return_inverse=True)
            sums = np.bincount(entry, load, kinds.shape[1])
            for comm, phase, link, total in zip(*kinds.tolist(), sums.tolist(), strict=True):
                on_links = loads.setdefault((comm, phase), {})
                on_links[link] = on_links.get(link, 0.0) + total
    return {key: tuple(on_links.items()) for key, on_links in loads.items()}
