"""The groups of an axis as arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.arrays import Ints


@dataclass(frozen=True, eq=False)
class SeatedGroups:
    """The groups of an axis as arrays: group g has ``size[g]`` of ``members``, from ``start[g]`` on.

    ``group_of`` and ``position_of`` are of every rank; -1 where it has no group.
    """

    size: Ints
    start: Ints
    members: Ints
    group_of: Ints
    position_of: Ints

    @classmethod
    def from_groups(cls, groups: Sequence[Sequence[int]], n_ranks: int) -> SeatedGroups:
        """Return the arrays of disjoint groups of ranks."""
        size = np.fromiter(map(len, groups), dtype=np.int64, count=len(groups))
        start = np.cumsum(size) - size
        members = np.fromiter(itertools.chain.from_iterable(groups), dtype=np.int64, count=int(size.sum()))
        group_of, position_of = np.full((2, n_ranks), -1, dtype=np.int64)
        group_of[members] = np.repeat(np.arange(len(groups)), size)
        position_of[members] = np.arange(len(members)) - np.repeat(start, size)
        return cls(size, start, members, group_of, position_of)

    def ranks(self, groups: Ints) -> Ints:
        """Return the members of these groups of one size, a row each."""
        return self.members[self.start[groups][:, None] + np.arange(self.size[groups[0]])]
