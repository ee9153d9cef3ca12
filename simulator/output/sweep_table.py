"""Table of a sweep for a terminal: a row per point, the best first; below it what was refused, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simulator.output.fitted_table import Column, FittedTable, Justify
from simulator.output.sweep_figures import (
    FIGURES,
    INTERVAL,
    FigureScale,
    SweepRow,
    best_first,
    interval_cell,
    interval_note,
)
from simulator.quantities import as_text
from simulator.units import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Figures of every table, behind the one that sorts it.
_USUAL = (
    "step_time_s", "tokens_per_s", "mfu", "bubble_fraction", "exposed_communication_fraction", "peak_bytes", "fits",
)  # fmt: skip
#: Figures that have a column where points differ in them.
_WHERE_DIFFERENT = ("n_gpus", "days", "gpu_hours", "cost")
#: Reasons of refusals that are listed.
_MOST_REASONS = 12


def sweep_summary(
    rows: Sequence[SweepRow], keys: Sequence[str], *, sort: str = "step_time_s", top: int | None = None
) -> RenderableType:
    """Return the tables of a sweep's ``rows``, at most ``top`` of those with figures; points differ in ``keys``."""
    from rich.console import Group
    from rich.text import Text

    simulated = [row for row in best_first(rows, sort) if row["status"] == "simulated"]
    without = [row for row in rows if row["status"] != "simulated"]
    several = len({row["workload"] for row in rows}) > 1
    names = {**({"workload": "workload"} if several else {}), **short_names(keys)}
    parts: list[RenderableType] = [Text(count_line(rows))]
    if simulated:
        shown = simulated if top is None else simulated[:top]
        parts += ["", _figures_table(shown, names, _columns(simulated, sort), f"Points by {FIGURES[sort].label}")]
        parts += map(Text, interval_note(shown))
        if len(shown) < len(simulated):
            parts.append(Text(f"{len(simulated) - len(shown):,} more have figures."))
    if without:
        parts += ["", _reasons_table(without, names)]
    return Group(*parts)


def count_line(rows: Sequence[SweepRow]) -> str:
    """Return how many points there are, and what became of them."""
    status = Counter(row["status"] for row in rows)
    fitting = sum(bool(row.get("fits")) for row in rows)
    counts = {
        "fit": fitting,
        "do not fit in memory": status["simulated"] - fitting,
        "refused": status["refused"],
        "failed": status["failed"],
    }
    workloads = ", ".join(dict.fromkeys(row["workload"] for row in rows))
    return f"{counted(len(rows), 'point')} of {workloads}: " + ", ".join(
        f"{count:,} {what}" for what, count in counts.items() if count
    )


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return key -> its last part, or more of it where two keys, or a key and a figure, would have the same.

    >>> short_names(["parallelism.tp", "model.layers", "cluster.nodes", "other.nodes"])
    {'parallelism.tp': 'tp', 'model.layers': 'layers', 'cluster.nodes': 'cluster.nodes', 'other.nodes': 'other.nodes'}
    """
    parts = Counter(key.rpartition(".")[2] for key in keys) + Counter(figure.label for figure in FIGURES.values())
    return {key: last if parts[last := key.rpartition(".")[2]] == 1 else key for key in keys}


def setting_text(value: Any, key: str = "") -> str:
    """Return a value of a ``key`` as a user would write it.

    >>> setting_text(400000000000, "cluster.node.nics.bandwidth_bps")
    '400Gbps'
    >>> setting_text([3, 5]), setting_text(True), setting_text("1f1b"), setting_text(4.5e11), setting_text(None)
    ('[3, 5]', 'true', '1f1b', '450e9', 'null')
    """
    if (text := as_text(key, value)) is not None:
        return text
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1e6:
        zeros = (len(f"{value:.0f}") - len(f"{value:.0f}".rstrip("0"))) // 3 * 3
        return f"{value / 10**zeros:.0f}e{zeros}" if zeros else f"{value:.0f}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _columns(rows: Sequence[SweepRow], sort: str) -> list[str]:
    """Return the figures that have a column, the one of ``sort`` first; those that no row has are left out."""
    different = [name for name in _WHERE_DIFFERENT if len({row.get(name) for row in rows}) > 1]
    usual = [name for name in _USUAL if any(row.get(name) is not None for row in rows)]
    return list(dict.fromkeys([sort, *usual, *different]))


def _figures_table(
    rows: Sequence[SweepRow], names: Mapping[str, str], figures: Sequence[str], title: str
) -> FittedTable:
    heads: list[Column] = [(name, _side([row.get(key) for row in rows])) for key, name in names.items()]
    for name in figures:
        heads.append((FIGURES[name].label, "left" if FIGURES[name].unit == "flag" else "right"))
        heads += [(INTERVAL, "right")] if name == "step_time_s" else []
    table = FittedTable(title, *heads)
    scales = {
        name: FigureScale.fitting(FIGURES[name], [row[name] for row in rows if row.get(name) is not None])
        for name in figures
    }
    for row in rows:
        cells = [setting_text(row[key], key) if key in row else "-" for key in names]
        for name in figures:
            cells.append(_figure_text(row.get(name), name, scales[name]))
            cells += [interval_cell(row, scales[name])] if name == "step_time_s" else []
        table.add_row(*cells, style="" if row["fits"] else "dim")
    return table


def _side(values: Sequence[object]) -> Justify:
    return "right" if all(isinstance(value, int | float) for value in values) else "left"


def _figure_text(value: Any, name: str, scale: FigureScale) -> str:
    if value is None:
        return "-"
    return ("yes" if value else "no") if FIGURES[name].unit == "flag" else scale.text(value)


def _reasons_table(rows: Sequence[SweepRow], names: Mapping[str, str]) -> FittedTable:
    """Return why points have no figures: of each reason how many there are, and the first of them."""
    table = FittedTable("Points without figures", ("points", "right"), ("such as", "left"), ("why", "left"))
    reasons = Counter(row["error"] for row in rows)
    firsts = {row["error"]: row for row in reversed(rows)}
    for reason, count in reasons.most_common(_MOST_REASONS):
        table.add_row(f"{count:,}", ", ".join(_settings(firsts[reason], names)), reason)
    if len(reasons) > _MOST_REASONS:
        rest = sum(reasons.values()) - sum(count for _, count in reasons.most_common(_MOST_REASONS))
        table.add_row(f"{rest:,}", "", f"{len(reasons) - _MOST_REASONS:,} other reasons; --json lists all")
    return table


def _settings(row: SweepRow, names: Mapping[str, str]) -> Iterator[str]:
    yield from (f"{name} {setting_text(row[key], key)}" for key, name in names.items() if key in row)
