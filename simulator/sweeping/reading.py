"""Points of a sweep as users write them: texts of the command line, and files that list them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from simulator.config.misplaced_file import refuse_misplaced
from simulator.errors import InputError
from simulator.input_files import brief, parse_assignment, parse_value, parse_yaml, read_text
from simulator.quantities import as_written

_CLOSING = {"[": "]", "{": "}", "(": ")"}


def values_by_key(assignments: Iterable[str], option: str) -> dict[str, list[Any]]:
    """Return ``KEY=V1,V2`` texts as key -> values, each read as ``--set`` reads its own.

    Raises `InputError` where a key stands twice, or has no values.

    >>> values_by_key(["parallelism.tp=1,2", "parallelism.layers_per_stage=[3, 5],[4, 4]"], "--grid")
    {'parallelism.tp': [1, 2], 'parallelism.layers_per_stage': [[3, 5], [4, 4]]}
    >>> values_by_key(["training.seq=4k,8k"], "--grid")
    {'training.seq': [4096, 8192]}
    """
    values: dict[str, list[Any]] = {}
    for assignment in assignments:
        key, text = parse_assignment(assignment, option, "parallelism.pp=1,2,4")
        if key in values:
            fix = f"{option} {key}=V1,V2 with all values in one"
            raise InputError("is given twice", file=option, key=key, found=assignment, fix=fix)
        parts = list(split_values(text))
        _refuse_grouped(parts, option, key, text)
        values[key] = [as_written(key, parse_value(key, part, option)) for part in parts]
    return values


def _refuse_grouped(parts: Sequence[str], option: str, key: str, text: str) -> None:
    """Raise `InputError` for a number such as ``1,024``, of which a comma makes two: the latter begins with a zero."""
    for before, part in pairwise(parts):
        if before.strip().isdecimal() and re.fullmatch(r"0[0-9]+", part.strip()):
            fix = f"{before.strip()}{part.strip()}, or {int(part)} for a value of its own"
            raise InputError("has a value that begins with a zero", file=option, key=key, found=text, fix=fix)


def split_values(text: str) -> Iterator[str]:
    """Yield the parts of a text between commas that stand outside of brackets and quotes.

    >>> list(split_values("[3,5],{a: 1, b: 2},'x,y',z"))
    ['[3,5]', '{a: 1, b: 2}', "'x,y'", 'z']
    """
    start, quote, open_brackets = 0, "", [""]
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _CLOSING:
            open_brackets.append(_CLOSING[letter])
        elif letter == open_brackets[-1]:
            open_brackets.pop()
        elif letter == "," and len(open_brackets) == 1:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def read_list(path: Path, option: str) -> list[dict[str, Any]]:
    """Return the settings that a file lists: a YAML list of mappings, or a CSV table with a column per dotted key.

    Cells of a table are read as ``--set`` reads values; in an empty one the workload's own value holds. Raises
    `InputError`.
    """
    if path.suffix.lower() == ".csv":
        return _rows_of_table(path)
    if path.suffix.lower() not in (".yaml", ".yml"):
        refuse_misplaced(path, "a list of points")
        allowed = "a table named *.csv, or a list of mappings named *.yaml"
        raise InputError("no list of points", file=option, found=str(path), allowed=allowed)
    settings = parse_yaml(read_text(path), path)
    if not isinstance(settings, list):
        refuse_misplaced(path, "a list of points")
        allowed = "a list of mappings, such as - {parallelism.tp: 4, parallelism.pp: 2}"
        raise InputError("must hold a list", file=path, found=brief(settings), allowed=allowed)
    return settings


def _rows_of_table(path: Path) -> list[dict[str, Any]]:
    lines = _lines_of_table(path)
    head = [name.strip() for name in next(lines)[1]]
    for key in head:
        if not key or not all(key.split(".")) or head.count(key) > 1:
            allowed = "dotted keys such as parallelism.tp, each once"
            raise InputError("is no head of a column", file=path, found=key, allowed=allowed)
    filled: set[str] = set()
    settings: list[dict[str, Any]] = []
    for line, row in lines:
        if len(row) != len(head):
            raise InputError(f"line {line}: has not as many cells as the head", file=path, found=brief(",".join(row)))
        cells = {key: text for key, text in zip(head, row, strict=True) if text.strip()}
        settings.append({key: as_written(key, parse_value(key, text, f"{path}:{line}")) for key, text in cells.items()})
        filled.update(cells)
    if settings and (empty := [key for key in head if key not in filled]):
        fix = "a value in one of its cells, or no such column"
        raise InputError("all cells of this column are empty", file=path, key=empty[0], fix=fix)
    return settings


def _lines_of_table(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the line on which a row begins, and its cells, of every row that has some."""
    rows = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            fix = "a closing quote" if "end of data" in str(error) else None
            raise InputError(f"line {line}: cannot be read as CSV: {error}", file=path, fix=fix) from None
        if row is None:
            return
        if row:
            yield line, row
