"""Tables of a plan for a terminal: the best layout on each number of GPUs, those without one, and the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simulator.output.fitted_table import Column, FittedTable
from simulator.output.search_table import (
    LAYOUT_FIGURES,
    SearchRow,
    figure_cell,
    figure_cells,
    figure_heads,
    figure_scales,
)
from simulator.output.sweep_figures import FIGURES, headroom_note, interval_note
from simulator.output.sweep_table import setting_text, short_names

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Figures that have a column where some row has them.
_OF_RUNS = ("days", "gpu_hours", "cost")
#: Figures of the Pareto front.
_OF_FRONT = ("step_time_s", "headroom_bytes", "n_gpus", "cost")
#: Layouts of the Pareto front that are listed.
_MOST_OF_FRONT = 12


@dataclass(frozen=True)
class PlanView:
    """Contents of the tables.

    ``varied``: keys that were varied, and ``keys``: those of layouts that are shown. ``rows``: the best layouts, each
    with its ``speedup`` over the first. ``without``: setting, numbers of GPUs without a layout, and why. ``front``: of
    all simulated layouts.
    """

    head: str
    varied: Sequence[str]
    keys: Sequence[str]
    rows: Sequence[SearchRow]
    without: Sequence[tuple[Mapping[str, Any], str, str]]
    front: Sequence[SearchRow]
    foot: Sequence[str]


def plan_summary(view: PlanView) -> RenderableType:
    """Return the tables of a plan."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(view.head)]
    if view.rows:
        parts += ["", _best_table(view), *map(Text, interval_note(view.rows))]
    if view.without:
        parts += ["", _without_table(view)]
    if len(view.front) > 1:
        parts += ["", _front_table(view)]
        if len(view.front) > _MOST_OF_FRONT:
            parts.append(Text(f"{len(view.front) - _MOST_OF_FRONT:,} more are on it; --json has all."))
    notes = headroom_note([*view.rows, *view.front[:_MOST_OF_FRONT]])
    return Group(*parts, *map(Text, [*notes, *view.foot]))


def setting_words(setting: Mapping[str, Any]) -> str:
    """Return the values of varied keys as a user would write them.

    >>> setting_words({"cluster": "dgx_h100", "cluster.nodes": 4})
    'cluster=dgx_h100 nodes=4'
    """
    names = short_names(list(setting))
    return " ".join(f"{names[key]}={setting_text(value, key)}" for key, value in setting.items())


def _layout_heads(view: PlanView, rows: Sequence[SearchRow]) -> list[Column]:
    keys = (*view.varied, *view.keys)
    names = short_names(keys)
    return [
        (names[key], "right" if all(isinstance(row.get(key), int | float) for row in rows) else "left") for key in keys
    ]


def _best_table(view: PlanView) -> FittedTable:
    rows, keys = view.rows, (*view.varied, *view.keys)
    scales = figure_scales(rows, (*LAYOUT_FIGURES, *_OF_RUNS))
    heads = _layout_heads(view, rows)
    heads.insert(len(view.varied), ("GPUs", "right"))
    table = FittedTable("Fastest layouts that fit", *heads, *figure_heads(scales), ("times as fast", "right"))
    for row in rows:
        cells = [setting_text(row[key], key) for key in keys]
        cells.insert(len(view.varied), f"{row['n_gpus']:,}")
        table.add_row(*cells, *figure_cells(row, scales), f"{row['speedup']:.3f}")
    return table


def _without_table(view: PlanView) -> FittedTable:
    settings: list[Column] = [("with", "left")] if view.varied else []
    table = FittedTable("Numbers of GPUs without a layout", *settings, ("GPUs", "left"), ("why", "left"))
    for setting, numbers, why in view.without:
        table.add_row(*([setting_words(setting)] if view.varied else []), numbers, why)
    return table


def _front_table(view: PlanView) -> FittedTable:
    rows = view.front[:_MOST_OF_FRONT]
    scales = figure_scales(rows, _OF_FRONT)
    title = "Pareto front of the simulated layouts: no other is as fast, leaves as much memory and costs as little"
    table = FittedTable(title, *_layout_heads(view, rows), *((FIGURES[name].label, "right") for name in scales))
    for row in rows:
        table.add_row(
            *(setting_text(row[key], key) for key in view.keys),
            *(figure_cell(row, name, scale) for name, scale in scales.items()),
        )
    return table
