"""Gantt charts of Timelines: a row per pipeline stage, a box per forward and backward, thin lanes for communication.

They are drawn with matplotlib's objects, without pyplot, which needs no display and leaves no state behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.errors import InputError
from simulator.output.files import PICTURES, writing
from simulator.output.gantt_boxes import Picture, TimeAxis, usual_box_s
from simulator.output.gantt_panel import (
    IDLE_COLOUR,
    PANEL_POINTS,
    PHASE_COLOUR,
    SHARE_COLOUR,
    is_short,
    lighter,
    number_points,
    panel,
)
from simulator.timeline import CATEGORIES, Timeline
from simulator.units import format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PHASE_NAME = {
    "F": "forward", "B": "backward", "I": "backward: input gradient", "W": "backward: weight gradient",
    "O": "optimizer",
}  # fmt: skip
_SHARE_NAME = {
    "recompute": "recompute", "tp": "tp communication", "cp": "cp communication", "ep": "ep communication",
    "pp": "pp hand-over", "dp": "dp communication", "offload": "copies to and from the host",
}  # fmt: skip
_WIDTH_IN, _DPI = 16.0, 120
_LEGEND_COLUMNS = 7  # entries that fit side by side
#: Largest share of a step that its enlarged beginning and end may show.
_MOST_ZOOMED = 0.8


def gantt(timeline: Timeline, axes: Axes | None = None, *, title: str = "", unit: str = "") -> Figure:
    """Draw ``timeline``: a row per pipeline stage, of one of its ranks.

    A box is one micro-batch's forward or backward on a stage. Heights of colours in it are shares of its time spent on
    recompute and in-line communication. Shades tell the chunks of a rank apart, numbers the micro-batches where they
    fit. Lanes under the boxes hold hand-overs and gradient reduction at their true times. Idle time is grey. In a
    steady state every rank's period is drawn where it lies in time.

    A step of too many boxes for numbers gets two more panels, its beginning and its end. With ``axes`` the whole step
    alone is drawn, into them. ``unit``: unit of the time axis where it is not seconds (costs of a bare schedule).
    """
    picture = Picture.arrange(timeline, unit)
    if axes is not None:
        panel(axes, picture, (0.0, picture.length_s), title)
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
    panel(whole, picture, (0.0, picture.length_s), title or f"step time {format_time(timeline.step_time_s)}")
    for zoom, (name, window) in zip(zooms, windows, strict=True):
        panel(zoom, picture, window, name, small=True)
        low, high = (edge / picture.axis.seconds for edge in window)
        whole.axvspan(low, high, facecolor="none", edgecolor="black", lw=1.0, zorder=5)
    return figure


def compare_gantt(timelines: Mapping[str, Timeline], *, unit: str = "") -> Figure:
    """Draw several Timelines below each other on one time axis, titled by name. ``unit``: as for `gantt`."""
    longest = max(timeline.length_s for timeline in timelines.values())
    axis = TimeAxis.fit(longest, unit)
    pictures = [replace(Picture.arrange(timeline, unit), axis=axis) for timeline in timelines.values()]
    figure, panels = _figure([max(len(p.ranks) * 0.4, 0.8) for p in pictures], [1] * len(pictures), _legend(*pictures))
    for axes, picture, title in zip(panels, pictures, timelines, strict=True):
        panel(axes, picture, (0.0, longest), title)
    return figure


def _figure(
    heights_in: Sequence[float], columns: Sequence[int], legend: tuple[list[Any], str]
) -> tuple[Figure, list[Axes]]:
    """Return a figure of rows of panels over a legend, with room for titles and axes.

    ``heights_in``: height of each row, inches. ``columns``: panels in each row. The layout is computed here, as
    matplotlib's constrained layout draws everything twice for the same result.
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


def zoom_s(picture: Picture) -> float:
    """Return the seconds of a step that half a picture's width shows with numbers in its boxes; 0 for no such part.

    There is none where numbers fit into the whole, for a single micro-batch, and where two such parts would show nearly
    all of the step.
    """
    boxes = picture.boxes
    if len(np.unique(boxes.microbatch[boxes.microbatch >= 0])) < 2:
        return 0.0
    room = number_points(picture)
    usual = usual_box_s(boxes)
    if usual / picture.length_s * PANEL_POINTS >= room:
        return 0.0
    window = usual * (PANEL_POINTS / 2) / room
    return 0.0 if 2 * window > _MOST_ZOOMED * picture.length_s else window


def _zoom_windows(picture: Picture) -> list[tuple[str, tuple[float, float]]]:
    """Return names and windows of the enlarged parts of the step: its beginning and its end, or none."""
    window, microbatch = zoom_s(picture), picture.boxes.microbatch
    if not window:
        return []
    last = float(picture.boxes.end_s[microbatch >= 0].max())
    begin = max(min(picture.length_s - window, last - 0.7 * window), 0.0)
    return [("the beginning", (0.0, window)), ("the end", (begin, picture.length_s))]


def _legend(*pictures: Picture) -> tuple[list[Any], str]:
    """Return legend entries for the colours of the pictures, and a line on how boxes are divided."""
    from matplotlib.patches import Patch

    phases = {str(phase) for picture in pictures for phase in np.unique(picture.boxes.phase)}
    names = dict(_PHASE_NAME)
    if {"B", "I"} <= phases:  # of one colour
        names["B"] = "backward, or its input gradient"
        del names["I"]
    handles = [Patch(facecolor=PHASE_COLOUR[phase], label=name) for phase, name in names.items() if phase in phases]
    stacked = False
    for kind, name in _SHARE_NAME.items():
        inside = any(p.boxes.share[:, CATEGORIES.index(kind)].any() for p in pictures)
        stacked |= inside
        if inside or any(kind in p.lanes for p in pictures):
            handles.append(Patch(facecolor=SHARE_COLOUR[kind], label=name))
    if any(picture.idles for picture in pictures):
        handles.append(Patch(facecolor=IDLE_COLOUR, label="idle"))
    if any(picture.chunks > 1 for picture in pictures):
        handles.append(Patch(facecolor=lighter(PHASE_COLOUR["F"], 0.6), label="lighter: the rank's other chunks"))
    notes = ["colours stacked in a box are shares of its time"] if stacked else []
    if any(_has_short_bars(picture) for picture in pictures):
        notes.append("pale lanes: short transfers, by the share of time that they fill")
    if any(_names_layers(picture) for picture in pictures):
        notes.append("L1, L2, ..: layers whose weights are gathered one by one")
    return handles, "; ".join(notes)


def _has_short_bars(picture: Picture) -> bool:
    """Tell whether transfers are too short to be drawn one by one in the picture of the whole."""
    seconds_per_point = picture.length_s / PANEL_POINTS
    return any(is_short(start, end, seconds_per_point).any() for _, start, end in picture.lanes.values())


def _names_layers(picture: Picture) -> bool:
    """Tell whether layers are named in boxes: those of a single micro-batch."""
    boxes = picture.boxes
    return bool(boxes.layer.any()) and len(np.unique(boxes.microbatch[boxes.microbatch >= 0])) < 2
