"""One panel of a Gantt chart: a row per rank, in a window of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.output.gantt_boxes import GAP, STRIP, Picture
from simulator.timeline import CATEGORIES, COMMUNICATION, Floats, Ints

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


def number_points(picture: Picture) -> float:
    """Width that the longest micro-batch number takes, points."""
    return (len(str(int(picture.boxes.microbatch.max(initial=0)))) + 0.6) * _POINTS_PER_DIGIT


def panel(axes: Axes, picture: Picture, window: tuple[float, float], title: str, *, small: bool = False) -> None:
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
    add(everything, picture.opens_s, picture.closes_s, 0.0, height, IDLE_COLOUR)
    boxes = picture.boxes
    seen = (boxes.end_s >= low) & (boxes.start_s <= high)
    row, start, end = boxes.row[seen], boxes.start_s[seen], boxes.end_s[seen]
    shades = _shades(picture)
    face = [
        shades[phase, chunk]
        for phase, chunk in zip(boxes.phase[seen].tolist(), boxes.chunk[seen].tolist(), strict=True)
    ]
    # Rows run downwards: what is drawn at the bottom of a box has the larger ordinate.
    inside = [c for c in ("recompute", *COMMUNICATION) if boxes.share[seen][:, CATEGORIES.index(c)].any()]
    level = np.full(len(row), height)
    for kind in reversed(inside):
        part = boxes.share[seen][:, CATEGORIES.index(kind)] * height
        some = part > 0
        add(row[some], start[some], end[some], (level - part)[some], level[some], SHARE_COLOUR[kind])
        level = level - part
    idle = np.clip(1 - boxes.share[seen].sum(axis=1), 0, 1) * height
    add(row, start, end, np.minimum(idle, level), level, face)
    width_points = PANEL_POINTS / 2 if small else PANEL_POINTS
    hairline_s = (
        high - low
    ) / width_points  # a hand-over much shorter than a point would show here and there by chance
    for number, (kind, (lane_row, lane_start, lane_end)) in enumerate(picture.lanes.items()):
        shown = (lane_end >= low) & (lane_start <= high)
        top = height + GAP + number * (STRIP + GAP)
        lane_end = np.maximum(lane_end, lane_start + hairline_s)
        add(lane_row[shown], lane_start[shown], lane_end[shown], top, top + STRIP, SHARE_COLOUR[kind])
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


def _row_name(picture: Picture, index: int, small: bool) -> str:
    return f"{picture.places[index]}" if small else f"stage {picture.places[index]} (rank {picture.ranks[index]})"


def _outlines(axes: Axes, picture: Picture, row: Ints, start: Floats, end: Floats, seconds_per_point: float) -> None:
    """White lines between boxes that are wide enough to afford them."""
    from matplotlib.collections import LineCollection

    wide = (end - start) > 4 * seconds_per_point
    x = start[wide] / picture.axis.seconds
    y0, y1 = row[wide] + 0.05, row[wide] + 0.05 + picture.bar_height
    segments = np.stack((np.stack((x, y0), -1), np.stack((x, y1), -1)), 1)
    axes.add_collection(LineCollection(list(segments), colors="white", linewidths=0.6))


def _numbers(
    axes: Axes,
    picture: Picture,
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
    if len(np.unique(boxes.microbatch[boxes.microbatch >= 0])) < 2:
        return  # of one micro-batch alone the number tells nothing apart
    fits = np.flatnonzero((microbatch >= 0) & (points >= number_points(picture) * 0.98))
    if len(fits) < 0.2 * len(microbatch):
        return  # a number here and there says less than none
    for index in fits.tolist():
        axes.text(
            (start[index] + end[index]) / 2 / picture.axis.seconds,
            boxes.row[seen][index] + 0.05 + level[index] / 2,
            str(microbatch[index]),
            ha="center", va="center", fontsize=_FONT, color=_ink(face[index]), clip_on=True,
        )  # fmt: skip


def _shades(picture: Picture) -> dict[tuple[str, int], str]:
    """Colour of every phase and chunk: later chunks are lighter."""
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
