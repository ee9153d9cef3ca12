"""Groups whose end points sit alike on a cluster, and the links that they cross, by arithmetic on arrays.

Of groups that sit alike only the first needs to be routed. Each link that it crosses is a place: a position inside one
of its nodes, or the trunk above one of their NICs. The same places of another group are the links which that one
crosses.

Words for what is alike, from the description of a cluster to its colours::

    node 0          node 1          node 2 ...        one layout: what these nodes are inside
    [0 1 2 3]       [4 5 6 7]       [8 9 10 11]       GPUs by number; gpu 6 has slot 2 of node 1
       |               |                |             a port is a link of the layout at the same position in each

* A *layout* is shared by nodes that are alike inside, whatever an override scales and wherever they hang.
* A *make* (`ClusterColumns.node_makes`) is shared by nodes of a layout whose links are as fast.
* A *kind* (`ClusterColumns.node_kinds`) is shared by nodes of a make that hang on the same switches.
* A *way kind* (`ClusterColumns.way_kinds`) is shared by nodes that a hop leaves and enters alike: those of a layout,
  or of a kind where trunks are dead.
* A *place in the tree* (`NodePlaces`) says on which switches a node hangs, level by level.
* A *seat class* (here) is groups with equal slots in nodes of equal makes, which share switches alike.
* A *link place* (`LinkPlaces`) is a link as counted from one of a group's nodes.
* A *colour* (`folding`) is shared by what refinement cannot tell apart. Seats are the start, colours the proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from simulator.arrays import Ints, by_appearance, run_starts
from simulator.cluster import Cluster
from simulator.engine.colours import Colours, mixed


@dataclass(frozen=True, eq=False)
class SeatClass:
    """Groups that sit alike: their ``rows`` among all, and the ``nodes`` of each in the order of its end points.

    ``key`` is shared by all groups of a cluster that sit alike.
    """

    key: int
    rows: Ints
    nodes: Ints


def seat_classes(cluster: Cluster, parts: Sequence[Ints]) -> list[list[SeatClass]]:
    """Return the classes of groups that sit alike, of some parts each; a part has a row of end points per group.

    All groups have as many end points. Those of groups that sit alike have equal slots, in nodes of equal makes. Two
    nodes of the one group share switches at the levels at which the same two of the other do. Where trunks form no
    tree, their nodes hang on the same switches.
    """
    ends = np.concatenate(parts)
    n, size = ends.shape
    nodes, slots = cluster.located(ends)
    row = np.repeat(np.arange(n), size)
    place, first, start = _row_values(row, nodes.reshape(-1), n)
    distinct, column = nodes.reshape(-1)[first], np.tile(np.arange(size), n)
    key = np.add.reduceat(mixed(place, slots.reshape(-1), column), row_starts(n, size))
    at, row_of = np.arange(len(distinct)) - start[row[first]], row[first]
    places = cluster.node_places
    labels = (
        cluster.node_kind_column
        if places is None
        else cluster.node_makes * len(places.trunk_makes) + places.trunk_makes
    )
    key = key + np.add.reduceat(mixed(labels[distinct], at), start)
    for level, subtree in enumerate(() if places is None else places.subtrees):
        shared = _row_values(row_of, subtree[distinct], n).number
        key = key + np.add.reduceat(mixed(shared, at, np.full_like(at, level)), start)
    counts = np.diff(start, append=len(distinct))

    def classes(low: int, high: int) -> Iterator[SeatClass]:
        for rows in rows_by_colour(key[low:high]):
            first, width = low + int(rows[0]), int(counts[low + rows[0]])
            yield SeatClass(int(key[first]), rows, distinct[start[low + rows][:, None] + np.arange(width)])

    bounds = np.cumsum([0, *map(len, parts)]).tolist()
    return [list(classes(low, high)) for low, high in pairwise(bounds)]


def row_starts(n: int, size: int) -> Ints:
    """Return where each of ``n`` rows of equal size begins in a flat array."""
    return np.arange(n) * size


def rows_by_colour(colours: Colours) -> list[Ints]:
    """Return the rows of each colour, in order; colours come in the order of their first rows."""
    order = np.argsort(colours, kind="stable")
    cuts = run_starts(colours[order])[1:]
    return sorted(np.split(order, cuts), key=lambda rows: int(rows[0]))


class _RowValues(NamedTuple):
    """Different values of each row: the ``number`` of each entry in its row, by first appearance there.

    ``first``: the first entry of each value of each row. ``start``: where each row begins among these.
    """

    number: Ints
    first: Ints
    start: Ints


def _row_values(row: Ints, value: Ints, n_rows: int) -> _RowValues:
    """Number the values of each row; ``row`` is that of each entry, and ascends."""
    goes_on = row[1:] == row[:-1]
    is_short = ~goes_on[1:] | ~goes_on[:-1]  # no three entries in a row
    if is_short.all() or (~goes_on | (value[1:] >= value[:-1])).all():
        # Rows of two at most, and rows that ascend: equal values are neighbours.
        is_new = np.concatenate([row[:1] == row[:1], ~goes_on | (value[1:] != value[:-1])])
        first = np.flatnonzero(is_new)
        number = np.cumsum(is_new) - 1
    else:
        first, number = by_appearance(row * (int(value.max(initial=0)) + 1) + value)
    start = np.searchsorted(row[first], np.arange(n_rows))
    return _RowValues(number - start[row], first, start)


class LinkPlaces:
    """Links of a group as places in its nodes, so that groups which sit alike can be given theirs."""

    def __init__(self, cluster: Cluster, nodes: Ints, links: Ints) -> None:
        self._first = cluster.first_links
        n_inside = cluster.links.n_inside
        order = np.argsort(nodes, kind="stable")
        self._is_inside = links < n_inside
        node = np.searchsorted(self._first, np.where(self._is_inside, links, 0), side="right") - 1
        self._place = order[np.minimum(np.searchsorted(nodes[order], node), len(nodes) - 1)]
        self._offset = np.where(self._is_inside, links - self._first[node], links)
        self._trunks: Ints | None = None
        if cluster.node_places is not None and not self._is_inside.all():
            table = cluster.node_places.trunks
            self._trunks = table.reshape(len(table), -1)
            trunks, trunk_at = np.unique(self._trunks[nodes], return_index=True)
            outside = np.flatnonzero(~self._is_inside)
            in_table = trunk_at[np.searchsorted(trunks, links[outside])]
            self._place[outside], self._offset[outside] = np.divmod(in_table, self._trunks.shape[1])

    @property
    def key(self) -> tuple[bytes, bytes, bytes]:
        """A key that links of equal places share."""
        return self._is_inside.tobytes(), self._place.tobytes(), self._offset.tobytes()

    def on(self, nodes: Ints) -> Ints:
        """Return the links in these places for groups on other ``nodes``, a row each."""
        inside = self._is_inside
        links = np.empty((len(nodes), len(inside)), dtype=np.int64)
        links[:, inside] = self._first[nodes[:, self._place[inside]]] + self._offset[inside]
        if self._trunks is None:
            links[:, ~inside] = self._offset[~inside]
        else:
            links[:, ~inside] = self._trunks[nodes[:, self._place[~inside]], self._offset[~inside]]
        return links
