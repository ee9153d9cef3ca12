"""Measured cases: the rows of `python -m calibration measure`, and tables that others have published."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from calibration.compare.record import RunRecord, read_record
from calibration.fit.row_kinds import KINDS, Environment, MeasuredRow
from calibration.text import read_packed
from simulator.config.validation import validated
from simulator.errors import InputError

#: The source that figures cite which were measured by us.
MEASURED = "measured"


class Line(dict[str, Any]):
    """A part of a line that was read at ``place``; a key that is asked for and is not there is an `InputError`."""

    def __init__(self, data: Mapping[str, Any], place: str, prefix: str = "") -> None:
        super().__init__(data)
        self.place, self.prefix = place, prefix

    def __missing__(self, key: str) -> Any:
        raise InputError("a required key is missing", file=self.place, key=f"{self.prefix}{key}")


@dataclass(frozen=True)
class MeasuredCase:
    """One case that was measured: ``row`` is the line of the file (see calibration/measurements/README.md), ``place``
    where it stands."""

    kind: str
    op: str
    params: Mapping[str, Any]
    ranks: tuple[int, ...]
    row: Mapping[str, Any]
    place: str = ""

    def word(self, name: str, choices: Iterable[str]) -> str:
        """Return the parameter ``name``. Raises `InputError` where it is none of ``choices``."""
        word = str(self.params[name])
        if word not in (words := list(choices)):
            allowed = ", ".join(words)
            raise InputError("is not known", file=self.place, key=f"params.{name}", found=word, allowed=allowed)
        return word

    @property
    def seconds(self) -> float:
        return float(self.row["time_s"])


@dataclass(frozen=True)
class Cases:
    """All that succeeded, in the order of the files, and the machines: one environment per run of `measure`.

    ``hold_out``: numbers of GPUs whose rows are only predicted. ``steps``: real steps that only the host bounds."""

    rows: tuple[MeasuredCase, ...]
    environments: tuple[Mapping[str, Any], ...]
    hold_out: frozenset[int] = frozenset()
    steps: tuple[RunRecord, ...] = ()

    @property
    def cited(self) -> dict[str, Any]:
        """The origin of figures that are fitted to these cases; with published tables the base profile's stays."""
        return {"kind": "measured", "source": MEASURED, "note": ""} if self.environments else {}

    def held_out(self, rows: Iterable[MeasuredCase]) -> frozenset[int]:
        """Return the numbers of GPUs of ``rows`` that are predicted from the rest.

        These are the numbers of ``hold_out``, and those between two powers of two that were both measured.
        """
        numbers = {len(case.ranks) for case in rows}
        twos = sorted(n for n in numbers - self.hold_out if n & (n - 1) == 0)
        between = {n for n in numbers if any(low < n < high for low, high in pairwise(twos))}
        return self.hold_out | between

    def rows_of(self, kind: str, *ops: str) -> list[MeasuredCase]:
        """The cases of a kind, of these ops where any are named."""
        return [case for case in self.rows if case.kind == kind and (not ops or case.op in ops)]


#: Folder of a directory of measurements: records of `calibration.train`.
STEPS = "steps"
SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")


def files_of(measured: Path) -> list[Path]:
    """The file of measurements, or those of a directory."""
    inside = sorted(measured.glob("*")) if measured.is_dir() else [measured]
    return [path for path in inside if path.name.endswith(SUFFIXES) and path.is_file()]


def read(measured: Path) -> Cases:
    """Read a file of measurements, or all of a directory, by their suffixes; lines that are equal in everything are one
    measurement. Raises `InputError` where there are none, one that is not of measurements, or several GPUs' in one."""
    rows: list[MeasuredCase] = []
    environments: list[Mapping[str, Any]] = []
    lines: set[str] = set()
    for path in files_of(measured):
        text = read_packed(path)
        if ".jsonl" not in path.name:
            rows += _published(path, text)
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if line in lines:
                continue
            lines.add(line)
            row = _row(line, f"{path}, line {number}")
            if isinstance(row, Environment):
                environments.append(row.model_dump(exclude_none=True))
            elif row is not None:
                rows.append(row)
    if not any(case.kind in KINDS for case in rows):
        allowed = f"rows of {', '.join(KINDS)} in files of {', '.join(SUFFIXES)}"
        raise InputError("holds no measurements", key="DIR", found=str(measured), allowed=allowed)
    if len(gpus := sorted({str(environment["gpu"]) for environment in environments})) > 1:
        raise InputError("measurements of several GPUs", key="DIR", found=", ".join(gpus), fix="a folder for each")
    return Cases(tuple(rows), tuple(environments), steps=tuple(steps_in(measured / STEPS)))


def steps_in(folder: Path) -> Iterator[RunRecord]:
    """Yield the records of runs that went well; raises `InputError` on one that cannot be used."""
    for path in sorted(folder.glob("*.json")):
        record = read_record(folder, path.stem)
        if isinstance(record, RunRecord):
            yield record


def _row(line: str, place: str) -> MeasuredCase | Environment | None:
    """A line of `measure`, at ``place``; None where the case failed. Raises `InputError`."""
    try:
        data = json.loads(line)
    except ValueError:
        raise InputError("is not of a measurement", file=place, fix="remove the line") from None
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise InputError("is not of a measurement", file=place, fix="remove the line")
    if data["kind"] == "environment":
        if data.get("device") == "cpu" or "gpu" not in data:
            fix = "measure on a GPU: --device cpu only tries the flow"
            raise InputError("measured without a GPU", file=place, key="gpu", fix=fix)
        return validated(Environment, data, place)
    if "error" in data:
        return None
    row = validated(KINDS.get(data["kind"], MeasuredRow), data, place)
    told = {key: value for key, value in data.items() if value is not None}
    return MeasuredCase(row.kind, row.op, Line(row.params, place, "params."), row.ranks, Line(told, place), place)


def profiled(case: MeasuredCase) -> MeasuredCase:
    """The case that one of kind ``kernels`` looks into, as its key says (`Case.key`). Raises `InputError`."""
    told, *params = str(case.params["of"]).split()
    kind, _, op = told.partition("/")
    values = dict(param.partition("=")[::2] for param in params)
    data = {"kind": kind, "op": op, "params": {name: _value(text) for name, text in values.items()}, "ranks": [0]}
    row = validated(MeasuredRow, data, f"{case.place}: params.of" if case.place else None)
    return MeasuredCase(kind, op, Line(row.params, case.place, "params.of: "), row.ranks, {}, case.place)


def _value(text: str) -> object:
    """A parameter as a key says it."""
    try:
        return {"True": True, "False": False}[text] if text in ("True", "False") else int(text)
    except ValueError:
        return text


def _published(path: Path, text: str) -> Iterator[MeasuredCase]:
    """The tables of github.com/ai-dynamo/aiconfigurator: ``latency`` is in ms, ``message_size`` in elements.

    Products are bf16, the second operand transposed as in a forward pass; collectives half precision, the median where
    a point was measured more than once. Raises `InputError`.
    """
    table = csv.DictReader(io.StringIO(text))
    columns = set(table.fieldnames or ())

    def number(row: Mapping[str, str | None], name: str) -> float:
        try:
            value = float(row[name] or "")
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            where = f"{path}, line {table.line_num}"
            raise InputError("is no measured figure", file=where, key=name, found=row[name], allowed="a number > 0")
        return value

    if columns >= {"m", "n", "k", "latency"}:
        for row in table:
            params = {name: int(number(row, name)) for name in ("m", "n", "k")}
            row_of = {"time_s": number(row, "latency") * 1e-3}
            yield MeasuredCase("matmul", "mm", {**params, "role": "fwd", "dtype": "bf16"}, (0,), row_of)
    elif columns >= {"op_name", "nccl_dtype", "num_gpus", "message_size", "latency"}:
        seen: dict[tuple[str, int, int], list[float]] = {}
        for row in table:
            if row["nccl_dtype"] == "half":
                op = {"alltoall": "all_to_all"}.get(row["op_name"], row["op_name"])
                key = op, int(number(row, "num_gpus")), 2 * int(number(row, "message_size"))
                seen.setdefault(key, []).append(number(row, "latency") * 1e-3)
        for (op, gpus, nbytes), times in sorted(seen.items()):
            row_of = {"time_s": statistics.median(times), "bytes": nbytes}
            yield MeasuredCase("collective", op, {"bytes": nbytes}, tuple(range(gpus)), row_of)
    else:
        raise InputError(
            "is no table of products or collectives",
            file=path,
            found=", ".join(sorted(columns)),
            allowed="m, n, k, latency; or op_name, nccl_dtype, num_gpus, message_size, latency",
        )
