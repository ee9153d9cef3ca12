"""Functions that draw a result into axes of matplotlib: ``ax`` where given, else those of a new figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.errors import InputError
from simulator.output.bar_plots import bar_plot, new_axes
from simulator.output.layout_plot import layout_plot
from simulator.output.page.sections import link_bars, path_bars, time_bars
from simulator.results import TimelineResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from simulator.searching.result import SearchResult
    from simulator.step_result import StepResult


def _step(result: StepResult, name: str) -> StepResult:
    """Return the result of a step. Raises `InputError` for any other, of which the picture ``name`` is none."""
    from simulator.step_result import StepResult

    if not isinstance(result, StepResult):
        raise _other_result(result, name, "simulator.run")
    return result


def _other_result(result: object, name: str, makers: str) -> InputError:
    """Return the error of a picture ``name`` of a result that ``makers`` did not make."""
    return InputError("draws another kind of result", file=f"plot.{name}", found=type(result).__name__, allowed=makers)


def gantt(result: TimelineResult, ax: Axes | None = None) -> Axes:
    """Draw the Timeline, a row per pipeline stage."""
    if not isinstance(result, TimelineResult):
        raise _other_result(result, "gantt", "simulator.run or simulator.schedule")
    axes = new_axes(14.0, 5.0) if ax is None else ax
    result.gantt(axes)
    return axes


def memory(result: StepResult, ax: Axes | None = None) -> Axes:
    """Draw the fullest GPU's memory over the step."""
    axes = new_axes(11.0, 4.5) if ax is None else ax
    _step(result, "memory").memory(axes)
    return axes


def time_breakdown(result: StepResult, ax: Axes | None = None) -> Axes:
    """Draw where a GPU's time goes, mean over GPUs."""
    return bar_plot(time_bars(_step(result, "time_breakdown").report), "Where a GPU's time goes (mean over GPUs)", ax)


def critical_path(result: StepResult, ax: Axes | None = None) -> Axes:
    """Draw what the step's length is made of."""
    return bar_plot(path_bars(_step(result, "critical_path").report), "What bounds the step (critical path)", ax)


def links(result: StepResult, ax: Axes | None = None) -> Axes:
    """Draw the busiest links, by the share of the step in which they would be full."""
    return bar_plot(
        link_bars(_step(result, "links").report), "Busiest links, by the share of the step that they would be full", ax
    )


def layouts(result: SearchResult, ax: Axes | None = None) -> Axes:
    """Draw a search's simulated layouts by step time and memory left, and join those that none other beats in both."""
    if getattr(result, "command", None) != "search":
        raise _other_result(result, "layouts", "simulator.search")
    simulated = [row for row in result.rows if row.get("fits") is not None]
    return layout_plot(result.view(), simulated, ax)
