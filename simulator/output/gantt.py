"""A Timeline as a picture: a row per pipeline stage, a box per forward and backward, thin lanes for communication.

Drawn with matplotlib's objects, without pyplot, so that it needs no display and leaves no state behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.analysis.activity import compute_lane_spans
from simulator.analysis.ranks import one_rank_per_stage, pipeline_ranks
from simulator.errors import InputError
from simulator.output.files import PICTURES, writing
from simulator.timeline import CATEGORIES, Floats, Ints, Timeline
from simulator.units import format_time, ms, us

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's colours (jfly.uni-koeln.de/color), blue darkened: told apart with any kind of colour vision.
_PHASE_COLOUR = {"F": "#56B4E9", "B": "#009E73", "I": "#009E73", "W": "#F0E442", "O": "#4D4D4D"}
_SHARE_COLOUR = {
    "recompute": "#E69F00",
    "tp": "#CC79A7",
    "cp": "#2A0000",
    "ep": "#956AFF",
    "pp": "#D55E00",
    "dp": "#004C8C",
    "offload": "#8B5A2B",
}
_IDLE_COLOUR = "#EDEDED"
_PHASE_NAME = {
    "F": "forward", "B": "backward", "I": "backward: input gradient", "W": "backward: weight gradient",
    "O": "optimizer",
}  # fmt: skip
_SHARE_NAME = {
    "recompute": "recompute", "tp": "tp communication", "cp": "cp communication", "ep": "ep communication",
    "pp": "pp hand-over", "dp": "dp communication", "offload": "copies to and from the host",
}  # fmt: skip
_WIDTH_IN, _DPI = 16.0, 120
_PANEL_POINTS = 14.4 * 72  # width of the panel that shows the whole step
_STRIP, _GAP = 0.13, 0.04  # of a row: height of a communication lane, space between lanes
_POINTS_PER_DIGIT = 4.6  # width of a digit of the numbers in boxes
_FONT = 7
_LEGEND_COLUMNS = 7  # of entries that fit side by side


def gantt(
    timeline: Timeline,
    axes: Axes | None = None,
    *,
    ranks: Sequence[int] | None = None,
    title: str = "",
    unit: str = "",
) -> Figure:
    """Draw ``timeline``: rows are ``ranks`` (simulated ones; default: one per pipeline stage).

    A box is one micro-batch's forward or backward on a stage; the heights of the colours in it are the shares of its
    time that are recompute and in-line communication. Chunks of a rank are told by shade, micro-batches by number where
    it fits. Of a steady state every rank's period is drawn where it lies in time. Lanes under the boxes hold hand-overs
    and gradient reduction at their true times; idle is grey. A step of too many boxes for numbers gets two panels more,
    its beginning and its end. With ``axes`` only the whole step is drawn, there. ``unit`` names the unit of the time
    axis where it is not seconds (the unit costs of a bare schedule). Returns the figure.
    """
    picture = _Picture.of(timeline, ranks, unit)
    if axes is not None:
        _panel(axes, picture, (0.0, picture.length_s), title)
        handles, caption = _legend(picture)
        axes.legend(
            handles=handles, title=caption, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=min(len(handles), 8),
            fontsize=8, title_fontsize=8, frameon=False,
        )  # fmt: skip
        figure = axes.get_figure(root=True)
        assert figure is not None
        return figure
    windows = _zoom_windows(picture)
    legend = _legend(picture)
    row_in = min(0.5, max(0.16, 7.0 / len(picture.ranks)))
    heights = [len(picture.ranks) * row_in * (0.7 if windows else 1.0)] + [len(picture.ranks) * row_in] * bool(windows)
    figure, (whole, *zooms) = _figure(heights, [1, 2][: len(heights)], legend)
    _panel(whole, picture, (0.0, picture.length_s), title or f"step time {format_time(timeline.step_time_s)}")
    for zoom, (name, window) in zip(zooms, windows, strict=True):
        _panel(zoom, picture, window, name, small=True)
        low, high = (edge / picture.axis.seconds for edge in window)
        whole.axvspan(low, high, facecolor="none", edgecolor="black", lw=1.0, zorder=5)
    return figure


def compare_gantt(timelines: Mapping[str, Timeline], *, unit: str = "") -> Figure:
    """Several Timelines below each other on one time axis, titled by name. ``unit``: as for `gantt`."""
    longest = max(timeline.length_s for timeline in timelines.values())
    axis = _Axis.of(longest, unit)
    pictures = [replace(_Picture.of(timeline, None, unit), axis=axis) for timeline in timelines.values()]
    figure, panels = _figure([max(len(p.ranks) * 0.4, 0.8) for p in pictures], [1] * len(pictures), _legend(*pictures))
    for axes, picture, title in zip(panels, pictures, timelines, strict=True):
        _panel(axes, picture, (0.0, longest), title)
    return figure


def _figure(
    heights_in: Sequence[float], columns: Sequence[int], legend: tuple[list[Any], str]
) -> tuple[Figure, list[Axes]]:
    """A figure of rows of panels, so high in inches, so many in each, with room for titles and axes, over a legend.

    Laid out by hand: matplotlib's constrained layout draws everything twice to find the same.
    """
    from matplotlib.figure import Figure

    handles, caption = legend
    rows = -(-len(handles) // _LEGEND_COLUMNS)
    left, right, above, below = 1.4, 0.2, 0.38, 0.5
    total = sum(heights_in) + len(heights_in) * (above + below) + 0.2 + 0.25 * rows
    figure = Figure(figsize=(_WIDTH_IN, total), dpi=_DPI)
    panels = []
    top = total
    for height, count in zip(heights_in, columns, strict=True):
        bottom = top - above - height
        room = (_WIDTH_IN - left - right - 0.45 * (count - 1)) / count
        for column in range(count):
            x = left + column * (room + 0.45)
            panels.append(figure.add_axes((x / _WIDTH_IN, bottom / total, room / _WIDTH_IN, height / total)))
        top = bottom - below
    figure.legend(
        handles=handles, title=caption, loc="lower center", ncols=-(-len(handles) // rows), fontsize=9,
        title_fontsize=8, frameon=False,
    )  # fmt: skip
    return figure, panels


def save_gantt(figure: Figure, path: str | Path) -> None:
    """Write a figure of this module as PNG, SVG or PDF by suffix; the same figure gives the same bytes.

    Raises `InputError` for another suffix or where the file cannot be written.
    """
    import matplotlib

    suffix = Path(path).suffix.lower()
    check_format(path)
    stamp: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix, {})
    with writing(path) as file, matplotlib.rc_context({"svg.hashsalt": "simulator"}):
        figure.savefig(file, format=suffix[1:], metadata=stamp)


def check_format(path: str | Path) -> None:
    """Raise `InputError` where a picture cannot be written in the format that the name of ``path`` asks for."""
    suffix = Path(path).suffix.lower()
    if suffix not in PICTURES:
        fix = str(Path(path).with_suffix(".png").name)
        raise InputError("unknown picture format", file=path, found=suffix, allowed=", ".join(PICTURES), fix=fix)


@dataclass(frozen=True)
class _Boxes:
    """One box per step on the compute lane, however many spans it ran as: columns."""

    row: Ints
    start_s: Floats
    end_s: Floats
    phase: np.ndarray[Any, np.dtype[np.str_]]
    microbatch: Ints
    chunk: Ints
    share: Floats  # of its time in each of `CATEGORIES`; the rest is waiting between its pieces


@dataclass(frozen=True)
class _Axis:
    """A time axis: what it is labelled in, and how many seconds that is."""

    unit: str
    seconds: float

    @classmethod
    def of(cls, length_s: float, unit: str) -> _Axis:
        """``unit`` where it is given (and times are in it), else the one that suits a step of ``length_s``."""
        if unit:
            return cls(unit, 1.0)
        return cls("s", 1.0) if length_s >= 1 else cls("ms", ms) if length_s >= ms else cls("µs", us)


@dataclass(frozen=True)
class _Picture:
    """What is drawn: boxes, and per communication lane the row, start and end of its bars."""

    ranks: tuple[int, ...]
    places: tuple[int, ...]
    length_s: float
    axis: _Axis
    boxes: _Boxes
    lanes: Mapping[str, tuple[Ints, Floats, Floats]]
    chunks: int
    opens_s: Floats  # per row, from when to when its time is the picture's
    closes_s: Floats

    @classmethod
    def of(cls, timeline: Timeline, ranks: Sequence[int] | None, unit: str) -> _Picture:
        chosen = one_rank_per_stage(timeline) if ranks is None else list(ranks)
        places = pipeline_ranks(timeline)
        boxes = _boxes(timeline, chosen)
        opens, closes = np.zeros(len(chosen)), np.full(len(chosen), timeline.length_s)
        if timeline.period_s is not None:  # each rank has a window of its own, what lies outside is of other steps
            opens = np.array(
                [boxes.start_s[boxes.row == row].min(initial=timeline.length_s) for row in range(len(chosen))]
            )
            closes = opens + timeline.period_s
        return cls(
            ranks=tuple(chosen),
            places=tuple(places[rank] for rank in chosen),
            length_s=timeline.length_s,
            axis=_Axis.of(timeline.length_s, unit),
            boxes=boxes,
            lanes=_lanes(timeline, chosen),
            chunks=int(boxes.chunk.max()) + 1 if len(boxes.chunk) else 1,
            opens_s=opens,
            closes_s=closes,
        )

    @property
    def idles(self) -> bool:
        """Whether any of it stays grey."""
        busy = float((self.boxes.end_s - self.boxes.start_s) @ np.minimum(self.boxes.share.sum(axis=1), 1.0))
        return busy < (1 - 1e-6) * float((self.closes_s - self.opens_s).sum())

    @property
    def bar_height(self) -> float:
        """Of a box, as a share of its row."""
        return 0.9 - len(self.lanes) * (_STRIP + _GAP)


def _row_of_span(timeline: Timeline, ranks: Sequence[int]) -> Ints:
    """Per span the row of its rank, -1 where it is not drawn."""
    rows = np.full(max(timeline.ranks, default=0) + 1, -1, dtype=np.int64)
    rows[list(ranks)] = np.arange(len(ranks))
    return rows[timeline.rank]


def _boxes(timeline: Timeline, ranks: Sequence[int]) -> _Boxes:
    row = _row_of_span(timeline, ranks)
    spans = np.flatnonzero((row >= 0) & (timeline.phase != "C"))
    label_code = {label: code for code, label in enumerate(dict.fromkeys(timeline.labels))}
    labels = np.array([label_code[timeline.labels[span]] for span in spans.tolist()], dtype=np.int64)
    # The pieces of a micro-batch's forward or backward are one box; elsewhere, and without labels, each span is one.
    alone = (timeline.microbatch[spans] < 0) | (labels == label_code.get("", -1))
    piece = np.where(alone, np.arange(len(spans)), -1)
    key = np.stack((row[spans], labels, timeline.stage[spans], timeline.microbatch[spans], piece))
    _, first, group = np.unique(key, axis=1, return_index=True, return_inverse=True)
    n = len(first)
    start, end = np.full(n, np.inf), np.zeros(n)
    np.minimum.at(start, group, timeline.start_s[spans])
    np.maximum.at(end, group, timeline.end_s[spans])
    by_category = np.array([t.by_category for t in timeline.templates]).reshape(-1, len(CATEGORIES))
    # What the network times has no work of its own; it is one op.
    single = np.array([int(t.category[0]) for t in timeline.templates if len(t)], dtype=np.int64)
    idle = by_category.sum(axis=1) == 0
    by_category[idle, single[idle]] = 1.0
    seconds = by_category[timeline.template[spans]]
    seconds *= ((timeline.end_s - timeline.start_s)[spans] / seconds.sum(axis=1))[:, None]
    share = np.stack([np.bincount(group, weights=column, minlength=n) for column in seconds.T], axis=1)
    length = (end - start)[:, None]
    share = np.divide(share, length, out=np.zeros_like(share), where=length > 0)
    # Communication that goes on beside the box's kernels is seen where they leave room.
    comm = CATEGORIES.index("tp")
    own, room = share[:, :comm].sum(axis=1), share[:, comm:].sum(axis=1)
    visible = np.divide(np.maximum(1 - own, 0), room, out=np.ones_like(room), where=(room > 0) & (own + room > 1))
    share[:, comm:] *= visible[:, None]
    origin = spans[first]
    return _Boxes(
        row[origin], start, end, timeline.phase[origin], timeline.microbatch[origin], timeline.chunk[origin], share
    )


def _lanes(timeline: Timeline, ranks: Sequence[int]) -> dict[str, tuple[Ints, Floats, Floats]]:
    """Communication that runs beside computation, by kind."""
    row = _row_of_span(timeline, ranks)
    category = np.array([int(t.category[0]) if len(t) else 0 for t in timeline.templates], dtype=np.int64)
    beside = (row >= 0) & ~compute_lane_spans(timeline) & (timeline.phase == "C") & (timeline.end_s > timeline.start_s)
    lanes = {}
    for code in range(CATEGORIES.index("tp"), len(CATEGORIES)):
        spans = np.flatnonzero(beside & (category[timeline.template] == code))
        if len(spans):
            lanes[CATEGORIES[code]] = (row[spans], timeline.start_s[spans], timeline.end_s[spans])
    return lanes


def _zoom_windows(picture: _Picture) -> list[tuple[str, tuple[float, float]]]:
    """The beginning and the end of the step, so long that numbers fit; none where they fit in the whole."""
    boxes = picture.boxes
    if not (boxes.microbatch >= 0).any():
        return []
    room = _number_points(picture)
    usual = _usual_box_s(boxes)
    if usual / picture.length_s * _PANEL_POINTS >= room:
        return []
    window = usual * (_PANEL_POINTS / 2) / room
    last = float(boxes.end_s[boxes.microbatch >= 0].max())
    begin = max(min(picture.length_s - window, last - 0.7 * window), 0.0)
    return [("the beginning", (0.0, window)), ("the end", (begin, picture.length_s))]


def _number_points(picture: _Picture) -> float:
    """Width that the longest micro-batch number takes, points."""
    return (len(str(int(picture.boxes.microbatch.max(initial=0)))) + 0.6) * _POINTS_PER_DIGIT


def _usual_box_s(boxes: _Boxes) -> float:
    """Of the shortest phase that has micro-batches, the length of the box in which its median second lies: pieces that
    a pass is cut into for a bucket do not count for many."""
    usual = []
    for phase in np.unique(boxes.phase[boxes.microbatch >= 0]):
        of_phase = (boxes.phase == phase) & (boxes.microbatch >= 0)
        length = np.sort((boxes.end_s - boxes.start_s)[of_phase])
        usual.append(float(length[np.searchsorted(np.cumsum(length), length.sum() / 2)]))
    return min(usual)


def _panel(axes: Axes, picture: _Picture, window: tuple[float, float], title: str, *, small: bool = False) -> None:
    """Draw what lies in ``window`` (seconds)."""
    from matplotlib.collections import PolyCollection

    unit, rows = picture.axis.seconds, len(picture.ranks)
    low, high = window
    height = picture.bar_height
    polygons: list[Floats] = []  # of each call, boxes x corners x 2
    colours: list[Any] = []

    def add(row: Ints, start: Floats, end: Floats, bottom: Any, top: Any, colour: Any) -> None:
        y0, y1 = np.broadcast_to(row + 0.05 + bottom, row.shape), np.broadcast_to(row + 0.05 + top, row.shape)
        x0, x1 = start / unit, end / unit
        corners = np.stack(
            (np.stack((x0, y0), -1), np.stack((x1, y0), -1), np.stack((x1, y1), -1), np.stack((x0, y1), -1)), 1
        )
        polygons.append(corners)
        colours.extend([colour] * len(row) if isinstance(colour, str) else colour)

    everything = np.arange(rows)
    add(everything, picture.opens_s, picture.closes_s, 0.0, height, _IDLE_COLOUR)
    boxes = picture.boxes
    seen = (boxes.end_s >= low) & (boxes.start_s <= high)
    row, start, end = boxes.row[seen], boxes.start_s[seen], boxes.end_s[seen]
    shades = _shades(picture)
    face = [
        shades[phase, chunk]
        for phase, chunk in zip(boxes.phase[seen].tolist(), boxes.chunk[seen].tolist(), strict=True)
    ]
    # Rows run downwards: what is drawn at the bottom of a box has the larger ordinate.
    inside = [c for c in ("recompute", *CATEGORIES[3:]) if boxes.share[seen][:, CATEGORIES.index(c)].any()]
    level = np.full(len(row), height)
    for kind in reversed(inside):
        part = boxes.share[seen][:, CATEGORIES.index(kind)] * height
        some = part > 0
        add(row[some], start[some], end[some], (level - part)[some], level[some], _SHARE_COLOUR[kind])
        level = level - part
    idle = np.clip(1 - boxes.share[seen].sum(axis=1), 0, 1) * height
    add(row, start, end, np.minimum(idle, level), level, face)
    width_points = _PANEL_POINTS / 2 if small else _PANEL_POINTS
    hairline_s = (
        high - low
    ) / width_points  # a hand-over much shorter than a point would show here and there by chance
    for number, (kind, (lane_row, lane_start, lane_end)) in enumerate(picture.lanes.items()):
        shown = (lane_end >= low) & (lane_start <= high)
        top = height + _GAP + number * (_STRIP + _GAP)
        lane_end = np.maximum(lane_end, lane_start + hairline_s)
        add(lane_row[shown], lane_start[shown], lane_end[shown], top, top + _STRIP, _SHARE_COLOUR[kind])
    axes.add_collection(
        PolyCollection(list(np.concatenate(polygons)), facecolors=colours, edgecolors="none", antialiaseds=True)
    )

    _outlines(axes, picture, row, start, end, hairline_s)
    _numbers(axes, picture, seen, level, face, (low, high), width_points)
    axes.set_xlim(low / unit, high / unit)
    axes.set_ylim(rows, 0)
    axes.set_yticks(
        everything + 0.5, [_row_name(picture, i, small) for i in range(rows)], fontsize=8 if rows <= 24 else 6
    )
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time ({picture.axis.unit})", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(title, loc="left", fontsize=10 if small else 12)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _row_name(picture: _Picture, index: int, small: bool) -> str:
    return f"{picture.places[index]}" if small else f"stage {picture.places[index]} (rank {picture.ranks[index]})"


def _outlines(axes: Axes, picture: _Picture, row: Ints, start: Floats, end: Floats, seconds_per_point: float) -> None:
    """White lines between boxes that are wide enough to afford them."""
    from matplotlib.collections import LineCollection

    wide = (end - start) > 4 * seconds_per_point
    x = start[wide] / picture.axis.seconds
    y0, y1 = row[wide] + 0.05, row[wide] + 0.05 + picture.bar_height
    segments = np.stack((np.stack((x, y0), -1), np.stack((x, y1), -1)), 1)
    axes.add_collection(LineCollection(list(segments), colors="white", linewidths=0.6))


def _numbers(
    axes: Axes,
    picture: _Picture,
    seen: np.ndarray[Any, np.dtype[np.bool_]],
    level: Floats,
    face: Sequence[str],
    window: tuple[float, float],
    width_points: float,
) -> None:
    """Micro-batch numbers in the boxes that they fit in."""
    boxes = picture.boxes
    start, end = np.maximum(boxes.start_s[seen], window[0]), np.minimum(boxes.end_s[seen], window[1])
    microbatch = boxes.microbatch[seen]
    points = (end - start) / (window[1] - window[0]) * width_points
    fits = np.flatnonzero((microbatch >= 0) & (points >= _number_points(picture) * 0.98))
    if len(fits) < 0.2 * len(microbatch):
        return  # a number here and there says less than none
    for index in fits.tolist():
        axes.text(
            (start[index] + end[index]) / 2 / picture.axis.seconds,
            boxes.row[seen][index] + 0.05 + level[index] / 2,
            str(microbatch[index]),
            ha="center", va="center", fontsize=_FONT, color=_ink(face[index]), clip_on=True,
        )  # fmt: skip


def _shades(picture: _Picture) -> dict[tuple[str, int], str]:
    """Colour of every phase and chunk: later chunks are lighter."""
    return {
        (phase, chunk): _lighter(colour, 0.6 * chunk / max(picture.chunks - 1, 1))
        for phase, colour in _PHASE_COLOUR.items()
        for chunk in range(picture.chunks)
    }


def _lighter(colour: str, share: float) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02X}" for part in parts)


def _ink(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 125 else "white"


def _legend(*pictures: _Picture) -> tuple[list[Any], str]:
    """What the colours of the pictures mean, and a line on how boxes are divided."""
    from matplotlib.patches import Patch

    phases = {str(phase) for picture in pictures for phase in np.unique(picture.boxes.phase)}
    names = dict(_PHASE_NAME)
    if {"B", "I"} <= phases:  # of one colour
        names["B"] = "backward, or its input gradient"
        del names["I"]
    handles = [Patch(facecolor=_PHASE_COLOUR[phase], label=name) for phase, name in names.items() if phase in phases]
    stacked = False
    for kind, name in _SHARE_NAME.items():
        inside = any(p.boxes.share[:, CATEGORIES.index(kind)].any() for p in pictures)
        stacked |= inside
        if inside or any(kind in p.lanes for p in pictures):
            handles.append(Patch(facecolor=_SHARE_COLOUR[kind], label=name))
    if any(picture.idles for picture in pictures):
        handles.append(Patch(facecolor=_IDLE_COLOUR, label="idle"))
    if any(picture.chunks > 1 for picture in pictures):
        handles.append(Patch(facecolor=_lighter(_PHASE_COLOUR["F"], 0.6), label="lighter: the rank's other chunks"))
    return handles, "colours stacked in a box are shares of its time" if stacked else ""
