"""Tables of a search for a terminal: the ranking, the Pareto front, and why all other layouts lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simulator.output.fitted_table import Column, FittedTable
from simulator.output.sweep_figures import (
    FIGURES,
    INTERVAL,
    FigureScale,
    headroom_cell,
    headroom_note,
    interval_cell,
    interval_note,
)
from simulator.output.sweep_table import setting_text, short_names
from simulator.units import counted, format_gib, format_time

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Dotted keys of a layout, its status, bounds and figures.
SearchRow = Mapping[str, Any]
#: Figures of a layout in tables.
LAYOUT_FIGURES = ("step_time_s", "tokens_per_s", "mfu", "headroom_bytes")
#: Keys whose refusals are listed.
_MOST_KEYS = 8


@dataclass(frozen=True)
class LostLayouts:
    """Why layouts are not in the ranking.

    ``skipped``: key -> branches that arithmetic ruled out, each with all layouts beyond it. ``refused``: key -> layouts
    that a rule refuses. ``too_large``: layouts that lack ``least_lacking_bytes`` of memory or more. ``unfit``: those
    that do not fit by simulation. ``without_figures``: those that could not be simulated. ``bounded``: those that were
    not simulated, whose steps take ``next_bound_s`` or more. ``slower``: those simulated that are behind the ranking.
    """

    skipped: Mapping[str, int]
    refused: Mapping[str, int]
    too_large: int
    least_lacking_bytes: float
    unfit: int
    without_figures: int
    bounded: int
    next_bound_s: float
    slower: int


@dataclass(frozen=True)
class SearchView:
    """Contents of the tables.

    ``head``: how many layouts there are and were simulated. ``keys``: in which layouts differ. ``ranking`` and
    ``front``: the best, and those of which none other is faster and leaves as much memory. ``n_proven``: how many of
    the first are proven. ``foot``: lines on the time that it took, and on the best one.
    """

    head: str
    keys: Sequence[str]
    ranking: Sequence[SearchRow]
    front: Sequence[SearchRow]
    n_proven: int
    lost: LostLayouts
    foot: Sequence[str]


def changed_keys(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the keys in which ``rows`` differ, in the order of the first; all of them where there is one row.

    >>> changed_keys([{"tp": 8, "pp": 1}, {"tp": 4, "pp": 1}])
    ('tp',)
    """
    keys = tuple(rows[0]) if rows else ()
    return tuple(key for key in keys if len(rows) == 1 or any(row[key] != rows[0][key] for row in rows))


def layout_text(layout: Any) -> str:
    """Return a layout in one line, or a value of a key, as a user would write it.

    >>> layout_text({"parallelism.tp": 8, "training.recompute": "full"}), layout_text(True)
    ('tp=8 recompute=full', 'true')
    """
    if not isinstance(layout, Mapping) or not all("." in key for key in layout):
        return setting_text(layout)
    names = short_names(list(layout))
    return " ".join(f"{names[key]}={setting_text(value, key)}" for key, value in layout.items())


def search_summary(view: SearchView) -> RenderableType:
    """Return the tables of a search."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(view.head)]
    if view.ranking:
        proven = "" if view.n_proven >= len(view.ranking) else f" ({view.n_proven} of them proven)"
        parts += ["", _figures_table(view.ranking, view.keys, f"Fastest layouts that fit{proven}")]
        parts += map(Text, interval_note(view.ranking))
    if len(view.front) > 1:
        title = "Less time or more memory left: the Pareto front of the simulated layouts"
        parts += ["", _figures_table(view.front, view.keys, title)]
    parts += map(Text, headroom_note([*view.ranking, *view.front]))
    parts += ["", _lost_table(view.lost), *map(Text, view.foot)]
    return Group(*parts)


def best_so_far(rows: Sequence[SearchRow], keys: Sequence[str], top: int) -> RenderableType:
    """Return the table of the ``top`` fastest ``rows`` of simulated layouts that fit; layouts differ in ``keys``."""
    from rich.text import Text

    fitting = sorted((row for row in rows if row.get("fits")), key=lambda row: float(row["step_time_s"]))[:top]
    if not fitting:
        return Text(f"{counted(len(rows), 'layout')} simulated: none fits in memory.")
    title = f"Fastest of {counted(len(rows), 'layout')} simulated so far, none of them proven"
    return _figures_table(fitting, keys, title)


def _figures_table(rows: Sequence[SearchRow], keys: Sequence[str], title: str) -> FittedTable:
    names = short_names(keys)
    heads: list[Column] = [("", "right")]
    heads += [(names[key], "left" if isinstance(rows[0][key], str | Mapping) else "right") for key in keys]
    scales = figure_scales(rows, LAYOUT_FIGURES)
    table = FittedTable(title, *heads, *figure_heads(scales), ("least step time", "right"))
    for place, row in enumerate(rows, 1):
        cells = [str(place), *(setting_text(row[key], key) for key in keys), *figure_cells(row, scales)]
        table.add_row(*cells, scales["step_time_s"].text(row["least_step_time_s"]))
    return table


def figure_scales(rows: Sequence[SearchRow], names: Sequence[str]) -> dict[str, FigureScale]:
    """Return figure -> its scale, of those that some row has."""
    each = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    return {name: FigureScale.fitting(FIGURES[name], values) for name, values in each.items() if values}


def figure_heads(scales: Mapping[str, FigureScale]) -> list[Column]:
    """Return the columns of figures: behind the step time stands its interval."""
    heads: list[Column] = []
    for name in scales:
        heads.append((FIGURES[name].label, "right"))
        heads += [(INTERVAL, "right")] if name == "step_time_s" else []
    return heads


def figure_cells(row: SearchRow, scales: Mapping[str, FigureScale]) -> list[str]:
    """Return a row's cells of the columns of `figure_heads`."""
    cells: list[str] = []
    for name, scale in scales.items():
        cells.append(figure_cell(row, name, scale))
        cells += [interval_cell(row, scale)] if name == "step_time_s" else []
    return cells


def figure_cell(row: SearchRow, name: str, scale: FigureScale) -> str:
    """Return a figure of a row; a star marks memory that barely suffices."""
    if row.get(name) is None:
        return "-"
    return headroom_cell(row, scale) if name == "headroom_bytes" else scale.text(row[name])


def _lost_table(lost: LostLayouts) -> FittedTable:
    table = FittedTable("Why the others lost", ("layouts", "right"), ("why", "left"))
    for count, why in _reasons(lost):
        table.add_row(f"{count:,}", why)
    if branches := sum(lost.skipped.values()):
        keys = ", ".join(short_names(list(lost.skipped)).values())
        table.add_row("", f"{counted(branches, 'combination')} with every layout in them: {keys} did not divide")
    return table


def _reasons(lost: LostLayouts) -> Iterator[tuple[int, str]]:
    """Yield how many layouts lost for which reason."""
    if lost.slower:
        yield lost.slower, "simulated, and slower"
    if lost.bounded:
        yield lost.bounded, f"not simulated: a step takes {format_time(lost.next_bound_s)} or more"
    if lost.too_large:
        yield lost.too_large, f"not simulated: memory lacks {format_gib(lost.least_lacking_bytes)} or more"
    if lost.unfit:
        yield lost.unfit, "simulated, and do not fit in memory"
    if lost.without_figures:
        yield lost.without_figures, "could not be simulated; --csv has them"
    for key, count in list(lost.refused.items())[:_MOST_KEYS]:
        yield count, f"refused by a rule of {key}"
    if rest := sum(list(lost.refused.values())[_MOST_KEYS:]):
        yield rest, "refused by rules of other keys"
