"""Columns of the timeline on a page: boxes of passes, bars of communication, and the kernels inside of passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.analysis.time.activity import compute_lane_spans
from simulator.arrays import Bools, Floats, Ints
from simulator.output.gantt_boxes import GAP, STRIP, Picture
from simulator.output.gantt_panel import PHASE_COLOUR, SHARE_COLOUR, row_name, shades
from simulator.timeline import CATEGORIES, COMMUNICATION, FIRST_COMMUNICATION, Timeline

#: Most boxes and bars on a page: with them it stays below 5 MB, and a browser draws it at once.
MOST_BARS = 30_000
#: Most kernels whose exact times are kept, of passes that did not run at full speed throughout.
_MOST_STRETCHED = 150_000
#: Space above each box, as a share of its row.
_MARGIN = 0.05

PASS_NAME = {
    "F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "O": "optimizer",
}  # fmt: skip

Columns = dict[str, Any]


@dataclass(frozen=True)
class TimelineData:
    """Columns of one timeline, times in the unit of its axis.

    ``rows``: name of each row, from the top. ``boxes``: passes. ``runs``: passes of a colour without time between them,
    joined. ``levels``: kind of time inside passes -> columns of
    ``boxes`` with the top and the bottom of its part. ``bars``: communication beside them. ``idle``: backgrounds.
    ``inside``: what boxes consist of (see `_inside`). ``left_out``: sentence on what is not drawn, empty where all is.
    ``gap``: from where to where nothing is drawn then, else two zeros.
    """

    unit: str
    unit_s: float
    length: float
    rows: tuple[str, ...]
    boxes: Columns
    runs: Columns
    levels: dict[str, tuple[str, str]]
    bars: Columns
    idle: Columns
    inside: Columns
    left_out: str
    gap: tuple[float, float]

    @classmethod
    def arrange(cls, timeline: Timeline) -> TimelineData:
        """Arrange one rank per pipeline stage."""
        picture = Picture.arrange(timeline, "")
        bars = _communication_spans(timeline, picture.ranks)
        drawn, left_out = _drawn(picture, timeline, bars)
        unit_s = picture.axis.seconds
        box = np.flatnonzero(drawn.boxes)
        columns, levels = _levels(picture, box)
        boxes = _boxes(timeline, picture, box, unit_s)
        return cls(
            unit=picture.axis.unit,
            unit_s=unit_s,
            length=picture.length_s / unit_s,
            rows=tuple(row_name(picture, row) for row in range(len(picture.ranks))),
            boxes=boxes | columns,
            runs=_runs(boxes, picture.bar_height),
            levels=levels,
            bars=_bars(timeline, picture, bars[drawn.bars], unit_s),
            idle=_idle(picture, unit_s),
            inside=_inside(timeline, picture, box, unit_s),
            left_out=left_out,
            gap=(drawn.gap_s[0] / unit_s, drawn.gap_s[1] / unit_s),
        )


@dataclass(frozen=True)
class _Drawn:
    """Choice of the boxes and bars that are drawn: all but those that begin within ``gap_s``."""

    boxes: Bools
    bars: Bools
    gap_s: tuple[float, float]


def _drawn(picture: Picture, timeline: Timeline, bars: Ints) -> tuple[_Drawn, str]:
    """Choose what is drawn, and say what is not: of too much, all that begins around the middle of what there is.

    A step's beginning and end differ from the rest, with the filling of a pipeline, its draining and the update.
    """
    starts = np.sort(np.concatenate((picture.boxes.start_s, timeline.start_s[bars])))
    surplus = len(starts) - MOST_BARS
    if surplus <= 0:
        return _Drawn(np.ones(len(picture.boxes.row), bool), np.ones(len(bars), bool), (0.0, 0.0)), ""
    first = MOST_BARS // 2
    begin, end = float(starts[first]), float(np.nextafter(starts[first + surplus - 1], np.inf))
    boxes, transfers = ((begin > one) | (one >= end) for one in (picture.boxes.start_s, timeline.start_s[bars]))
    unit, unit_s = picture.axis.unit, picture.axis.seconds
    sentence = (
        f"From {begin / unit_s:,.3g} to {end / unit_s:,.3g} {unit} nothing is drawn: of {len(starts):,} passes and "
        f"transfers {int(boxes.sum() + transfers.sum()):,} are. --trace FILE has them all."
    )
    return _Drawn(boxes, transfers, (begin, end)), sentence


def _communication_spans(timeline: Timeline, ranks: Sequence[int]) -> Ints:
    """Return the spans of communication beside computation, on the ranks that are drawn."""
    drawn = np.isin(timeline.rank, np.asarray(ranks))
    beside = ~compute_lane_spans(timeline) & (timeline.phase == "C") & (timeline.end_s > timeline.start_s)
    return np.flatnonzero(drawn & beside)


def _small(column: Any) -> NDArray[np.float32]:
    """Return numbers in four bytes: a ten-millionth of a step is less than what can be seen of it."""
    return np.asarray(column, dtype=np.float32)


def _boxes(timeline: Timeline, picture: Picture, box: Ints, unit_s: float) -> Columns:
    boxes = picture.boxes
    row, start, end = boxes.row[box], boxes.start_s[box], boxes.end_s[box]
    colours, phases, chunks = shades(picture), boxes.phase[box].tolist(), boxes.chunk[box].tolist()
    microbatch = boxes.microbatch[box].tolist()
    several = picture.chunks > 1
    names = [
        _pass_name(phase, number, chunk if several else None)
        for phase, number, chunk in zip(phases, microbatch, chunks, strict=True)
    ]
    moved = np.array([t.nbytes[t.category >= FIRST_COMMUNICATION].sum() for t in timeline.templates])
    by_piece = moved[timeline.template[boxes.pieces]]
    moved_by_box = np.add.reduceat(by_piece, boxes.first_piece) if len(boxes.row) else by_piece
    return {
        "left": _small(start / unit_s),
        "right": _small(end / unit_s),
        "line": np.zeros(len(box), np.uint8),
        "top": _small(row + _MARGIN),
        "bottom": _small(row + _MARGIN + picture.bar_height),
        "colour": [colours[key] for key in zip(phases, chunks, strict=True)],
        "name": names,
        "microbatch": boxes.microbatch[box].astype(np.int32),
        "row": row.astype(np.uint16),
        "moved": _small(moved_by_box[box]),
    }


def _runs(boxes: Columns, height: float) -> Columns:
    """Return boxes of a row and a colour that follow one another at once, joined.

    They lie under the boxes, through whose edges the background would shine where boxes are as narrow as a pixel.
    """
    order = np.lexsort((boxes["left"], boxes["row"]))
    left, right, row = (boxes[name][order] for name in ("left", "right", "row"))
    colour = np.array(boxes["colour"], dtype=object)[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (row[1:] != row[:-1]) | (colour[1:] != colour[:-1]) | (left[1:] > right[:-1])
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(order))[: len(first)] - 1
    top = _small(row[first] + _MARGIN)
    return {
        "left": left[first],
        "right": right[last],
        "top": top,
        "bottom": _small(top + height),
        "colour": colour[first].tolist(),
    }


def _pass_name(phase: str, microbatch: int, chunk: int | None) -> str:
    """
    >>> _pass_name("F", 3, None), _pass_name("B", 12, 1), _pass_name("O", -1, None)
    ('F3 forward', 'B12.1 backward', 'optimizer')
    """
    name = PASS_NAME.get(phase, phase)
    if microbatch < 0:
        return name
    return f"{phase}{microbatch}{'' if chunk is None else f'.{chunk}'} {name}"


def _levels(picture: Picture, box: Ints) -> tuple[Columns, dict[str, tuple[str, str]]]:
    """Return columns of the edges between parts of boxes, and which edges each kind of time inside them lies between.

    Recompute and communication are stacked from the bottom as in a Gantt chart.
    """
    share, height = picture.boxes.share[box], picture.bar_height
    level = picture.boxes.row[box] + _MARGIN + height
    columns: Columns = {}
    levels: dict[str, tuple[str, str]] = {}
    below = "bottom"
    for kind in reversed(("recompute", *COMMUNICATION)):
        part = share[:, CATEGORIES.index(kind)] * height
        if part.max(initial=0.0) <= 1e-4:
            continue
        level = level - part
        columns[f"top_{kind}"] = _small(level)
        levels[kind] = (f"top_{kind}", below)
        below = f"top_{kind}"
    return columns, levels


def _bars(timeline: Timeline, picture: Picture, spans: Ints, unit_s: float) -> Columns:
    """Return the bars of communication, in the lane of their kind below the boxes of their rank."""
    row_of_rank = {rank: row for row, rank in enumerate(picture.ranks)}
    lane_of_kind = {kind: lane for lane, kind in enumerate(picture.lanes)}
    template = [timeline.templates[code] for code in timeline.template[spans].tolist()]
    kinds = [CATEGORIES[int(one.category[0])] for one in template]
    row = np.array([row_of_rank[rank] for rank in timeline.rank[spans].tolist()], dtype=np.float64)
    lane = np.array([lane_of_kind[kind] for kind in kinds], dtype=np.float64)
    top = row + _MARGIN + picture.bar_height + GAP + lane * (STRIP + GAP)
    return {
        "left": _small(timeline.start_s[spans] / unit_s),
        "right": _small(timeline.end_s[spans] / unit_s),
        "top": _small(top),
        "bottom": _small(top + STRIP),
        "colour": [SHARE_COLOUR[kind] for kind in kinds],
        "name": [
            f"{kind} {one.kinds[0].replace('_', ' ')}: {one.names[0]}"
            for kind, one in zip(kinds, template, strict=True)
        ],
        "microbatch": timeline.microbatch[spans].astype(np.int32),
        "row": row.astype(np.uint16),
        "moved": _small([one.nbytes[0] for one in template]),
    }


def _idle(picture: Picture, unit_s: float) -> Columns:
    rows = np.arange(len(picture.ranks))
    return {
        "left": _small(picture.opens_s / unit_s),
        "right": _small(picture.closes_s / unit_s),
        "top": _small(rows + _MARGIN),
        "bottom": _small(rows + _MARGIN + picture.bar_height),
    }


def _inside(timeline: Timeline, picture: Picture, box: Ints, unit_s: float) -> Columns:
    """Return what boxes consist of, for a browser to put together: kernels of a template are written once.

    Box i has the pieces from ``first_piece[i]`` to ``first_piece[i + 1]``. A piece has a template, a start and an end,
    counted from the start of its box. ``own`` is the place of its kernels' own times in ``own_start`` and ``own_end``,
    counted from its start. It is -1 where the piece ran at full speed, and -2 where its own times would be too many.
    Template t has the kernels from ``first_op[t]`` to ``first_op[t + 1]``.
    """
    boxes, templates = picture.boxes, timeline.templates
    ends = np.append(boxes.first_piece[1:], len(boxes.pieces))
    pieces = [boxes.pieces[boxes.first_piece[one] : ends[one]] for one in box.tolist()]
    spans = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
    texts = _NumberedTexts()
    stretch: Ints = np.full(len(spans), -1)
    own_start: list[Floats] = []
    own_end: list[Floats] = []
    kept = 0
    for place, span in enumerate(spans.tolist()):
        times = timeline.stretched.get(span)
        if times is not None and kept + len(times[0]) > _MOST_STRETCHED:
            stretch[place] = -2
        elif times is not None:
            stretch[place] = kept
            own_start.append(times[0] - timeline.start_s[span])
            own_end.append(times[1] - timeline.start_s[span])
            kept += len(times[0])
    used = set(timeline.template[spans].tolist())
    ops = [template if code in used else None for code, template in enumerate(templates)]
    shown = [template for template in ops if template is not None]

    def column(values: Iterable[Any], dtype: type = np.float64) -> Any:
        return np.concatenate([np.zeros(0), *values]).astype(dtype)

    def codes(field: str) -> Any:
        return column(
            ([texts.code(text.replace("_", " ")) for text in getattr(template, field)] for template in shown), np.int32
        )

    begun = np.repeat(boxes.start_s[box], [*map(len, pieces)])
    return {
        "first_piece": np.cumsum([0, *map(len, pieces)]).astype(np.int32),
        "template": timeline.template[spans].astype(np.uint32 if len(templates) > 2**16 else np.uint16),
        "start": _small((timeline.start_s[spans] - begun) / unit_s),
        "end": _small((timeline.end_s[spans] - begun) / unit_s),
        "own": stretch.astype(np.int32),
        "own_start": _small(column(own_start) / unit_s),
        "own_end": _small(column(own_end) / unit_s),
        "first_op": np.cumsum([0, *(0 if template is None else len(template) for template in ops)]).astype(np.int32),
        "op_start": column(template.start_s for template in shown) / unit_s,
        "op_end": column(template.end_s for template in shown) / unit_s,
        "op_name": codes("names"),
        "op_kind": codes("kinds"),
        "op_lane": codes("lanes"),
        "op_category": column((template.category for template in shown), np.uint8),
        "op_bytes": column((template.nbytes for template in shown), np.float32),
        "op_flops": column((template.flops for template in shown), np.float32),
        "texts": texts.values,
    }


class _NumberedTexts:
    """Distinct texts in ``values``, each with a number."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        if text not in self._codes:
            self._codes[text] = len(self.values)
            self.values.append(text)
        return self._codes[text]


#: Colour of kernels and communication inside a pass, by `CATEGORIES`; computation has the colour of its pass.
OP_COLOUR = tuple(SHARE_COLOUR.get(kind, PHASE_COLOUR["O"] if kind == "optimizer" else "") for kind in CATEGORIES)
