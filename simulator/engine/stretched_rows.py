"""Rows of spans that did not run straight through, all of a play in two columns."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from simulator.arrays import Floats, Ints


class StretchedRows:
    """Starts and ends (s) of the rows of stretched spans, of ``n_spans`` in all.

    ``stretched``: index of a span -> start and end of each of its rows. ``n_rows``: of every span; 0 of all others.
    """

    def __init__(self, stretched: Mapping[int, tuple[Floats, Floats]], n_spans: int) -> None:
        span = np.fromiter(stretched, np.int64, len(stretched))
        n_rows = np.fromiter([len(start_s) for start_s, _ in stretched.values()], np.int64, len(stretched))
        self.n_rows, self._first = np.zeros((2, n_spans), np.int64)
        self.n_rows[span], self._first[span] = n_rows, np.cumsum(n_rows) - n_rows
        nothing = [np.zeros(0)]
        self._times_s = [np.concatenate([*column, *nothing]) for column in zip(*stretched.values(), strict=True)]

    def are_repeated(self, before: Ints, after: Ints, length_s: float, tolerance_s: float) -> bool:
        """Return whether rows of spans ``before`` come again in those ``after``, pair by pair, ``length_s`` later.

        Of two that are equally long, one alone is stretched where a rounding decides.
        """
        both = (self.n_rows[before] > 0) & (self.n_rows[after] > 0)
        at, again = self._rows_of(before[both]), self._rows_of(after[both])
        return not any((np.abs(column[again] - column[at] - length_s) > tolerance_s).any() for column in self._times_s)

    def moved(self, span: Ints, later_s: Floats) -> dict[int, tuple[Floats, Floats]]:
        """Return by place the rows of those of ``span`` that are stretched, each so many seconds later."""
        place = np.flatnonzero(self.n_rows[span] > 0)
        if not len(place):
            return {}
        n_rows = self.n_rows[span[place]]
        rows, rows_later_s = self._rows_of(span[place]), np.repeat(later_s[place], n_rows)
        start_s, end_s = (column[rows] + rows_later_s for column in self._times_s)
        cuts = pairwise([0, *np.cumsum(n_rows).tolist()])
        return {at: (start_s[low:high], end_s[low:high]) for at, (low, high) in zip(place.tolist(), cuts, strict=True)}

    def _rows_of(self, span: Ints) -> Ints:
        """Return where the rows of each span are, one span after another."""
        n_rows = self.n_rows[span]
        behind = np.cumsum(n_rows)
        rows: Ints = np.arange(int(n_rows.sum())) + np.repeat(self._first[span] - (behind - n_rows), n_rows)
        return rows
