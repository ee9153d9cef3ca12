"""Entries of carriages: each is a link that a row loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.arrays import Floats, Ints, joined
from simulator.engine.carried import Carriage
from simulator.engine.colours import Colours


@dataclass(frozen=True, eq=False)
class Entries:
    """Links that rows of carriages load: the number of its ``row``, its ``link`` and the place of its ``kind``, each.

    Rows are numbered through all carriages; ``phases`` are how many phases each has. Entries of one kind, which are at
    one place of their carriage, have the same phase, load, and hash of both: ``phase``, ``load``, ``colour`` of kinds.
    """

    row: Ints
    link: Ints
    kind: Ints
    phases: Ints
    phase: Ints
    load: Floats
    colour: Colours

    @classmethod
    def from_carriages(cls, carried: Sequence[Carriage]) -> Entries:
        """Return all entries, carriage by carriage and row by row."""
        sizes = [(*one.links.shape, int(one.phase.max(initial=0)) + 1) for one in carried]
        n_rows, widths, n_phases = np.array(sizes, dtype=np.int64).reshape(-1, 3).T
        width, first_kind = np.repeat(widths, n_rows), np.repeat(np.cumsum(widths) - widths, n_rows)
        row = np.repeat(np.arange(len(width)), width)
        place = np.arange(len(row)) - np.repeat(np.cumsum(width) - width, width)
        return cls(
            row,
            joined(one.links.reshape(-1) for one in carried),
            first_kind[row] + place,
            np.repeat(n_phases, n_rows),
            joined(one.phase for one in carried),
            np.concatenate([np.zeros(0), *[one.load for one in carried]]),
            np.concatenate([np.zeros(0, dtype=np.uint64), *[one.load_colours for one in carried]]),
        )
