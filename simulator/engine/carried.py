"""The links that communications cross: one group of each class that sits alike is routed, the others follow.

Communications of one group that load the same links alike, such as all-gathers and reduce-scatters of any size, are one
`Carriage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.cluster import Cluster
from simulator.engine.group_comms import AlikeComms, GroupComm
from simulator.engine.placement import Placed
from simulator.engine.seats import LinkPlaces, SeatClass, seat_classes
from simulator.network.collectives import choose
from simulator.network.pattern import Pattern
from simulator.program import HostOperation, PointToPoint


@dataclass(frozen=True, eq=False)
class RoutedComms:
    """Communications of one kind whose groups sit alike: ``rows`` of ``alike``, on ``nodes``.

    ``pattern`` is that of the first of them; None for sends and where nothing moves. ``places`` are the links that each
    loads, ``phase`` and ``load`` are of every link; none for signals. ``label``: what they share before refinement.
    """

    alike: AlikeComms
    rows: Ints
    nodes: Ints
    pattern: Pattern | None
    places: LinkPlaces | None
    phase: Ints
    load: Floats
    label: object

    @cached_property
    def _place_of(self) -> dict[int, int]:
        return {row: place for place, row in enumerate(self.rows.tolist())}

    def pattern_of(self, row: int) -> Pattern | None:
        """Return the pattern of a row of ``alike``: that of the first, on links of its own."""
        place = self._place_of[row]
        if self.pattern is None or place == 0 or self.places is None:
            return self.pattern
        links = self.places.on(self.nodes[place : place + 1])[0]
        cuts = np.cumsum([len(stage.links) for stage in self.pattern.stages])[:-1]
        stages = zip(self.pattern.stages, np.split(links, cuts), strict=True)
        return replace(self.pattern, stages=tuple([replace(stage, links=on) for stage, on in stages]))


def routed_comms(jobs: Sequence[Placed], cluster: Cluster, comms: Sequence[AlikeComms]) -> list[RoutedComms]:
    """Return all communications with the links that they load.

    Of groups that sit alike the first has all of its patterns worked out, and all follow its fastest. Alike collectives
    of alike groups follow patterns of one number among those that are possible.
    """
    numbers: dict[object, int] = {}
    seats: dict[object, list[SeatClass]] = {}
    routed = []
    for alike in comms:
        key = alike.ends.shape, alike.ends.tobytes()
        if key not in seats:
            seats[key] = seat_classes(cluster, alike.ends)
        routed += [_routed(jobs, cluster, alike, one, numbers) for one in seats[key]]
    return routed


def _routed(
    jobs: Sequence[Placed], cluster: Cluster, alike: AlikeComms, seats: SeatClass, numbers: dict[object, int]
) -> RoutedComms:
    first = alike.one(int(seats.rows[0]))
    label: tuple[object, ...] = (alike.job, alike.axis, alike.spec)
    pattern, loads = None, list[tuple[Ints, Floats]]()
    if first.op == "send":
        links, shares = zip(*cluster.spread(*first.ends), strict=True)
        loads = [(np.array(links, dtype=np.int64), np.array(shares, dtype=float))]
    elif len(first.ends) > 1:
        pattern = _chosen(jobs, cluster, first, numbers)
        label = (*label, pattern.timing if pattern else ())
        if pattern is not None and not first.is_signal:
            loads = [(stage.links, stage.load) for stage in pattern.stages]
    places = LinkPlaces(cluster, seats.nodes[0], np.concatenate([links for links, _ in loads])) if loads else None
    phase = np.repeat(np.arange(len(loads)), [len(links) for links, _ in loads])
    load = np.concatenate([np.zeros(0), *[load for _, load in loads]])
    return RoutedComms(alike, seats.rows, seats.nodes, pattern, places, phase, load, label)


def _chosen(
    jobs: Sequence[Placed], cluster: Cluster, item: GroupComm, numbers: dict[object, int]
) -> Pattern | None:
    """Return the fastest pattern of a communication; ``numbers``: that of the fastest one by what patterns take."""
    candidates = item.patterns(cluster)
    if not candidates:
        return None
    costs = item.costs(jobs, cluster)
    key = (item.op, item.comm.nbytes, tuple([pattern.timing for pattern in candidates]), costs.gpu)
    if key not in numbers:
        fastest = choose(item.op, candidates, item.comm.nbytes, costs)
        numbers[key] = next(number for number, pattern in enumerate(candidates) if pattern is fastest)
    return candidates[numbers[key]]


@dataclass(frozen=True, eq=False)
class Carriage:
    """Communications of the same groups that load the same links alike: a row of ``links`` for each of ``groups``.

    ``phase`` and ``load`` are of each link of a row, and ``labels`` of each of its ``comms``. Groups are numbered
    through all programs; background traffic has the number after the last.
    """

    groups: Ints
    links: Ints
    phase: Ints
    load: Floats
    comms: tuple[RoutedComms, ...]
    labels: tuple[object, ...]


def carriages(
    cluster: Cluster, routed: Sequence[RoutedComms], first_group: Sequence[dict[str, int]], n_groups: int
) -> list[Carriage]:
    """Return what ``routed`` communications and the background traffic put on links."""
    together: dict[object, list[RoutedComms]] = {}
    for one in routed:
        alike = one.alike
        who: object = alike.spec[1:3] if isinstance(alike.comm, PointToPoint) else ""
        who = alike.comm.op if isinstance(alike.comm, HostOperation) else who
        where = one.places and (one.places.key, one.phase.tobytes(), np.round(one.load, 12).tobytes())
        key = alike.job, alike.axis, alike.groups[one.rows].tobytes(), who, where
        together.setdefault(key, []).append(one)
    carried = []
    for comms in together.values():
        first = comms[0]
        groups = first.alike.groups[first.rows] + first_group[first.alike.job][first.alike.axis]
        links = first.places.on(first.nodes) if first.places else np.zeros((len(groups), 0), dtype=np.int64)
        labels = tuple([one.label for one in comms])
        carried.append(Carriage(groups, links, first.phase, first.load, tuple(comms), labels))
    for flow in cluster.background:
        links, load = np.array([[link for link, _ in flow.loads]]), np.array([load for _, load in flow.loads])
        phase, label = np.zeros(len(load), dtype=np.int64), ("background", flow.rate_Bps)
        carried.append(Carriage(np.array([n_groups]), links, phase, load, (), (label,)))
    return carried
