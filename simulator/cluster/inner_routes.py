"""Routes inside a node over links of one kind, each worked out when somebody asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import count, pairwise

from simulator.cluster.wires import Edge
from simulator.errors import InputError

#: Positions of links among the edges of a node.
Route = tuple[int, ...]


class NoWayError(InputError):
    """Dead links leave no way between two parts of a node."""


class InnerRoutes:
    """Routes of fewest links over ``edges`` of one ``kind``.

    Of several such routes it is the one with the least time per byte. A vertex with a single neighbour is a leaf. All
    routes of a leaf go through its neighbour, so that leaves of one neighbour need one search.
    """

    def __init__(self, edges: Sequence[Edge], kind: str) -> None:
        self._position = {(edge.src, edge.dst): i for i, edge in enumerate(edges) if edge.kind == kind}
        slowest_Bps = min((edges[i].bandwidth_Bps for i in self._position.values()), default=1.0)
        leaving: dict[str, dict[str, float]] = {}
        for (a, b), i in self._position.items():
            leaving.setdefault(a, {})[b] = 1 + slowest_Bps / edges[i].bandwidth_Bps / (len(self._position) + 1)
            leaving.setdefault(b, {})
        self._above = {
            vertex: next(iter(following))
            for vertex, following in leaving.items()
            if len(following) == 1 and len(leaving[next(iter(following))]) > 1
        }
        self._leaving = {
            vertex: {other: cost for other, cost in following.items() if other not in self._above}
            for vertex, following in leaving.items()
            if vertex not in self._above
        }
        self._paths: dict[str, dict[str, tuple[str, ...]]] = {}

    def above(self, vertex: str) -> str:
        """Return the neighbour of a leaf; of any other vertex, the vertex itself."""
        return self._above.get(vertex, vertex)

    def between(self, a: str, b: str) -> Route | None:
        """Return the route from ``a`` to ``b``; None where no links lead there."""
        if a == b:
            return () if a in self._above or a in self._leaving else None
        start, end = self.above(a), self.above(b)
        if start not in self._leaving:
            return None
        if start not in self._paths:
            self._paths[start] = _cheapest_paths(self._leaving, start)
        path = self._paths[start].get(end)
        if path is None:
            return None
        whole = (*((a,) if a != start else ()), *path, *((b,) if b != end else ()))
        return tuple([self._position[hop] for hop in pairwise(whole)])

    def __getitem__(self, ends: tuple[str, str]) -> Route:
        """Return the route between two vertices. Raises `NoWayError` where there is none."""
        route = self.between(*ends)
        if route is None:
            raise NoWayError(f"dead links leave no way from {ends[0]} to {ends[1]}")
        return route


def _cheapest_paths(leaving: Mapping[str, Mapping[str, float]], start: str) -> dict[str, tuple[str, ...]]:
    """Return the cheapest path from ``start`` to each vertex that can be reached (Dijkstra 1959), nearest ones first.

    ``leaving``: vertex -> next vertex -> cost of the edge. Of equally cheap paths it is the one that was seen first.

    >>> _cheapest_paths({"a": {"b": 1.0, "c": 5.0}, "b": {"c": 1.0}, "c": {}, "d": {"a": 1.0}}, "a")
    {'a': ('a',), 'b': ('a', 'b'), 'c': ('a', 'b', 'c')}
    """
    cheapest = {start: 0.0}
    reached: dict[str, tuple[str, ...]] = {start: (start,)}
    paths: dict[str, tuple[str, ...]] = {}
    order = count()  # equally near vertices come in the order in which they were reached
    waiting = [(0.0, next(order), start)]
    while waiting:
        total, _, vertex = heappop(waiting)
        if vertex in paths:
            continue
        paths[vertex] = reached[vertex]
        for following, cost in leaving[vertex].items():
            if following not in cheapest or total + cost < cheapest[following]:
                cheapest[following] = total + cost
                reached[following] = (*paths[vertex], following)
                heappush(waiting, (total + cost, next(order), following))
    return paths
