"""Folding: ranks, groups, links and communications that are in the same state at all times are simulated once.

Folding computes an equitable partition by colour refinement (Weisfeiler and Leman; see Berkholz, Bonsma and Grohe,
arXiv 1509.08251). Ranks of a colour play one role on equal GPUs and sit in groups of equal colours. Groups of a colour
have members of equal colours and make equal communications. Links of a colour are equal and carry equal
communications. By induction over instants everything of a colour is then in the same state at all times, as progressive
filling fills links of a colour together. So one rank per colour is simulated, and one link per colour with the load of
all.

What has the same neighbours from the start is refined as one: communications of a `Carriage`, and links that the same
communications load alike. Each keeps its own label for its class in the end.

Links that can never limit a transfer (`ample_links`) tell nothing apart. They have classes when all else has: those of
a class are crossed by as many communications of each colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.arrays import Bools, Floats, Ints, joined
from simulator.cluster import Cluster
from simulator.engine.carried import Carriage
from simulator.engine.colours import Classes, Colours, NeighbourColours, labelled, mixed, n_distinct
from simulator.engine.entries import Entries
from simulator.engine.link_facts import link_labels
from simulator.engine.placement import Placed
from simulator.program.seated_groups import SeatedGroups


@dataclass(frozen=True)
class RankNumbering:
    """Numbers of ranks and groups through all programs: ``first_rank[job]`` and ``first_group[job][axis]``."""

    first_rank: tuple[int, ...]
    first_group: tuple[dict[str, int], ...]
    n_ranks: int
    n_groups: int

    @classmethod
    def from_jobs(cls, jobs: Sequence[Placed]) -> RankNumbering:
        """Number the ranks and groups of ``jobs``, one after another."""
        first_rank: list[int] = []
        first_group: list[dict[str, int]] = []
        n_ranks = n_groups = 0
        for placed in jobs:
            first_rank.append(n_ranks)
            n_ranks += placed.program.n_ranks
            first_group.append({})
            for axis, groups in placed.program.groups.items():
                first_group[-1][axis] = n_groups
                n_groups += len(groups)
        return cls(tuple(first_rank), tuple(first_group), n_ranks, n_groups)


@dataclass(frozen=True)
class Folding:
    """Classes of ranks, groups, links and communications; each class is simulated once.

    Ranks and groups have the numbers of ``numbering``. ``loaded`` are the links that carry something, and ``links``
    their classes, in the same order. Background traffic follows the communications.
    """

    numbering: RankNumbering
    ranks: Classes
    groups: Classes
    loaded: Ints
    links: Classes
    comms: Classes


def fold(
    jobs: Sequence[Placed],
    cluster: Cluster,
    capacity: Floats,
    groups: Sequence[dict[str, SeatedGroups]],
    carried: Sequence[Carriage],
    entries: Entries,
    numbering: RankNumbering,
    ample: Bools,
    *,
    refine: bool = True,
) -> Folding:
    """Return the coarsest equitable partition; without ``refine`` every element is a class of its own.

    ``entries`` are those of what is ``carried``. ``ample``: whether each link of the cluster never limits a transfer.
    """
    is_loaded = np.zeros(len(cluster.links), dtype=bool)
    is_loaded[entries.link] = True
    loaded = np.flatnonzero(is_loaded)
    if not refine:
        n_comms = sum(len(one.labels) * len(one.groups) for one in carried)
        sizes = numbering.n_ranks, numbering.n_groups, len(loaded), n_comms
        ranks, group_classes, links, comms = map(Classes.each_alone, sizes)
        return Folding(numbering, ranks, group_classes, loaded, links, comms)
    labels = link_labels(cluster, capacity)[loaded]
    is_ample = ample[loaded]
    crossings = _CommCrossings(entries, loaded[~is_ample], labels[~is_ample], len(cluster.links))
    rank, group, row, bundle = _refined(jobs, cluster, groups, carried, numbering, crossings)
    link = np.empty(len(loaded), dtype=np.uint64)
    link[~is_ample] = mixed(bundle[crossings.bundle_of], labels[~is_ample])
    link[is_ample] = mixed(_around_ample(entries, row, ample)[loaded[is_ample]], labels[is_ample])
    return Folding(
        numbering,
        Classes.by(rank),
        Classes.by(group[: numbering.n_groups]),
        loaded,
        Classes.by(link),
        Classes.by(_comm_colours(carried, row)),
    )


class _CommCrossings:
    """Entries of rows of carriages that load bundles of links: ``load`` is a hash of load and phase of each entry.

    A bundle is links that the same rows load alike; ``labels`` of its links are its label. ``loaded``: all links of
    bundles, of ``n_links`` in the cluster.
    """

    def __init__(self, entries: Entries, loaded: Ints, labels: Colours, n_links: int) -> None:
        self.n_rows = len(entries.phases)
        # For each link the sum, over the entries that cross it, of the hash of their row times the hash of their load.
        # Links of equal sums are loaded alike by the same rows.
        signature = np.zeros(n_links, dtype=np.uint64)
        rows, loads = mixed(np.arange(self.n_rows)), mixed(entries.colour)
        np.add.at(signature, entries.link, rows[entries.row] * loads[entries.kind])
        bundles = Classes.by(signature[loaded])
        self.bundle_of, n_bundles = bundles.class_of, len(bundles.first)
        self.labels = np.zeros(n_bundles, dtype=np.uint64)
        np.add.at(self.labels, self.bundle_of, mixed(labels))
        bundle_at = np.full(len(signature), -1)
        bundle_at[loaded[bundles.first]] = np.arange(n_bundles)
        bundle = bundle_at[entries.link]
        there = np.flatnonzero(bundle >= 0)
        self.row, self.bundle, self.load = entries.row[there], bundle[there], entries.colour[entries.kind[there]]
        self._at_row, self._at_bundle = (
            NeighbourColours(self.row, self.n_rows),
            NeighbourColours(self.bundle, n_bundles),
        )

    def around_rows(self, bundle: Colours) -> Colours:
        """Return for each row a hash of the colours of what it crosses."""
        return self._at_row.sums(mixed(bundle[self.bundle], self.load))

    def around_bundles(self, row: Colours) -> Colours:
        """Return for each bundle a hash of the colours of what crosses it."""
        return self._at_bundle.sums(mixed(row[self.row], self.load))


def _around_ample(entries: Entries, row: Colours, ample: Bools) -> Colours:
    """Return for each link of the cluster, where it is ample, a hash of the colours of the rows that cross it."""
    around = np.zeros(len(ample), dtype=np.uint64)
    there = np.flatnonzero(ample[entries.link])
    np.add.at(around, entries.link[there], mixed(row[entries.row[there]], entries.colour[entries.kind[there]]))
    return around


def _refined(
    jobs: Sequence[Placed],
    cluster: Cluster,
    groups: Sequence[dict[str, SeatedGroups]],
    carried: Sequence[Carriage],
    numbering: RankNumbering,
    crossings: _CommCrossings,
) -> tuple[Colours, Colours, Colours, Colours]:
    """Return the colours of ranks, groups, rows of carriages and bundles of links."""
    memberships = _Memberships(groups, carried, numbering)
    rank = np.concatenate([mixed(placed.kind_numbers(cluster), np.array([job])) for job, placed in enumerate(jobs)])
    sizes = [
        mixed(axis_groups.size, np.array([job]), np.array([number]))
        for job, by_axis in enumerate(groups)
        for number, axis_groups in enumerate(by_axis.values())
    ]
    # Background traffic belongs to one group more, that of nobody.
    group = np.concatenate([*sizes, np.zeros(1, dtype=np.uint64)])
    labels: dict[object, int] = {}
    numbers = [tuple(sorted(labels.setdefault(label, len(labels)) for label in one.labels)) for one in carried]
    row = np.repeat(labelled(numbers), np.array([len(one.groups) for one in carried], dtype=np.int64))
    group_of_row = joined(one.groups for one in carried)
    at_group = NeighbourColours(group_of_row, len(group))
    bundle = crossings.labels

    count = -1
    while count != (count := sum(map(n_distinct, (rank, group, row, bundle)))):
        row = mixed(row, group[group_of_row], crossings.around_rows(bundle))
        bundle = mixed(bundle, crossings.around_bundles(row))
        group = mixed(group, memberships.around_groups(rank), at_group.sums(row))
        rank = mixed(rank, memberships.around_ranks(group))
    return rank, group, row, bundle


class _Memberships:
    """Members of groups: ranks at their positions.

    Positions count where somebody names a peer by its position; elsewhere they are 0, as members are alike.
    """

    def __init__(
        self, groups: Sequence[dict[str, SeatedGroups]], carried: Sequence[Carriage], numbering: RankNumbering
    ) -> None:
        sends = {
            (one.alike.job, one.alike.axis)
            for carriage in carried
            for one in carriage.comms
            if one.alike.spec[0] == "send"
        }
        ranks, numbers, positions = [], [], []
        for job, by_axis in enumerate(groups):
            for axis, axis_groups in by_axis.items():
                places = axis_groups.position_of[axis_groups.members]
                ranks.append(axis_groups.members + numbering.first_rank[job])
                numbers.append(axis_groups.group_of[axis_groups.members] + numbering.first_group[job][axis])
                positions.append(places if (job, axis) in sends else np.zeros_like(places))
        self._rank, self._group, self._position = joined(ranks), joined(numbers), joined(positions)
        self._at_rank = NeighbourColours(self._rank, numbering.n_ranks)
        self._at_group = NeighbourColours(self._group, numbering.n_groups + 1)

    def around_groups(self, rank: Colours) -> Colours:
        """Return for each group a hash of the colours of its members."""
        return self._at_group.sums(mixed(rank[self._rank], self._position))

    def around_ranks(self, group: Colours) -> Colours:
        """Return for each rank a hash of the colours of its groups."""
        return self._at_rank.sums(mixed(group[self._group], self._position))


def _comm_colours(carried: Sequence[Carriage], row: Colours) -> Colours:
    """Return the colours of all communications by their numbers, then those of background traffic."""
    labels: dict[object, int] = {}
    numbers, rows, label_of_row = list[Ints](), list[Ints](), list[int]()
    background = [np.zeros(0, dtype=np.int64)]
    starts = np.cumsum([0, *[len(one.groups) for one in carried]])
    for one, start, end in zip(carried, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        here = np.arange(start, end)
        if not one.comms:
            background.append(here)
        for routed in one.comms:
            numbers.append(routed.alike.number[routed.rows])
            rows.append(here)
            label_of_row.append(labels.setdefault(routed.label, len(labels)))
    by_number = np.empty(sum(map(len, rows)), dtype=np.uint64)
    label = np.repeat(np.array(label_of_row, dtype=np.int64), list(map(len, rows)))
    by_number[joined(numbers)] = mixed(row[joined(rows)], label)
    return np.concatenate([by_number, row[np.concatenate(background)]])
