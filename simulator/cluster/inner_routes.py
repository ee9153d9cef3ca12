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

    Of several such routes it is the one with the least time per byte. Links are duplex: who reaches a vertex is reached
    from it. A vertex with a single neighbour is thus a leaf, whose routes all go through this neighbour, both ways.
    Leaves of one neighbour need one search.
    """

    def __init__(self, edges: Sequence[Edge], kind: str) -> None:
        self._position = {(edge.src, edge.dst): i for i, edge in enumerate(edges) if edge.kind == kind}
        assert all((b, a) in self._position for a, b in self._position), "links of a node are duplex"
        slowest_Bps = min((edges[i].bandwidth_Bps for i in self._position.values()), default=1.0)
        costs: dict[str, dict[str, float]] = {}  # of the links from each vertex to its neighbours
        for (a, b), i in self._position.items():
            costs.setdefault(a, {})[b] = 1 + slowest_Bps / edges[i].bandwidth_Bps / (len(self._position) + 1)
        self._neighbour_of_leaf = {
            vertex: next(iter(neighbours))
            for vertex, neighbours in costs.items()
            if len(neighbours) == 1 and len(costs[next(iter(neighbours))]) > 1
        }
        self._costs = {
            vertex: {other: cost for other, cost in neighbours.items() if other not in self._neighbour_of_leaf}
            for vertex, neighbours in costs.items()
            if vertex not in self._neighbour_of_leaf
        }
        self._paths: dict[str, dict[str, tuple[str, ...]]] = {}

    def above(self, vertex: str) -> str:
        """Return the neighbour of a leaf; of any other vertex, the vertex itself."""
        return self._neighbour_of_leaf.get(vertex, vertex)

    def between(self, a: str, b: str) -> Route | None:
        """Return the route from ``a`` to ``b``; None where no links lead there."""
        if a == b:
            return () if self.above(a) in self._costs else None
        start, end = self.above(a), self.above(b)
        if start not in self._costs:
            return None
        if start not in self._paths:
            self._paths[start] = _cheapest_paths(self._costs, start)
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


def _cheapest_paths(costs: Mapping[str, Mapping[str, float]], start: str) -> dict[str, tuple[str, ...]]:
    """Return the cheapest path from ``start`` to each vertex that can be reached (Dijkstra 1959), nearest ones first.

    ``costs``: vertex -> next vertex -> cost of the link. Of equally cheap paths it is the one that was seen first.

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
        for neighbour, cost in costs[vertex].items():
            if neighbour not in cheapest or total + cost < cheapest[neighbour]:
                cheapest[neighbour] = total + cost
                reached[neighbour] = (*paths[vertex], neighbour)
                heappush(waiting, (total + cost, next(order), neighbour))
    return paths
