"""What was measured: the rows of `python -m calibration measure`, and tables that others have published."""

from __future__ import annotations

import csv
import gzip
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO, cast

from simulator.errors import InputError

#: The source that figures cite which were measured by us.
MEASURED = "measured"


@dataclass(frozen=True)
class Measured:
    """One case that was measured: ``row`` is the line of the file (see calibration/measurements/README.md)."""

    kind: str
    op: str
    params: Mapping[str, Any]
    ranks: tuple[int, ...]
    row: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return float(self.row["time_s"])


@dataclass(frozen=True)
class Cases:
    """All that succeeded, in the order of the files, and the machines: one environment per run of `measure`.
    ``hold_out``: numbers of GPUs whose rows are only predicted."""

    rows: tuple[Measured, ...]
    environments: tuple[Mapping[str, Any], ...]
    hold_out: frozenset[int] = frozenset()

    @property
    def cited(self) -> dict[str, str]:
        """What figures that are fitted to these say of their origin; published tables keep the base profile's word."""
        return {"kind": "measured", "source": MEASURED, "note": ""} if self.environments else {}

    def held_out(self, rows: Iterable[Measured]) -> frozenset[int]:
        """Of the numbers of GPUs of ``rows`` those that are predicted from the others: what is asked for, and what lies
        between two powers of two, both measured."""
        numbers = {len(case.ranks) for case in rows}
        twos = sorted(n for n in numbers - self.hold_out if n & (n - 1) == 0)
        between = {n for n in numbers if any(low < n < high for low, high in pairwise(twos))}
        return self.hold_out | between

    def of(self, kind: str, *ops: str) -> list[Measured]:
        """The cases of a kind, of these ops where any are named."""
        return [case for case in self.rows if case.kind == kind and (not ops or case.op in ops)]


SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")


def read(measured: Path) -> Cases:
    """Read a file of measurements, or all of a directory, by their suffixes. Raises `InputError` where there are none,
    or one that is not of measurements."""
    rows: list[Measured] = []
    environments: list[Mapping[str, Any]] = []
    inside = sorted(measured.glob("*")) if measured.is_dir() else [measured]
    files = [path for path in inside if path.name.endswith(SUFFIXES) and path.is_file()]
    if not files:
        raise InputError("holds no measurements", key="DIR", found=measured, allowed=f"files of {', '.join(SUFFIXES)}")
    for path in files:
        with _open(path) as stream:
            if ".jsonl" not in path.name:
                rows += _published(path, stream)
                continue
            for number, line in enumerate(stream, 1):
                try:
                    row = json.loads(line)
                    if row["kind"] == "environment":
                        environments.append(row)
                    elif "error" not in row:
                        rows.append(Measured(row["kind"], row["op"], row["params"], tuple(row["ranks"]), row))
                except (ValueError, KeyError, TypeError):
                    raise InputError(f"line {number} is not of a measurement", file=path) from None
    return Cases(tuple(rows), tuple(environments))


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "rt", encoding="utf-8"))
    return path.open(encoding="utf-8")


def _published(path: Path, stream: TextIO) -> Iterator[Measured]:
    """The tables of github.com/ai-dynamo/aiconfigurator: ``latency`` is in ms, ``message_size`` in elements.

    Products are bf16, the second operand transposed as in a forward pass; collectives half precision, the median where
    a point was measured more than once.
    """
    table = csv.DictReader(stream)
    columns = set(table.fieldnames or ())
    if columns >= {"m", "n", "k", "latency"}:
        for row in table:
            params = {name: int(float(row[name])) for name in ("m", "n", "k")}
            row_of = {"time_s": float(row["latency"]) * 1e-3}
            yield Measured("matmul", "mm", {**params, "role": "fwd", "dtype": "bf16"}, (0,), row_of)
    elif columns >= {"op_name", "nccl_dtype", "num_gpus", "message_size", "latency"}:
        seen: dict[tuple[str, int, int], list[float]] = {}
        for row in table:
            if row["nccl_dtype"] == "half":
                op = {"alltoall": "all_to_all"}.get(row["op_name"], row["op_name"])
                key = op, int(row["num_gpus"]), 2 * int(float(row["message_size"]))
                seen.setdefault(key, []).append(float(row["latency"]) * 1e-3)
        for (op, gpus, nbytes), times in sorted(seen.items()):
            row_of = {"time_s": statistics.median(times), "bytes": nbytes}
            yield Measured("collective", op, {"bytes": nbytes}, tuple(range(gpus)), row_of)
    else:
        raise InputError(
            "is no table of products or collectives",
            file=path,
            found=", ".join(sorted(columns)),
            allowed="m, n, k, latency; or op_name, nccl_dtype, num_gpus, message_size, latency",
        )
