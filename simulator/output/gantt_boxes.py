"""Boxes and bars of a Gantt chart: passes of a Timeline, and the communication beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.analysis.time.activity import compute_lane_spans
from simulator.analysis.time.pipeline_ranks import one_rank_per_stage, pipeline_ranks
from simulator.arrays import Floats, Ints
from simulator.output.gantt_layers import gathered_layers
from simulator.timeline import CATEGORIES, COMMUNICATION, FIRST_COMMUNICATION, Timeline
from simulator.units import ms, us

#: Height of a communication lane and space between lanes, as shares of a row.
STRIP, GAP = 0.13, 0.04


@dataclass(frozen=True)
class Boxes:
    """Columns of boxes: one per step on the compute lane, in however many spans it ran.

    ``layer``: number of the layer whose weights are gathered for it, from 1 on; 0 where there is none.
    ``share``: share of a box's time in each of `CATEGORIES`; the rest is waiting between its pieces.
    ``pieces``: the spans of all boxes, box by box in order of time; those of box i begin at ``first_piece[i]``.
    """

    row: Ints
    start_s: Floats
    end_s: Floats
    phase: np.ndarray[Any, np.dtype[np.str_]]
    microbatch: Ints
    chunk: Ints
    stage: Ints
    layer: Ints
    share: Floats
    pieces: Ints
    first_piece: Ints


@dataclass(frozen=True)
class TimeAxis:
    """Time axis: the ``unit`` of its label, and that unit in ``seconds``."""

    unit: str
    seconds: float

    @classmethod
    def fit(cls, length_s: float, unit: str) -> TimeAxis:
        """Return an axis in ``unit`` if given (times are in it), else in the unit that suits a step of ``length_s``."""
        if unit:
            return cls(unit, 1.0)
        return cls("s", 1.0) if length_s >= 1 else cls("ms", ms) if length_s >= ms else cls("µs", us)


@dataclass(frozen=True)
class Picture:
    """Content of a Gantt chart, a row per rank.

    ``stages``: pipeline rank of each row. ``lanes``: kind of communication -> row, start and end of its bars.
    ``opens_s``, ``closes_s``: begin and end of each row's time.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    length_s: float
    axis: TimeAxis
    boxes: Boxes
    lanes: Mapping[str, tuple[Ints, Floats, Floats]]
    chunks: int
    opens_s: Floats
    closes_s: Floats

    @classmethod
    def arrange(cls, timeline: Timeline, unit: str) -> Picture:
        """Arrange one rank per pipeline stage; ``unit`` as for `TimeAxis.fit`."""
        chosen = one_rank_per_stage(timeline)
        stages = pipeline_ranks(timeline)
        boxes = _boxes(timeline, chosen)
        opens, closes = np.zeros(len(chosen)), np.full(len(chosen), timeline.length_s)
        if timeline.period_s is not None:  # each rank has its own window; outside of it lie other steps
            opens = np.array(
                [boxes.start_s[boxes.row == row].min(initial=timeline.length_s) for row in range(len(chosen))]
            )
            closes = opens + timeline.period_s
        return cls(
            ranks=tuple(chosen),
            stages=tuple(stages[rank] for rank in chosen),
            length_s=timeline.length_s,
            axis=TimeAxis.fit(timeline.length_s, unit),
            boxes=boxes,
            lanes=_lanes(timeline, chosen),
            chunks=int(boxes.chunk.max()) + 1 if len(boxes.chunk) else 1,
            opens_s=opens,
            closes_s=closes,
        )

    @property
    def idles(self) -> bool:
        """Any part of the picture is grey."""
        busy = float((self.boxes.end_s - self.boxes.start_s) @ np.minimum(self.boxes.share.sum(axis=1), 1.0))
        return busy < (1 - 1e-6) * float((self.closes_s - self.opens_s).sum())

    @property
    def bar_height(self) -> float:
        """Height of a box, as a share of its row."""
        return 0.9 - len(self.lanes) * (STRIP + GAP)


def _row_of_span(timeline: Timeline, ranks: Sequence[int]) -> Ints:
    """Return the row of each span's rank, -1 where it is not drawn."""
    rows = np.full(max(timeline.ranks, default=0) + 1, -1, dtype=np.int64)
    rows[list(ranks)] = np.arange(len(ranks))
    return rows[timeline.rank]


def _boxes(timeline: Timeline, ranks: Sequence[int]) -> Boxes:
    row = _row_of_span(timeline, ranks)
    spans = np.flatnonzero((row >= 0) & (timeline.phase != "C"))
    labels = timeline.label_code[spans]
    unlabelled = np.array([not timeline.labels[span] for span in spans.tolist()], dtype=bool)
    # The pieces of a micro-batch's forward or backward are one box; elsewhere, and without labels, each span is one.
    alone = (timeline.microbatch[spans] < 0) | unlabelled
    piece = np.where(alone, np.arange(len(spans)), -1)
    key = np.stack((row[spans], labels, timeline.stage[spans], timeline.microbatch[spans], piece))
    _, first, group = np.unique(key, axis=1, return_index=True, return_inverse=True)
    n = len(first)
    start, end = np.full(n, np.inf), np.zeros(n)
    np.minimum.at(start, group, timeline.start_s[spans])
    np.maximum.at(end, group, timeline.end_s[spans])
    by_category = np.array([t.by_category for t in timeline.templates]).reshape(-1, len(CATEGORIES))
    # A transfer that the network times has one op, without work of its own.
    single = np.array([int(t.category[0]) for t in timeline.templates if len(t)], dtype=np.int64)
    idle = by_category.sum(axis=1) == 0
    by_category[idle, single[idle]] = 1.0
    seconds = by_category[timeline.template[spans]]
    seconds *= ((timeline.end_s - timeline.start_s)[spans] / seconds.sum(axis=1))[:, None]
    share = np.stack([np.bincount(group, weights=column, minlength=n) for column in seconds.T], axis=1)
    length = (end - start)[:, None]
    share = np.divide(share, length, out=np.zeros_like(share), where=length > 0)
    # Communication beside the box's kernels is visible where they leave room.
    comm = FIRST_COMMUNICATION
    compute, beside = share[:, :comm].sum(axis=1), share[:, comm:].sum(axis=1)
    full = (beside > 0) & (compute + beside > 1)
    share[:, comm:] *= np.divide(np.maximum(1 - compute, 0), beside, out=np.ones_like(beside), where=full)[:, None]
    origin, in_boxes = spans[first], np.argsort(group, kind="stable")
    return Boxes(
        row=row[origin],
        start_s=start,
        end_s=end,
        phase=timeline.phase[origin],
        microbatch=timeline.microbatch[origin],
        chunk=timeline.chunk[origin],
        stage=timeline.stage[origin],
        layer=gathered_layers(timeline, origin),
        share=share,
        pieces=spans[in_boxes],
        first_piece=np.searchsorted(group[in_boxes], np.arange(n)),
    )


def _lanes(timeline: Timeline, ranks: Sequence[int]) -> dict[str, tuple[Ints, Floats, Floats]]:
    """Return the bars of communication beside computation, by kind: row, start, end."""
    row = _row_of_span(timeline, ranks)
    category = np.array([int(t.category[0]) if len(t) else 0 for t in timeline.templates], dtype=np.int64)
    beside = (row >= 0) & ~compute_lane_spans(timeline) & (timeline.phase == "C") & (timeline.end_s > timeline.start_s)
    lanes = {}
    for code, kind in enumerate(COMMUNICATION, start=FIRST_COMMUNICATION):
        spans = np.flatnonzero(beside & (category[timeline.template] == code))
        if len(spans):
            lanes[kind] = (row[spans], timeline.start_s[spans], timeline.end_s[spans])
    return lanes


def usual_box_s(boxes: Boxes) -> float:
    """Return the length of a usual box of the shortest phase that has micro-batches, s.

    It is the length of the box in which the phase's median second lies. Short pieces that a pass is cut into for
    buckets thus hardly count.
    """
    usual = []
    for phase in np.unique(boxes.phase[boxes.microbatch >= 0]):
        in_phase = (boxes.phase == phase) & (boxes.microbatch >= 0)
        length = np.sort((boxes.end_s - boxes.start_s)[in_phase])
        usual.append(float(length[np.searchsorted(np.cumsum(length), length.sum() / 2)]))
    return min(usual)
