"""Links that can limit a communication, told from those that never do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from simulator.arrays import Bools, Floats, Ints, distinct, run_starts
from simulator.cluster import Cluster
from simulator.engine.entries import Entries
from simulator.engine.folding import Folding
from simulator.engine.link_facts import link_labels


def binding_classes(cluster: Cluster, capacity: Floats, entries: Entries, folding: Folding, ample: Bools) -> list[bool]:
    """Tell for each class of links whether one of them can ever limit a communication; ``ample`` ones cannot.

    A link cannot where everything that crosses it comes in over neighbours that together carry no more than it can. The
    same holds of neighbours over which everything goes on. An example are the uplinks of a leaf switch without
    oversubscription. Such a link rests on these neighbours, which must have another label: of two alike links that
    everything crosses, both bind. Links of a class have alike neighbours, so that its first one decides.
    """
    firsts = folding.loaded[folding.links.first]
    class_of = np.zeros(len(capacity), dtype=np.int64)
    class_of[folding.loaded] = folding.links.class_of
    is_first = np.zeros(len(capacity), dtype=bool)
    is_first[firsts] = ~ample[firsts]
    src, dst = cluster.link_ends
    loads, label = _loads_on(is_first, _nearby(is_first, src, dst), entries), link_labels(cluster, capacity)
    label_of_class = label[firsts]
    options: dict[int, list[set[int]]] = {}  # of each class the sets of classes on which it may rest
    for near_end, far_end in ((src, dst), (dst, src)):
        link, neighbour = _neighbours(loads, is_first, near_end, far_end)
        room = np.bincount(link, weights=capacity[neighbour], minlength=len(capacity))
        enough = is_first & (room <= capacity * (1 + 1e-12))
        starts = run_starts(link)
        for low, high in pairwise([*starts.tolist(), len(link)]):
            first, neighbours = int(link[low]), neighbour[low:high]
            if enough[first] and not (label[neighbours] == label[first]).any():
                options.setdefault(int(class_of[first]), []).append(set(class_of[neighbours].tolist()))
    earliest = {label_of_class[one]: int(np.argmax(label == label_of_class[one])) for one in options}
    ranks = {one: (-capacity[firsts[one]], earliest[label_of_class[one]]) for one in options}
    resting = _resting(options, ranks)
    return [number not in resting and not ample[link] for number, link in enumerate(firsts.tolist())]


def _resting(options: Mapping[int, Sequence[set[int]]], ranks: Mapping[int, tuple[float, int]]) -> set[int]:
    """Return the classes of links that rest on others, so that none rests on itself, directly or not.

    ``options``: of each class the sets of classes on which it may rest. Where classes could rest on each other only,
    those of the last of ``ranks`` bind.
    """
    resting: set[int] = set()
    undecided = set(options)
    while undecided:
        more = {one for one in undecided if any(undecided.isdisjoint(option) for option in options[one])}
        resting |= more
        last = max(ranks[one] for one in undecided)
        undecided -= more or {one for one in undecided if ranks[one] == last}
    return resting


class _Loads(NamedTuple):
    """Loads of phases of communications: entry i puts ``load[i]`` on ``link[i]`` in phase ``phase[i]``."""

    phase: Ints
    link: Ints
    load: Floats


def _nearby(is_first: Bools, src: Ints, dst: Ints) -> Bools:
    """Tell which links are the first of a class, or lead to where one begins, or on from where one ends."""
    begins, ends = np.zeros((2, int(max(src.max(), dst.max())) + 1), dtype=bool)
    begins[src[is_first]] = ends[dst[is_first]] = True
    nearby: Bools = is_first | begins[dst] | ends[src]
    return nearby


def _loads_on(is_first: Bools, nearby: Bools, entries: Entries) -> _Loads:
    """Return the loads on ``nearby`` links of the communications that cross the first link of a class.

    Phases are numbered through.
    """
    crosses = np.zeros(len(entries.phases), dtype=bool)
    crosses[entries.row[is_first[entries.link]]] = True
    n_phases = np.where(crosses, entries.phases, 0)
    there = np.flatnonzero(crosses[entries.row] & nearby[entries.link])
    row, kind = entries.row[there], entries.kind[there]
    phase = (np.cumsum(n_phases) - n_phases)[row] + entries.phase[kind]
    return _Loads(phase, entries.link[there], entries.load[kind])


def _neighbours(loads: _Loads, is_first: Bools, near_end: Ints, far_end: Ints) -> tuple[Ints, Ints]:
    """Return sorted pairs of the first link of a class and a neighbour at its ``near_end`` that carries the same phase.

    The vertex ``near_end[link]`` is ``far_end[neighbour]``. A link where a phase begins or ends has no pairs: the phase
    loads it more than all of those neighbours.
    """
    n_links, n_vertices = len(near_end), int(max(near_end.max(), far_end.max())) + 1
    far = loads.phase * n_vertices + far_end[loads.link]
    order = np.argsort(far, kind="stable")
    firsts = np.flatnonzero(is_first[loads.link])
    links, load = loads.link[firsts], loads.load[firsts]
    near = loads.phase[firsts] * n_vertices + near_end[links]
    low, high = (np.searchsorted(far[order], near, side) for side in ("left", "right"))
    count = high - low
    entry = np.repeat(np.arange(len(links)), count)
    neighbour = order[np.arange(len(entry)) - np.repeat(np.cumsum(count) - count - low, count)]
    load_before = np.bincount(entry, weights=loads.load[neighbour], minlength=len(links))
    begins = np.zeros(n_links, dtype=bool)
    begins[links[load_before < load * (1 - 1e-12)]] = True
    pairs = distinct(links[entry] * n_links + loads.link[neighbour])
    link, other = np.divmod(pairs, n_links)
    return link[~begins[link]], other[~begins[link]]
