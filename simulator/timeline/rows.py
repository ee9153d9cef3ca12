"""Rows of a Timeline: one per kernel and communication, expanded from its spans column by column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Floats, Ints
from simulator.timeline.template import CATEGORIES, Template, row_counts

if TYPE_CHECKING:
    import pandas as pd

#: Columns that a row has from its span.
_SPAN_COLUMNS = ("rank", "stage", "chunk", "microbatch")
#: Columns of texts, of which a Timeline has few distinct ones: name -> field of `Template`.
_TEXT_COLUMNS = {"name": "names", "kind": "kinds", "phase": "phases"}
#: Columns of a DataFrame, in their order.
_FRAME_COLUMNS = (
    *("rank", "lane", "name", "kind", "category", "phase", "stage", "chunk", "microbatch"),
    *("posted_s", "start_s", "end_s", "nbytes", "flops"),
)


class ExpandableSpans(Protocol):
    """Columns of spans, as in `Timeline`, that rows are expanded from."""

    @property
    def templates(self) -> tuple[Template, ...]: ...
    @property
    def lane_names(self) -> tuple[str, ...]: ...
    @property
    def rank(self) -> Ints: ...
    @property
    def stage(self) -> Ints: ...
    @property
    def chunk(self) -> Ints: ...
    @property
    def microbatch(self) -> Ints: ...
    @property
    def template(self) -> Ints: ...
    @property
    def posted_s(self) -> Floats: ...
    @property
    def start_s(self) -> Floats: ...
    @property
    def end_s(self) -> Floats: ...
    @property
    def stretched(self) -> Mapping[int, tuple[Floats, Floats]]: ...


class _Texts:
    """Texts of all ops of all templates: ``codes`` (one per op) index ``values``, the distinct texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        numbers: dict[str, int] = {}
        self.codes = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int32)
        self.values = list(numbers)


class TimelineRows:
    """Rows of ``spans``, in their order; ``rows["name"]`` is a column, made when it is asked for.

    ``span``: index of the row's span. ``rank``, ``stage``, ``chunk``, ``microbatch``: as in `Timeline`.
    ``lane`` and ``category``: codes that index ``spans.lane_names`` and `CATEGORIES`.
    ``name``, ``kind``, ``phase``: texts of the kernel or communication.
    ``posted_s``, ``start_s``, ``end_s``: seconds from the Timeline's start. ``nbytes``: bytes that a kernel moves or a
    GPU sends. ``flops``: floating-point operations.
    """

    def __init__(self, spans: ExpandableSpans) -> None:
        self._spans = spans
        counts = row_counts(spans.templates)
        first_op = np.cumsum(counts) - counts
        self._lengths = counts[spans.template]  # rows of each span
        self._first = np.cumsum(self._lengths) - self._lengths
        self._n_rows = int(self._lengths.sum())
        # Position of each row's op among the ops of all templates.
        self._op = np.arange(self._n_rows) + np.repeat(first_op[spans.template] - self._first, self._lengths)
        self._texts: dict[str, _Texts] = {}

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._n_rows

    def __getitem__(self, column: str) -> NDArray[np.generic]:
        """Return a column, one entry per row. Raises KeyError for one that rows do not have."""
        if column in _TEXT_COLUMNS:
            texts = self._texts_of(column)
            values: NDArray[np.generic] = np.array(texts.values, dtype=object)[texts.codes[self._op]]
            return values
        return self._numbers(column, None)

    def frame(self) -> pd.DataFrame:
        """Return the rows as a DataFrame, ordered by rank, lane and start. Columns of texts are categoricals."""
        import pandas as pd

        order = self._order()
        op = self._op[order]
        texts = {column: self._texts_of(column) for column in _TEXT_COLUMNS}
        codes: dict[str, NDArray[np.int32]] = {column: text.codes for column, text in texts.items()}
        values: dict[str, Iterable[str]] = {column: text.values for column, text in texts.items()}
        codes |= {column: self._ops_column(column).astype(np.int32) for column in ("lane", "category")}
        values |= {"lane": self._spans.lane_names, "category": CATEGORIES}
        return pd.DataFrame(
            {
                column: pd.Categorical.from_codes(codes[column][op], categories=pd.Index(list(values[column])))
                if column in codes
                else self._numbers(column, order)
                for column in _FRAME_COLUMNS
            },
            copy=False,
        )

    @cached_property
    def _span(self) -> Ints:
        return np.repeat(np.arange(len(self._spans.rank)), self._lengths)

    def _numbers(self, column: str, order: Ints | None) -> NDArray[np.generic]:
        """Return a column of numbers, its rows in ``order``."""
        rows = slice(None) if order is None else order
        if column == "span":
            return self._span[rows]
        if column in _SPAN_COLUMNS:
            values: Ints = getattr(self._spans, column)
            return values[self._span[rows]]
        if column.endswith("_s"):
            return self._times[column][rows]
        numbers: NDArray[np.generic] = self._ops_column(column)[self._op[rows]]
        return numbers

    def _texts_of(self, column: str) -> _Texts:
        if column not in self._texts:
            field = _TEXT_COLUMNS[column]
            self._texts[column] = _Texts(
                text for template in self._spans.templates for text in getattr(template, field)
            )
        return self._texts[column]

    def _ops_column(self, column: str) -> NDArray[np.number]:
        """Return a column of numbers of the ops of all templates."""
        templates = self._spans.templates
        if column == "lane":
            code = {name: number for number, name in enumerate(self._spans.lane_names)}
            return np.array([code[name] for template in templates for name in template.lanes], dtype=np.int64)
        parts: list[NDArray[np.number]] = [
            {"category": t.category, "nbytes": t.nbytes, "flops": t.flops}[column] for t in templates
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    @cached_property
    def _times(self) -> dict[str, Floats]:
        """Columns of times: when the lane came to the op, its start and its end, seconds."""
        spans, templates = self._spans, self._spans.templates
        start, end = np.repeat(spans.start_s, self._lengths), np.repeat(spans.start_s, self._lengths)
        if templates:
            start += np.concatenate([template.start_s for template in templates])[self._op]
            end += np.concatenate([template.end_s for template in templates])[self._op]
        single = np.flatnonzero(self._lengths == 1)  # a communication that the network timed has no work of its own
        rows = self._first[single]
        start[rows], end[rows] = spans.start_s[single], spans.end_s[single]
        for index, times in spans.stretched.items():
            stretch = slice(self._first[index], self._first[index] + self._lengths[index])
            start[stretch], end[stretch] = times
        posted = start.copy()
        posted[self._first[self._lengths > 0]] = spans.posted_s[self._lengths > 0]
        return {"posted_s": posted, "start_s": start, "end_s": end}

    def _order(self) -> Ints:
        """Return the order of rows by rank, lane and start.

        Spans stand in that order, so that a stable sort by rank and lane is enough, but for rows that pass one another
        on a lane.
        """
        start, lane = self._times["start_s"], self._ops_column("lane")[self._op]
        n_lanes = max(len(self._spans.lane_names), 1)
        place = np.unique(self._spans.rank, return_inverse=True)[1][self._span] * n_lanes + lane
        order = np.argsort(place.astype(np.min_scalar_type(place.max(initial=0))), kind="stable")
        in_place, in_start = place[order], start[order]
        if ((in_start[1:] < in_start[:-1]) & (in_place[1:] == in_place[:-1])).any():
            order = np.lexsort((start, place))
        return order
