"""The links that communications cross: one group of each class that sits alike is routed, the others follow.

Communications of one group that load the same links alike, such as all-gathers and reduce-scatters of any size, are one
`Carriage`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.cluster import Cluster
from simulator.engine.colours import Colours, mixed
from simulator.engine.group_comms import AlikeComms, algorithm_of, alike_comms, shares_of
from simulator.engine.placement import Placed
from simulator.engine.seats import LinkPlaces, SeatClass, seat_classes
from simulator.network.collectives import choose
from simulator.network.pattern import Pattern
from simulator.program import HostOperation, PointToPoint


@dataclass(frozen=True, eq=False)
class CommRoute:
    """A pattern, and the ``places`` of its links in the nodes of any group that sits alike.

    ``phase`` and ``load`` are of each of the links: the number of its leg, and its load there. A leg and the phase that
    it becomes have the same number. ``_latest``: nodes of the group that was asked for last -> its pattern.
    """

    pattern: Pattern
    places: LinkPlaces
    phase: Ints
    load: Floats
    _latest: dict[bytes, Pattern] = field(default_factory=dict, init=False)

    @classmethod
    def from_group(cls, pattern: Pattern, cluster: Cluster, nodes: Ints) -> CommRoute:
        """Return the route of a group on ``nodes``, from its pattern."""
        legs = pattern.legs
        places = LinkPlaces(cluster, nodes, np.concatenate([leg.links for leg in legs]))
        phase = np.repeat(np.arange(len(legs)), [len(leg.links) for leg in legs])
        return cls(pattern, places, phase, np.concatenate([leg.load for leg in legs]))

    @cached_property
    def key(self) -> tuple[object, ...]:
        """A key that routes share which load the same links alike."""
        return self.places.key, self.phase.tobytes(), np.round(self.load, 12).tobytes()

    @cached_property
    def load_colours(self) -> Colours:
        """A hash of load and phase of each link."""
        return _load_colours(self.load, self.phase)

    def pattern_on(self, nodes: Ints) -> Pattern:
        """Return the pattern of a group on other nodes, which sits alike; the latest one is kept."""
        key = nodes.tobytes()
        if key not in self._latest:
            self._latest.clear()
            self._latest[key] = self._on(nodes)
        return self._latest[key]

    def _on(self, nodes: Ints) -> Pattern:
        cuts = np.cumsum([len(leg.links) for leg in self.pattern.legs])[:-1]
        legs = zip(self.pattern.legs, np.split(self.places.on(nodes[None])[0], cuts), strict=True)
        return replace(self.pattern, legs=tuple([replace(leg, links=links) for leg, links in legs]))


@dataclass(frozen=True, eq=False)
class RoutedComms:
    """Communications of one kind whose groups sit alike: those ``seats`` of ``alike``.

    ``route``: None where nothing moves. ``label``: what they share before refinement. A signal loads no link.
    """

    alike: AlikeComms
    seats: SeatClass
    route: CommRoute | None
    label: object

    @property
    def rows(self) -> Ints:
        """Their rows of ``alike``."""
        return self.seats.rows

    @property
    def nodes(self) -> Ints:
        """The nodes of each, a row each."""
        return self.seats.nodes

    @property
    def loads_links(self) -> bool:
        """True where they take a share of links."""
        return self.route is not None and not self.alike.is_signal

    def pattern(self, place: int) -> Pattern | None:
        """Return the pattern of the communication in one of ``rows``."""
        if self.route is None:
            return None
        return self.route.pattern_on(self.nodes[place]) if self.loads_links else self.route.pattern


def routed_comms(jobs: Sequence[Placed], cluster: Cluster, comms: Sequence[AlikeComms]) -> list[RoutedComms]:
    """Return all communications with the links that they load.

    Of groups that sit alike the first has all of its patterns worked out, and all follow its fastest. Alike collectives
    of alike groups follow patterns of one number among those that are possible. The cluster keeps routes for other
    programs on it.
    """
    numbers: dict[object, int] = {}
    routed = []
    for alike, classes in zip(comms, _seat_classes(cluster, [alike.ends for alike in comms]), strict=True):
        for one in classes:
            route = _route(jobs, cluster, alike, one, numbers)
            label = alike.job, alike.axis, alike.spec, route.pattern.timing if route else ()
            routed.append(RoutedComms(alike, one, route, label))
    return routed


def check_routes(placed: Placed, cluster: Cluster) -> None:
    """Raise `InputError` where a group of a program's ranks cannot perform its communication as the program says."""
    groups = {axis: placed.program.seated(axis) for axis in placed.program.groups}
    routed_comms([placed], cluster, alike_comms([placed], cluster, [groups]))


def _seat_classes(cluster: Cluster, each: Sequence[Ints]) -> list[list[SeatClass]]:
    """Return the `seat_classes` of parts, which the cluster keeps for other programs with the same groups."""
    keys = [("seat classes", ends.shape, hashlib.blake2b(np.ascontiguousarray(ends).data).digest()) for ends in each]
    new: dict[int, dict[object, Ints]] = {}  # by number of end points
    for key, ends in zip(keys, each, strict=True):
        if key not in cluster.memo:
            new.setdefault(ends.shape[1], {})[key] = ends
    for parts in new.values():
        cluster.memo.update(zip(parts, seat_classes(cluster, list(parts.values())), strict=True))
    return [cluster.memo[key] for key in keys]


def _route(
    jobs: Sequence[Placed], cluster: Cluster, alike: AlikeComms, seats: SeatClass, numbers: dict[object, int]
) -> CommRoute | None:
    """Return the route of the fastest pattern; ``numbers``: that of the fastest one by what all patterns take."""
    key = "routes", alike.op, algorithm_of(alike.comm), shares_of(alike.comm), seats.key
    routes: dict[int, CommRoute] | None
    candidates, routes = cluster.memo.get(key, ((), None))
    if routes is None:
        routes = {}
        candidates = alike.one(int(seats.rows[0])).patterns(cluster)
        cluster.memo[key] = candidates, routes
    if not candidates:
        return None
    number = 0
    if len(candidates) > 1:
        costs = alike.one(int(seats.rows[0])).costs(jobs, cluster)
        timings = alike.op, alike.comm.nbytes, tuple([pattern.timing for pattern in candidates]), costs.gpu
        if timings not in numbers:
            fastest = choose(alike.op, candidates, alike.comm.nbytes, costs)
            numbers[timings] = next(at for at, pattern in enumerate(candidates) if pattern is fastest)
        number = numbers[timings]
    if number not in routes:
        routes[number] = CommRoute.from_group(candidates[number], cluster, seats.nodes[0])
    return routes[number]


@dataclass(frozen=True, eq=False)
class Carriage:
    """Communications of the same groups that load the same links alike: a row of ``links`` for each of ``groups``.

    ``phase``, ``load`` and ``load_colours``, a hash of both, are of each link of a row, and ``labels`` of each of its
    ``comms``. Groups are numbered through all programs; background traffic has the number after the last.
    """

    groups: Ints
    links: Ints
    phase: Ints
    load: Floats
    load_colours: Colours
    comms: tuple[RoutedComms, ...]
    labels: tuple[object, ...]


def _load_colours(load: Floats, phase: Ints) -> Colours:
    return mixed(np.round(load, 12).view(np.uint64), phase)


def carriages(
    cluster: Cluster, routed: Sequence[RoutedComms], first_group: Sequence[dict[str, int]], n_groups: int
) -> list[Carriage]:
    """Return what ``routed`` communications and the background traffic put on links."""
    together: dict[object, list[RoutedComms]] = {}
    for one in routed:
        alike = one.alike
        who: object = alike.spec[1:3] if isinstance(alike.comm, PointToPoint) else ""
        who = alike.comm.op if isinstance(alike.comm, HostOperation) else who
        where = one.route.key if one.route and one.loads_links else None
        key = alike.job, alike.axis, alike.groups[one.rows].tobytes(), who, where
        together.setdefault(key, []).append(one)
    carried = []
    for comms in together.values():
        first = comms[0]
        groups = first.alike.groups[first.rows] + first_group[first.alike.job][first.alike.axis]
        labels = tuple([one.label for one in comms])
        links, phase, load = np.zeros((len(groups), 0), dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0)
        colours = np.zeros(0, dtype=np.uint64)
        if (route := first.route) and first.loads_links:
            links, phase, load, colours = route.places.on(first.nodes), route.phase, route.load, route.load_colours
        carried.append(Carriage(groups, links, phase, load, colours, tuple(comms), labels))
    for flow in cluster.background:
        links, load = np.array([[link for link, _ in flow.loads]]), np.array([load for _, load in flow.loads])
        phase, label = np.zeros(len(load), dtype=np.int64), ("background", flow.rate_Bps)
        colours = _load_colours(load, phase)
        carried.append(Carriage(np.array([n_groups]), links, phase, load, colours, (), (label,)))
    return carried
