"""Pictures of a sweep: a line or bars for one dimension of points, a heat map for two.

Of more dimensions the first two are drawn, each cell with the best over all others. Points that do not fit in memory
are hollow or hatched; those without figures are marked. Pictures are drawn without pyplot, as all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from simulator.arrays import Floats
from simulator.output.sweep_figures import FIGURES, ComparedFigure, FigureScale
from simulator.output.sweep_table import setting_text, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's colours (jfly.uni-koeln.de/color), told apart with any kind of colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8B5A2B", "#4D4D4D")
_REFUSED = "#8A8A8A"
#: Points of a line, or bars, that have their value beside them.
_MOST_TOLD = 16
#: Cells of a heat map, across or down, that have their value in them.
_MOST_CELLS = 16


@dataclass(frozen=True)
class SweptKeys:
    """A dimension of a picture: keys that walk together, and their ``settings``, a tuple of values each.

    A key that a setting leaves out has None.
    """

    keys: tuple[str, ...]
    settings: tuple[tuple[Any, ...], ...]

    @property
    def label(self) -> str:
        """The dotted keys."""
        return ", ".join(self.keys)

    @property
    def texts(self) -> list[str]:
        """Settings as they stand on an axis."""
        return [
            ", ".join(
                "-" if one is None else setting_text(one, key) for key, one in zip(self.keys, values, strict=True)
            )
            for values in self.settings
        ]

    @property
    def numbers(self) -> Floats | None:
        """Values of a single key, where all of them are numbers that differ."""
        values = [one for setting in self.settings for one in setting]
        numeric = all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)
        return np.array(values, dtype=float) if len(self.keys) == 1 and numeric and len(values) > 1 else None


@dataclass(frozen=True)
class SweptValues:
    """A figure of all points: ``values[workload, setting, setting ...]``, NaN where a point has none, and who ``fits``.

    ``name``: the figure. ``drawn``: most dimensions in a picture. ``complete``: all points that were simulated have it.
    """

    workloads: tuple[str, ...]
    dimensions: tuple[SweptKeys, ...]
    values: Floats
    fits: npt.NDArray[np.bool_]
    name: str
    drawn: int = 2
    complete: bool = True

    @property
    def figure(self) -> ComparedFigure:
        """The figure that is drawn."""
        return FIGURES[self.name]

    def reduced(self) -> SweptValues:
        """Return at most two dimensions, each cell with the best of all others; a point that fits is always better.

        Dimensions of one setting are left out.
        """
        wide = [number for number, keys in enumerate(self.dimensions, 1) if len(keys.settings) > 1]
        kept = tuple(wide[: self.drawn])
        rest = tuple(number for number in range(1, self.values.ndim) if number not in kept)
        best = np.fmax if self.figure.larger_is_better else np.fmin
        fitting: Floats = best.reduce(np.where(self.fits, self.values, np.nan), axis=rest)
        unfitting: Floats = best.reduce(np.where(self.fits, np.nan, self.values), axis=rest)
        fits = ~np.isnan(fitting)
        dimensions = tuple(self.dimensions[number - 1] for number in kept)
        return SweptValues(
            self.workloads, dimensions, np.where(fits, fitting, unfitting), fits, self.name, complete=self.complete
        )

    def best(self) -> tuple[int, ...] | None:
        """Return where the best point that fits is; None where none does."""
        values = np.where(self.fits, self.values, np.nan)
        if np.isnan(values).all():
            return None
        place = np.nanargmax(values) if self.figure.larger_is_better else np.nanargmin(values)
        return tuple(int(at) for at in np.unravel_index(place, values.shape))

    def title(self) -> str:
        """Return the title of the whole picture: the figure, what each cell is the best of, and the best point."""
        shown, title = self.reduced(), self.figure.label
        rest = [keys for keys in self.dimensions if len(keys.settings) > 1 and keys not in shown.dimensions]
        if rest:
            title = f"{title}, in each cell the best over {'; '.join(keys.label for keys in rest)}"
        at = self.best()
        if at is None:
            return f"{title}\n{self._why_none()}"
        names = short_names([key for keys in self.dimensions for key in keys.keys])
        settings = [
            f"{names[key]} {setting_text(value, key)}"
            for keys, place in zip(self.dimensions, at[1:], strict=True)
            for key, value in zip(keys.keys, keys.settings[place], strict=True)
            if value is not None
        ]
        workload = [self.workloads[at[0]]] if len(self.workloads) > 1 else []
        scale = FigureScale.fitting(self.figure, [float(self.values[at])])
        return f"{title}\nbest: {scale.text(float(self.values[at]))} with {', '.join([*workload, *settings])}"

    def _why_none(self) -> str:
        """Return why no point is the best one."""
        if not self.complete:
            return "no point that fits has this figure"
        return "every point was refused or failed" if np.isnan(self.values).all() else "no point fits in memory"


def sweep_plot(swept: SweptValues) -> Figure:
    """Draw a figure of all points."""
    from matplotlib.figure import Figure

    shown = swept.reduced()
    panels = len(shown.workloads) if len(shown.dimensions) == 2 else 1
    size = _heat_size(shown) if len(shown.dimensions) == 2 else (max(7.0, 0.45 * _bars(shown) + 2.5), 4.8)
    figure = Figure(figsize=(size[0] * panels, size[1]), layout="constrained", dpi=120)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    if len(shown.dimensions) == 2:
        _heat_maps(shown, axes)
    elif shown.dimensions and shown.dimensions[0].numbers is not None:
        _lines(shown, shown.dimensions[0].numbers, axes[0])
    else:
        _draw_bars(shown, axes[0])
    head, _, second = swept.title().partition("\n")
    workload = f"{shown.workloads[0]}: " if len(shown.workloads) == 1 else ""
    figure.suptitle(f"{workload}{head}\n{second}", x=0.012, ha="left", fontsize=11, parse_math=False)
    return figure


def _bars(shown: SweptValues) -> int:
    return int(shown.values.size)


def _heat_size(shown: SweptValues) -> tuple[float, float]:
    down, across = shown.values.shape[1:]
    return min(max(5.5, 1.0 * across + 3.0), 16.0), min(max(3.6, 0.62 * down + 2.2), 14.0)


def _scale(shown: SweptValues, digits: int = 3) -> FigureScale:
    return FigureScale.fitting(shown.figure, shown.values[~np.isnan(shown.values)].tolist(), digits)


def _axis_label(shown: SweptValues, scale: FigureScale) -> str:
    return shown.figure.label + (f" ({scale.unit.strip()})" if scale.unit else "")


def _lines(shown: SweptValues, numbers: Floats, axes: Axes) -> None:
    """Draw a line per workload over a numeric key, on a logarithmic axis where the key's values grow by factors."""
    scale, order = _scale(shown), np.argsort(numbers)
    x = numbers[order]
    for workload, colour in zip(range(len(shown.workloads)), _cycle(len(shown.workloads)), strict=True):
        y, fits = shown.values[workload, order] / scale.size, shown.fits[workload, order]
        there = ~np.isnan(y)
        axes.plot(x[there], y[there], color=colour, lw=1.8, zorder=2)
        for chosen, face in ((there & fits, colour), (there & ~fits, "white")):
            axes.plot(x[chosen], y[chosen], "o", ms=7, mfc=face, mec=colour, mew=1.6, zorder=3)
        if len(x) <= _MOST_TOLD and len(shown.workloads) == 1:
            _tell(axes, x[there], y[there], scale)
        axes.plot(x[~there], np.zeros(int((~there).sum())), "x", ms=8, mew=1.8, color=_REFUSED, clip_on=False, zorder=4)
    if x[0] > 0 and x[-1] / x[0] >= 4 and len(x) > 2:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    keys = shown.dimensions[0]
    axes.margins(x=0.12)
    axes.set_xticks(x, [keys.texts[place] for place in order])
    _upright(axes, keys.label, _axis_label(shown, scale), shown)


def _tell(axes: Axes, x: Floats, y: Floats, scale: FigureScale) -> None:
    """Write values beside the points of a line, on the side on which the line does not pass."""
    slopes = np.gradient(y) if len(y) > 1 else np.zeros(len(y))
    for at, value, slope in zip(x, y, slopes, strict=True):
        side: Literal["left", "right"] = "right" if slope > 0 else "left"
        shift = (-6 if slope > 0 else 6, 5)
        text = f"{value:,.{scale.decimals}f}"
        axes.annotate(text, (at, value), shift, textcoords="offset points", ha=side, fontsize=9)


def _draw_bars(shown: SweptValues, axes: Axes) -> None:
    """Draw a group of bars for every setting, a bar per workload; hatched where it does not fit."""
    scale, n = _scale(shown), len(shown.workloads)
    values = shown.values.reshape(n, -1) / scale.size
    fits = shown.fits.reshape(n, -1)
    width = 0.8 / n
    for workload, colour in zip(range(n), _cycle(n), strict=True):
        x = np.arange(values.shape[1]) + (workload - (n - 1) / 2) * width
        there = ~np.isnan(values[workload])
        for chosen, hatch in ((there & fits[workload], None), (there & ~fits[workload], "////")):
            face = "white" if hatch else colour
            axes.bar(
                x[chosen], values[workload, chosen], 0.92 * width, color=face, edgecolor=colour, hatch=hatch, zorder=2
            )
        axes.plot(x[~there], np.zeros(int((~there).sum())), "x", ms=8, mew=1.8, color=_REFUSED, clip_on=False, zorder=4)
        if values.size <= _MOST_TOLD:
            for at, value in zip(x[there], values[workload, there], strict=True):
                text = f"{value:,.{scale.decimals}f}"
                axes.annotate(text, (at, value), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    texts = shown.dimensions[0].texts if shown.dimensions else [""]
    long = max(map(len, texts)) * len(texts) > 90
    axes.set_xticks(range(len(texts)), texts, rotation=35 if long else 0, ha="right" if long else "center")
    _upright(axes, shown.dimensions[0].label if shown.dimensions else "", _axis_label(shown, scale), shown)


def _upright(axes: Axes, across: str, up: str, shown: SweptValues) -> None:
    """Finish a diagram whose figure stands upright, from 0; a legend says what is drawn beside plain marks."""
    from matplotlib.patches import Patch

    axes.set_xlabel(across)
    axes.set_ylabel(up)
    if not (shown.values < 0).any():
        axes.set_ylim(0.0, 1.12 * axes.dataLim.y1 if axes.dataLim.y1 > 0 else 1.0)
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.grid(axis="y", color="#DDDDDD", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    colours = zip(shown.workloads, _cycle(len(shown.workloads)), strict=True)
    marks = [*((Patch(color=colour), name) for name, colour in colours if len(shown.workloads) > 1), *_marks(shown)]
    if marks:
        handles, labels = zip(*marks, strict=True)
        axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _marks(shown: SweptValues) -> list[tuple[Any, str]]:
    """Return what stands for points that do not fit, and for those without figures, where there are any."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    missing = np.isnan(shown.values)
    marks: list[tuple[Any, str]] = []
    if (~missing & ~shown.fits).any():
        marks.append((Patch(fc="white", ec="#4D4D4D", hatch="////"), "does not fit in memory"))
        if shown.dimensions and shown.dimensions[0].numbers is not None:
            marks[-1] = (Line2D([], [], ls="", marker="o", mfc="white", mec="#4D4D4D", mew=1.6), marks[-1][1])
    if missing.any():
        marks.append(
            (
                Line2D([], [], ls="", marker="x", mew=1.8, ms=8, color=_REFUSED),
                "refused or failed" if shown.complete else "without this figure",
            )
        )
    return marks


def _cycle(count: int) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]


def _heat_maps(shown: SweptValues, panels: Sequence[Axes]) -> None:
    """Draw a heat map per workload, in one range of colours: yellow is good, dark blue is not.

    Colours are those of points that fit; the others are grey.
    """
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import LogLocator

    scale = _scale(shown)
    values = shown.values / scale.size
    there = values[shown.fits]
    low, high = (float(there.min()), float(there.max())) if there.size else (0.0, 1.0)
    norm = LogNorm(low, high) if low > 0 and high / low > 8 else Normalize(low, high)
    colours = "viridis" if shown.figure.larger_is_better else "viridis_r"
    best = shown.best()
    down, across = shown.dimensions
    mesh = None
    for workload, axes in enumerate(panels):
        fitting = np.ma.masked_where(~shown.fits[workload], values[workload])
        mesh = axes.pcolormesh(fitting, norm=norm, cmap=colours, edgecolors="white", linewidth=1.5)
        absent = "refused or\nfailed" if shown.complete else "no figure"
        _cells(axes, values[workload], shown.fits[workload], scale, mesh, absent)
        if best is not None and best[0] == workload:
            _frame(axes, best[1], best[2])
        axes.set_xticks(np.arange(len(across.texts)) + 0.5, across.texts, rotation=_tilt(across))
        axes.set_yticks(np.arange(len(down.texts)) + 0.5, down.texts)
        axes.tick_params(length=0)
        axes.set_xlabel(across.label)
        axes.set_ylabel(down.label)
        axes.spines[:].set_visible(False)
        if len(panels) > 1:
            axes.set_title(shown.workloads[workload], loc="left", fontsize=10, parse_math=False)
    figure = panels[0].get_figure(root=True)
    assert figure is not None
    assert mesh is not None
    marks: dict[str, Any] = (
        {"ticks": LogLocator(subs=(1.0, 2.0, 5.0)), "format": "%g"} if isinstance(norm, LogNorm) else {}
    )
    bar = figure.colorbar(mesh, ax=list(panels), label=_axis_label(shown, scale), pad=0.02, **marks)
    bar.minorticks_off()
    bar.outline.set_visible(False)


def _tilt(keys: SweptKeys) -> int:
    return 35 if max(map(len, keys.texts)) > 8 else 0


def _cells(axes: Axes, values: Floats, fits: npt.NDArray[np.bool_], scale: FigureScale, mesh: Any, absent: str) -> None:
    """Write values into cells, where there is room; hatch cells that do not fit in memory, leave others grey.

    ``absent``: what is written where there is no value.
    """
    from matplotlib.patches import Rectangle

    has_room = max(values.shape) <= _MOST_CELLS
    for (row, column), value in np.ndenumerate(values):
        text, ink = f"{value:,.{scale.decimals}f}", "#555555"
        if fits[row, column]:
            red, green, blue, _ = mesh.cmap(mesh.norm(value))
            ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
        else:
            hatch = None if np.isnan(value) else "//"
            text = absent if np.isnan(value) else f"{text}\ndoes not fit"
            axes.add_patch(Rectangle((column, row), 1, 1, fc="#ECECEC", ec="white", hatch=hatch, lw=1.5))
        if has_room:
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=9, color=ink)


def _frame(axes: Axes, row: int, column: int) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((column, row), 1, 1, fill=False, ec=_COLOURS[1], lw=3, zorder=5, clip_on=False))
