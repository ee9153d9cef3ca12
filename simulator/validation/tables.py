"""Tables of measurements: CSV files whose columns mean something here, or are labels of whoever wrote them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from simulator.config.misplaced_file import TABLE, expecting
from simulator.encodings import decoded
from simulator.errors import InputError
from simulator.input_files import closest, read_content

#: Columns of the shipped tables that say something to people alone, or to the settings of a suite.
LABELS = (
    *("source", "notes", "software", "sharding", "mp_mode", "overlap_flags", "topk", "intra_bw", "inter_bw"),
    *("mem_gb", "tflops_per_gpu", "tokens_per_s_per_gpu", "mfu", "hfu", "bubble_rate", "derived_fields"),
    "flops_formula",
)
#: A column as near as this to one that is read is that one, misspelt.
_MISSPELT = 0.75


def read_table(
    path: Path, needed: Sequence[str], columns_read: Collection[str], *, reference: str, instead: str | None = None
) -> list[dict[str, str]]:
    """Return the rows of a CSV table with a column ``id`` and the columns ``needed``; each row has an id.

    ``reference`` is the shipped table with these columns. The column ``instead`` may replace those needed.

    Raises `InputError`, also where a column is nearly, but not quite, one of ``columns_read``.
    """
    with expecting(TABLE, path):
        return _rows(path, needed, columns_read, reference, instead)


def _rows(
    path: Path, needed: Sequence[str], columns_read: Collection[str], reference: str, instead: str | None
) -> list[dict[str, str]]:
    """Return the rows of a table, as `read_table` does."""
    try:
        text = decoded(read_content(path), path)
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        reader.fieldnames = columns = [name.strip() for name in reader.fieldnames or []]
        records = list(reader)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from None
    except csv.Error as error:
        raise InputError(f"is no CSV table: {error}", file=path) from None
    _check_columns(path, columns, columns_read)
    needed = list(dict.fromkeys(["id", *(needed if instead not in columns else ())]))
    absent = [name for name in needed if name not in columns]
    if absent:
        raise InputError(f"lacks columns: {', '.join(absent)}", file=path, allowed=f"the columns of {reference}")
    if not records:
        raise InputError("has no rows", file=path)
    for number, row in enumerate(records, start=1):
        if None in row:  # DictReader's key of cells past the last column
            fix = "quotes around cells that hold a comma"
            raise InputError(f"row {number} has more cells than there are columns", file=path, found=row["id"], fix=fix)
    rows = [{key: (value or "").strip() for key, value in row.items() if key} for row in records]
    ids = [row["id"] for row in rows]
    if "" in ids:
        raise InputError(f"row {ids.index('') + 1} has none", file=path, key="id")
    twice = next((name for name in ids if ids.count(name) > 1), None)
    if twice is not None:
        raise InputError("stands twice", file=path, key="id", found=twice)
    return rows


def _check_columns(path: Path, columns: Sequence[str], columns_read: Collection[str]) -> None:
    doubled = next((name for name in columns if name and list(columns).count(name) > 1), None)
    if doubled is not None:
        raise InputError("two columns have this name", file=path, found=doubled)
    for name in unknown(columns, columns_read):
        near = closest(name, columns_read, _MISSPELT)
        if near is not None and not is_key(name):
            fix = f"{near}; or, of a label, a name less like it"
            raise InputError("unknown column", file=path, found=name, allowed=", ".join(columns_read), fix=fix)


def unknown(columns: Iterable[str], columns_read: Collection[str]) -> list[str]:
    """Columns that are not among ``columns_read``, nor labels of the shipped tables: a user's own labels."""
    return [name for name in columns if name and name not in columns_read and name not in LABELS]


def is_key(column: str) -> bool:
    """True for a dotted key: ``note v1.0`` is a label, as are columns without a dot."""
    return "." in column and not re.search(r"\s", column.partition(".")[0])


def label_warnings(labels: Sequence[str]) -> tuple[str, ...]:
    """Return a warning that lists a user's ``labels``."""
    return (f"columns taken as labels, which change nothing: {', '.join(labels)}",) if labels else ()
