"""Files of a sweep: a CSV or Parquet table with a row per point, in the order of the points."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.errors import InputError, install_extra
from simulator.output.files import writing
from simulator.output.sweep_figures import FIGURES, SweepRow

if TYPE_CHECKING:
    import pyarrow

#: Columns behind the figures.
_LAST = ("status", "error", "key")


def sweep_columns(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a table: the workload, the keys that differ, all figures, and what became of the point."""
    return ("workload", *keys, *FIGURES, *_LAST)


def write_csv(rows: Sequence[SweepRow], keys: Sequence[str], path: Path) -> None:
    """Write a table whose cells are empty where there is no value; lists and mappings are JSON."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    columns = sweep_columns(keys)
    writer.writerow(columns)
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    with writing(path) as file:
        file.write(text.getvalue().encode())


def write_parquet(rows: Sequence[SweepRow], keys: Sequence[str], path: Path) -> None:
    """Write a Parquet file. Raises `InputError` where pyarrow is not installed."""
    check_parquet()
    import pyarrow
    from pyarrow import parquet

    columns = {}
    for name in sweep_columns(keys):
        values = [row.get(name) for row in rows]
        if name in keys:
            values = _uniform(values)
        columns[name] = pyarrow.array(values, type=_parquet_type(name, values))
    with writing(path) as file:
        parquet.write_table(pyarrow.table(columns), file)


def check_parquet() -> None:
    """Raise `InputError` where Parquet files cannot be written."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        fix = f"{install_extra('parquet')}; or --csv FILE"
        raise InputError("needs pyarrow, which is not installed", file="--parquet", fix=fix) from None


def _parquet_type(name: str, values: Sequence[Any]) -> pyarrow.DataType:
    import pyarrow

    types = {float: pyarrow.float64(), int: pyarrow.int64(), bool: pyarrow.bool_(), str: pyarrow.string()}
    if name in FIGURES:
        return types[FIGURES[name].kind]
    return types[next((type(value) for value in values if value is not None), str)]


def _uniform(values: Sequence[Any]) -> list[Any]:
    """Return values of a key as numbers, truths or texts, whichever holds all of them; None where there is none."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} and len(kinds) > 1:
        return [None if value is None else float(value) for value in values]
    if len(kinds) <= 1 and kinds <= {int, float, bool, str}:
        return list(values)
    return [None if value is None else _cell(value) for value in values]


def _cell(value: Any) -> Any:
    if value is None or (isinstance(value, int | float | str) and not isinstance(value, bool)):
        return value
    return json.dumps(value, default=str)
