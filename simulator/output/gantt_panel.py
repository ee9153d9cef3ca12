"""Panels of a Gantt chart: a row per rank, in a window of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from simulator.arrays import Bools, Floats, Ints
from simulator.output.gantt_boxes import GAP, STRIP, Boxes, Picture
from simulator.timeline import CATEGORIES, COMMUNICATION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Okabe and Ito's colours (jfly.uni-koeln.de/color), blue darkened: told apart with any kind of colour vision.
PHASE_COLOUR = {"F": "#56B4E9", "B": "#009E73", "I": "#009E73", "W": "#F0E442", "O": "#4D4D4D"}
SHARE_COLOUR = {
    "recompute": "#E69F00",
    "tp": "#CC79A7",
    "cp": "#2A0000",
    "ep": "#956AFF",
    "pp": "#D55E00",
    "dp": "#004C8C",
    "offload": "#8B5A2B",
}
IDLE_COLOUR = "#EDEDED"
#: Width of the panel that shows the whole step.
PANEL_POINTS = 14.4 * 72
_POINTS_PER_DIGIT = 4.6  # width of a digit of the numbers in boxes
_FONT = 7
#: Space above each box, as a share of its row.
_MARGIN = 0.05
#: Least depth of colour, so that a single short transfer is seen.
_FAINTEST = 0.3


def number_points(picture: Picture) -> float:
    """Return the width of the longest micro-batch number, points."""
    return (len(str(int(picture.boxes.microbatch.max(initial=0)))) + 0.6) * _POINTS_PER_DIGIT


class _Rectangles:
    """Coloured rectangles of a panel, drawn as one collection. ``unit_s``: seconds of a unit of the time axis."""

    def __init__(self, unit_s: float) -> None:
        self._unit_s = unit_s
        self._polygons: list[Floats] = []  # rectangles x corners x 2, per call
        self._colours: list[str] = []

    def add(
        self,
        row: Ints,
        start: Floats,
        end: Floats,
        top: Floats | float,
        bottom: Floats | float,
        colour: str | list[str],
    ) -> None:
        """Add a rectangle per entry of ``row``; ``top`` and ``bottom`` are shares of the row, downwards."""
        y0 = np.broadcast_to(row + _MARGIN + top, row.shape)
        y1 = np.broadcast_to(row + _MARGIN + bottom, row.shape)
        x0, x1 = start / self._unit_s, end / self._unit_s
        corners = np.stack(
            (np.stack((x0, y0), -1), np.stack((x1, y0), -1), np.stack((x1, y1), -1), np.stack((x0, y1), -1)), 1
        )
        self._polygons.append(corners)
        self._colours.extend([colour] * len(row) if isinstance(colour, str) else colour)

    def draw(self, axes: Axes) -> None:
        from matplotlib.collections import PolyCollection

        polygons = list(np.concatenate(self._polygons))
        axes.add_collection(PolyCollection(polygons, facecolors=self._colours, edgecolors="none", antialiaseds=True))


def panel(axes: Axes, picture: Picture, window: tuple[float, float], title: str, *, small: bool = False) -> None:
    """Draw the part of a picture in ``window`` (seconds)."""
    low, high = window
    width_points = PANEL_POINTS / 2 if small else PANEL_POINTS
    seconds_per_point = (high - low) / width_points
    visible = (picture.boxes.end_s >= low) & (picture.boxes.start_s <= high)
    colour_of = shades(picture)
    phases, chunks = picture.boxes.phase[visible].tolist(), picture.boxes.chunk[visible].tolist()
    colours = [colour_of[key] for key in zip(phases, chunks, strict=True)]
    rectangles = _Rectangles(picture.axis.seconds)
    rectangles.add(
        np.arange(len(picture.ranks)), picture.opens_s, picture.closes_s, 0.0, picture.bar_height, IDLE_COLOUR
    )
    level = _add_boxes(rectangles, picture, visible, colours)
    _add_lanes(rectangles, picture, window, seconds_per_point)
    rectangles.draw(axes)
    _outlines(axes, picture, visible, seconds_per_point)
    _numbers(axes, picture, visible, level, colours, window, width_points)
    _set_axes(axes, picture, window, title, small)


def _add_boxes(rectangles: _Rectangles, picture: Picture, visible: Bools, colours: list[str]) -> Floats:
    """Add the ``visible`` boxes, divided by the shares of their time; return the height of each one's main colour."""
    boxes, height = picture.boxes, picture.bar_height
    row, start, end, share = boxes.row[visible], boxes.start_s[visible], boxes.end_s[visible], boxes.share[visible]
    # Rows run downwards: the bottom of a box has the larger ordinate.
    kinds = [kind for kind in ("recompute", *COMMUNICATION) if share[:, CATEGORIES.index(kind)].any()]
    level = np.full(len(row), height)
    for kind in reversed(kinds):
        part = share[:, CATEGORIES.index(kind)] * height
        boxed = part > 0
        rectangles.add(row[boxed], start[boxed], end[boxed], (level - part)[boxed], level[boxed], SHARE_COLOUR[kind])
        level = level - part
    idle = np.clip(1 - share.sum(axis=1), 0, 1) * height
    rectangles.add(row, start, end, np.minimum(idle, level), level, colours)
    return level


def _add_lanes(
    rectangles: _Rectangles, picture: Picture, window: tuple[float, float], seconds_per_point: float
) -> None:
    """Add the bars of communication lanes; of bars shorter than a point the points are shaded by the time filled."""
    low, high = window
    for number, (kind, (row, start, end)) in enumerate(picture.lanes.items()):
        top = picture.bar_height + GAP + number * (STRIP + GAP)
        colour = SHARE_COLOUR[kind]
        visible = (end >= low) & (start <= high)
        short = visible & is_short(start, end, seconds_per_point)
        place, point, filled = filled_points(row[short], start[short] - low, end[short] - low, seconds_per_point)
        shades = [lighter(colour, 1 - max(share, _FAINTEST)) for share in filled.tolist()]
        begin = (low + point * seconds_per_point).astype(np.float64)
        end_of_point = (low + (point + 1) * seconds_per_point).astype(np.float64)
        rectangles.add(place, begin, end_of_point, top, top + STRIP, shades)
        long = visible & ~short
        rectangles.add(row[long], start[long], end[long], top, top + STRIP, colour)


def is_short(start: Floats, end: Floats, seconds_per_point: float) -> Bools:
    """Return which bars are too short to be drawn by themselves."""
    return end - start < seconds_per_point


def filled_points(row: Ints, start: Floats, end: Floats, seconds_per_point: float) -> tuple[Ints, Ints, Floats]:
    """Return the points of rows that bars reach into, as row and number, and the share of each that bars fill.

    No bar is longer than a point, so that each reaches into two at most.
    """
    first = np.floor(start / seconds_per_point).astype(np.int64)
    edge = (first + 1) * seconds_per_point
    inside, beyond = np.minimum(end, edge) - start, np.maximum(end - edge, 0.0)
    rows, points = np.concatenate((row, row)), np.concatenate((first, first + 1))
    seconds = np.concatenate((inside, beyond))
    cells = np.stack((rows, points), axis=1)[seconds > 0]
    distinct, number = np.unique(cells, axis=0, return_inverse=True)
    filled = np.bincount(number, weights=seconds[seconds > 0], minlength=len(distinct)) / seconds_per_point
    return distinct[:, 0], distinct[:, 1], np.minimum(filled, 1.0)


def _set_axes(axes: Axes, picture: Picture, window: tuple[float, float], title: str, small: bool) -> None:
    """Set limits, ticks, labels and title of a panel."""
    rows = len(picture.ranks)
    axes.set_xlim(window[0] / picture.axis.seconds, window[1] / picture.axis.seconds)
    axes.set_ylim(rows, 0)
    short = picture.ranks if picture.chunks > 1 else picture.stages
    names = [str(short[row]) if small else row_name(picture, row) for row in range(rows)]
    axes.set_yticks(np.arange(rows) + 0.5, names, fontsize=8 if rows <= 24 else 6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time ({picture.axis.unit})", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(title, loc="left", fontsize=10 if small else 12)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def row_name(picture: Picture, row: int) -> str:
    """Return the name of a row: its rank, and its stage where the rank has one alone."""
    if picture.chunks > 1:
        return f"rank {picture.ranks[row]}"
    return f"stage {picture.stages[row]} (rank {picture.ranks[row]})"


def _outlines(axes: Axes, picture: Picture, visible: Bools, seconds_per_point: float) -> None:
    """Draw white lines between boxes of more than four points."""
    from matplotlib.collections import LineCollection

    boxes = picture.boxes
    wide = visible & (boxes.end_s - boxes.start_s > 4 * seconds_per_point)
    x = boxes.start_s[wide] / picture.axis.seconds
    y0 = boxes.row[wide] + _MARGIN
    y1 = y0 + picture.bar_height
    segments = np.stack((np.stack((x, y0), -1), np.stack((x, y1), -1)), 1)
    axes.add_collection(LineCollection(list(segments), colors="white", linewidths=0.6))


def _numbers(
    axes: Axes,
    picture: Picture,
    visible: Bools,
    level: Floats,
    colours: Sequence[str],
    window: tuple[float, float],
    width_points: float,
) -> None:
    """Write micro-batch numbers into boxes where they fit; none for a single micro-batch or where few fit.

    For a single micro-batch whose layers are gathered one by one, the layers' names stand there.
    """
    boxes = picture.boxes
    start, end = np.maximum(boxes.start_s[visible], window[0]), np.minimum(boxes.end_s[visible], window[1])
    points = (end - start) / (window[1] - window[0]) * width_points
    texts = _texts(boxes, visible)
    room = np.array([(len(text) + 0.6) * _POINTS_PER_DIGIT for text in texts])
    if (boxes.layer == 0).all():
        room = np.full(len(texts), number_points(picture))
    named = np.array([bool(text) for text in texts], dtype=bool)
    fits = np.flatnonzero(named & (points >= room * 0.98))
    if len(fits) < 0.2 * len(texts):
        return
    for index in fits.tolist():
        axes.text(
            (start[index] + end[index]) / 2 / picture.axis.seconds,
            boxes.row[visible][index] + _MARGIN + level[index] / 2,
            texts[index],
            ha="center", va="center", fontsize=_FONT, color=_ink(colours[index]), clip_on=True,
        )  # fmt: skip


def _texts(boxes: Boxes, visible: Bools) -> list[str]:
    """Return what stands in each visible box: its micro-batch, or its layer where there is one micro-batch alone."""
    numbers = np.unique(boxes.microbatch[boxes.microbatch >= 0])
    if len(numbers) >= 2:
        return [str(number) if number >= 0 else "" for number in boxes.microbatch[visible].tolist()]
    return [f"L{layer}" if layer else "" for layer in boxes.layer[visible].tolist()]


def shades(picture: Picture) -> dict[tuple[str, int], str]:
    """Return the colour of every phase and chunk: later chunks are lighter."""
    return {
        (phase, chunk): lighter(colour, 0.6 * chunk / max(picture.chunks - 1, 1))
        for phase, colour in PHASE_COLOUR.items()
        for chunk in range(picture.chunks)
    }


def lighter(colour: str, share: float) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02X}" for part in parts)


def _ink(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 125 else "white"
