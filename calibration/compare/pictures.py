"""Pictures of a comparison: step times, every figure of every run, classes of kernels. Functions of comparison.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.compare.comparison import JUDGED, ComparedRun, class_s, error, peak_bytes
from simulator.output.files import writing
from simulator.units import GiB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, as in `simulator.output.gantt`.
MEASURED, SIMULATED, PREDICTED = "#4D4D4D", "#0072B2", "#D55E00"
_BAND = "#E8F1F6"
_DPI = 130
#: So many runs at most stand one below another.
_IN_A_COLUMN = 40


def draw(comparison: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the pictures by name: step_times, figures, classes; none where no run could be compared."""
    rows = [row for row in map(ComparedRun.from_dict, comparison["rows"]) if row.measured and row.simulated]
    if not rows:
        return {}
    return {"step_times": step_times(rows), "figures": figures(rows), "classes": classes(rows)}


def save(figure: Figure, path: Path) -> None:
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=_DPI)


def step_times(rows: Sequence[ComparedRun]) -> Figure:
    """Simulated over measured step time, and the error of every run, the largest too much first."""
    columns = -(-len(rows) // _IN_A_COLUMN)
    lines = -(-len(rows) // columns)
    figure = new_figure(6.0 + 5.5 * columns, max(4.2, 1.4 + 0.18 * lines))
    left, *beside = figure.subplots(1, 1 + columns, width_ratios=(1.1, *([1.0] * columns)))
    times = [(row.measured.step_time_s, row.simulated.step_time_s) for row in rows if row.measured and row.simulated]
    _agreement(left, [(m * 1e3, s * 1e3) for m, s in times], "step time, ms")
    ordered = sorted(rows, key=_step_error, reverse=True)
    sizes = [abs(_step_error(row)) for row in rows]
    for number, axes in enumerate(beside):
        _errors(axes, ordered[number * lines : (number + 1) * lines], max(8.0, 110 * max(sizes)), lines)
    handles = [_dot(SIMULATED, "simulated")]
    if any(row.committed for row in rows):
        handles.append(_dot(PREDICTED, "simulated, and predicted before the run"))
    figure.legend(handles=handles, loc="outside lower left", ncols=2, fontsize=9, frameon=False)
    mean, largest = sum(sizes) / len(sizes), max(sizes)
    figure.suptitle(
        f"Step time, simulated against measured: {len(rows)} runs, mean error {mean:.1%}, largest {largest:.1%}",
        x=0.01, ha="left", fontsize=12,
    )  # fmt: skip
    return figure


def _errors(axes: Axes, rows: Sequence[ComparedRun], reach: float, lines: int) -> None:
    """Errors of the step time from -``reach`` to ``reach`` %, from above, with room for so many ``lines``."""
    for place, row in enumerate(rows):
        off, colour = 100 * _step_error(row), PREDICTED if row.committed else SIMULATED
        axes.plot([0, off], [place, place], color=colour, lw=1.2)
        axes.plot(off, place, "o", ms=4.5, color=colour)
    axes.axvspan(-4, 4, color=_BAND, zorder=0)
    axes.axvline(0, color=MEASURED, lw=0.8)
    axes.set(xlim=(-reach, reach), ylim=(lines - 0.2, -0.8), xlabel="error of the step time, %  (band: 4 %)")
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=7)
    _bare(axes)


def figures(rows: Sequence[ComparedRun]) -> Figure:
    """A line per run, a panel per figure, measured beside simulated."""
    panels: list[tuple[str, Callable[[ComparedRun], tuple[float | None, float | None]]]] = [
        ("step time, ms", lambda row: _pair(row, lambda f: f.step_time_s * 1e3)),
        ("MFU, %", lambda row: _pair(row, lambda f: None if f.mfu is None else f.mfu * 100)),
        ("peak allocated, GiB", _peak_gib),
        (
            "exposed communication, ms",
            lambda row: _pair(row, lambda f: None if f.exposed_s is None else f.exposed_s * 1e3),
        ),
        ("bubble, %", lambda row: _pair(row, lambda f: None if f.bubble is None else f.bubble * 100)),
    ]
    figure = new_figure(15.0, 1.5 + 0.21 * max(len(rows), 8))
    all_axes = figure.subplots(1, len(panels), sharey=True)
    for axes, (title, values) in zip(all_axes, panels, strict=True):
        for place, row in enumerate(rows):
            measured, simulated = values(row)
            if measured is not None and simulated is not None:
                axes.plot([measured, simulated], [place, place], color="0.7", lw=1.5, zorder=1)
            for value, colour, marker in ((measured, MEASURED, "|"), (simulated, SIMULATED, "o")):
                if value is not None:
                    size, width = (10.0, 2.2) if marker == "|" else (4.5, 0.0)
                    axes.plot(value, place, marker, ms=size, mew=width, color=colour, zorder=2)
        axes.set_xlim(left=0)
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(axis="y", color="0.93", lw=0.7)
        axes.set_axisbelow(True)
        _bare(axes)
    all_axes[0].set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=7)
    all_axes[0].set_ylim(len(rows) - 0.4, -0.6)
    handles = [_dot(MEASURED, "measured", "|"), _dot(SIMULATED, "simulated")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def classes(rows: Sequence[ComparedRun]) -> Figure:
    """Simulated against measured seconds of each class of kernel, a panel each that some run has."""
    both = {name: [class_s(row, name) for row in rows] for name in JUDGED}
    pairs = {name: [(1e3 * real, 1e3 * ours) for real, ours in some if real and ours] for name, some in both.items()}
    drawn = {name: some for name, some in pairs.items() if some}
    columns = min(3, len(drawn)) or 1
    lines = -(-len(drawn) // columns)
    figure = new_figure(3.6 * columns, 3.9 * max(1, lines))
    for place, (name, some) in enumerate(drawn.items(), 1):
        axes = figure.add_subplot(lines, columns, place)
        sizes = [abs(ours / real - 1) for real, ours in some]
        _agreement(axes, some, "ms a step, worst rank")
        summary = f"{len(some)} runs, mean error {sum(sizes) / len(sizes):.1%}, largest {max(sizes):.1%}"
        axes.set_title(f"{name}\n{summary}", fontsize=8.5, loc="left")
    return figure


def _agreement(axes: Axes, pairs: Sequence[tuple[float, float]], unit: str) -> None:
    """Simulated over measured on two equal logarithmic axes, with the line of equality and 10 % beside it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if pairs:
        flat = [value for pair in pairs for value in pair]
        low, high = min(flat) / 1.3, max(flat) * 1.3
        axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color=_BAND, lw=0, zorder=0)
        axes.plot([low, high], [low, high], color=MEASURED, lw=0.8)
        axes.plot(*zip(*pairs, strict=True), "o", ms=4.5, color=SIMULATED, alpha=0.8)
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axes.set_aspect("equal", anchor="N")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 200 else (1.0,)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"measured, {unit}", fontsize=9)
    axes.set_ylabel("simulated  (band: 10 %)", fontsize=9)
    _bare(axes)


def _step_error(row: ComparedRun) -> float:
    assert row.simulated is not None
    assert row.measured is not None
    return error(row.simulated.step_time_s, row.measured.step_time_s) or 0.0


def _pair(row: ComparedRun, figure: Callable[[Any], float | None]) -> tuple[float | None, float | None]:
    return figure(row.measured), figure(row.simulated)


def _peak_gib(row: ComparedRun) -> tuple[float | None, float | None]:
    measured, simulated = peak_bytes(row)
    return measured and measured / GiB, simulated and simulated / GiB


def _label(row: ComparedRun) -> str:
    return f"{row.name}  ({row.n_gpus} GPU{'s' if row.n_gpus > 1 else ''})"


def _dot(colour: str, label: str, marker: str = "o") -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, marker=marker, ls="", ms=9 if marker == "|" else 5, mew=2, label=label)


def _bare(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8)


def new_figure(width: float, height: float) -> Figure:
    """A figure of its own, without pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
