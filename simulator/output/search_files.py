"""The table of a search as a CSV file: a row per legal layout."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from simulator.output.files import writing
from simulator.output.search_table import SearchRow
from simulator.output.sweep_files import sweep_columns
from simulator.output.sweep_table import setting_text

_BOUNDS = ("least_step_time_s", "least_memory_bytes")


def write_csv(rows: Sequence[SearchRow], keys: Sequence[str], path: Path) -> None:
    """Write a row per layout: the columns of a sweep, then its bounds. Figures are of those that were simulated."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    columns = (*sweep_columns(keys), *_BOUNDS)
    writer.writerow(columns)
    writer.writerows([setting_text(row[name]) if row.get(name) is not None else "" for name in columns] for row in rows)
    with writing(path) as file:
        file.write(text.getvalue().encode())
