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
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from calibration.compare.record import Run, read_record
from calibration.narrow import LAYOUTS, MODELS
from calibration.text import read_packed
from simulator.bounds import Positive
from simulator.config.section import AsTuple, Section
from simulator.config.validation import validated
from simulator.errors import InputError
from simulator.input_files import brief

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
class Measured:
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

    rows: tuple[Measured, ...]
    environments: tuple[Mapping[str, Any], ...]
    hold_out: frozenset[int] = frozenset()
    steps: tuple[Run, ...] = ()

    @property
    def cited(self) -> dict[str, Any]:
        """The origin of figures that are fitted to these cases; with published tables the base profile's stays."""
        return {"kind": "measured", "source": MEASURED, "note": ""} if self.environments else {}

    def held_out(self, rows: Iterable[Measured]) -> frozenset[int]:
        """Return the numbers of GPUs of ``rows`` that are predicted from the rest.

        These are the numbers of ``hold_out``, and those between two powers of two that were both measured.
        """
        numbers = {len(case.ranks) for case in rows}
        twos = sorted(n for n in numbers - self.hold_out if n & (n - 1) == 0)
        between = {n for n in numbers if any(low < n < high for low, high in pairwise(twos))}
        return self.hold_out | between

    def rows_of(self, kind: str, *ops: str) -> list[Measured]:
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
    rows: list[Measured] = []
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


def steps_in(folder: Path) -> Iterator[Run]:
    """Yield the records of runs that went well; raises `InputError` on one that cannot be used."""
    for path in sorted(folder.glob("*.json")):
        record = read_record(folder, path.stem)
        if isinstance(record, Run):
            yield record


def _lists(value: object) -> object:
    """YAML and JSON have lists only."""
    return tuple(tuple(one) if isinstance(one, list) else one for one in value) if isinstance(value, list) else value


Lists = BeforeValidator(_lists)


class Told(Section):
    """A line of which more may be told; what is read of it is checked."""

    model_config = ConfigDict(extra="allow")


class Environment(Told):
    gpu: str
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    command: str = ""
    ranks: Annotated[int, Field(ge=1)] = 1
    nvls: bool | None = None
    l2_bytes: Annotated[int, Field(ge=0)] | None = None
    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    nvidia_smi: Annotated[tuple[str, ...], AsTuple] = ()


class Row(Told):
    """A line as all kinds have it; figures that a kind has beside are those of calibration/measurements/README.md."""

    kind: str
    op: str
    params: dict[str, Any]
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], AsTuple, Field(min_length=1)]
    bytes: Annotated[float, Field(ge=0)] | None = None
    p10_s: Positive | None = None
    p90_s: Positive | None = None
    host_s: Positive | None = None
    each_s: Annotated[tuple[Positive, ...], AsTuple] | None = None
    series_s: Annotated[tuple[Positive, ...], AsTuple] | None = None
    sm_mhz: Any = None
    power_w: Any = None

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        """Raise `InputError` unless all parameters that tell the kind's cases are there, and numbers are sizes."""
        for name in _told_by(self.kind, self.op):
            if name not in self.params:
                raise InputError("a required key is missing", key=f"params.{name}")
        for name, value in self.params.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
            valid = number and (name in FRACTIONS or value == int(value))
            if name in WORDS:
                valid = value in WORDS[name] if WORDS[name] else isinstance(value, bool | str)
            if not valid:
                words = ", ".join(map(str, WORDS.get(name, ()))) or "a text, true or false"
                allowed = words if name in WORDS else "a number > 0" if name in FRACTIONS else "a whole number > 0"
                raise InputError("is no size of a case", key=f"params.{name}", found=brief(value), allowed=allowed)
        return self


#: Parameters of cases that are no numbers, and which words are known where not any may be.
WORDS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("dtype", "backend", "kernel", "of", "beside", "part"), ()),
    **dict.fromkeys(("skew", "causal"), (True, False)),
    "role": ("fwd", "dgrad", "wgrad"),
    "model": tuple(MODELS),
    "layout": tuple(LAYOUTS),
    "recompute": ("selective", "full"),
}
#: Parameters that may lie between whole numbers.
FRACTIONS = ("share", "period_s", "seconds")
#: Kind of row -> the parameters that tell each of its cases.
TOLD_BY: Mapping[str, tuple[str, ...]] = {
    "matmul": ("m", "n", "k", "role", "dtype"),
    "attention": ("batch", "heads", "kv_heads", "length", "head_dim", "causal", "backend"),
    "shared": ("beside", "share", "period_s"),
    **dict.fromkeys(("interference", "moving"), ("kernel", "bytes")),
    "kernels": ("of",),
}


def _told_by(kind: str, op: str) -> tuple[str, ...]:
    if kind not in ("sustained", "shared"):
        return TOLD_BY.get(kind, ())
    family = "matmul" if op == "mm" else "attention" if op.startswith("attention") else ""
    return (*TOLD_BY.get(kind, ()), *TOLD_BY.get(family, ()))


class Timed(Row):
    time_s: Positive
    sm_mhz: Positive | None = None
    power_w: Positive | None = None


class Streamed(Timed):
    bytes: Annotated[float, Field(ge=0)]


class Sustained(Row):
    """A case that ran for seconds without a pause: the time of each batch, and what the GPU said between them."""

    time_s: Positive
    series_s: Annotated[tuple[Positive, ...], AsTuple, Field(min_length=1)]
    sm_mhz: Annotated[tuple[Positive, ...], AsTuple] = ()
    power_w: Annotated[tuple[Positive, ...], AsTuple] = ()

    @model_validator(mode="after")
    def _alike(self) -> Self:
        if len(self.sm_mhz) != len(self.power_w):
            lengths = f"{len(self.sm_mhz)} and {len(self.power_w)}"
            raise InputError("unlike numbers of sm_mhz and power_w", key="sm_mhz", found=lengths, allowed="as many")
        return self


class Shared(Sustained):
    share: Annotated[float, Field(gt=0, le=1)]
    other_s: Positive


class Collective(Timed):
    bytes: Annotated[float, Field(ge=0)]
    host_s: Positive
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], AsTuple, Field(min_length=2)]


class Raced(Row):
    kernel_s: Positive
    kernel_beside_s: Positive
    collective_s: Positive | None = None
    collective_beside_s: Positive | None = None


class Moving(Timed):
    beside_s: Positive


class Profiled(Row):
    kernels: Annotated[tuple[tuple[str, Annotated[float, Field(ge=0)]], ...], Lists]


class Layers(Timed):
    block_s: Annotated[tuple[tuple[Positive, ...], ...], Lists] | None = None
    probe_s: Annotated[tuple[tuple[Positive, ...], ...], Lists] | None = None
    probe_forward_s: Annotated[tuple[tuple[Positive, ...], ...], Lists] | None = None

    @model_validator(mode="after")
    def _probes_around_blocks(self) -> Self:
        """Raise `InputError` unless members have one probe more than blocks, each longer than its forward passes."""
        if self.probe_forward_s is None:
            return self
        lengths = {
            "block_s": [len(member) + 1 for member in self.block_s or ()],
            "probe_s": [len(member) for member in self.probe_s or ()],
            "probe_forward_s": [len(member) for member in self.probe_forward_s],
        }
        if len({tuple(counts) for counts in lengths.values()}) > 1:
            told = {name: counts if name != "block_s" else [n - 1 for n in counts] for name, counts in lengths.items()}
            allowed = "as many members in each, of a member a probe more than blocks"
            raise InputError("unlike lengths", key="block_s", found=told, allowed=allowed)
        for whole, part in zip(self.probe_s or (), self.probe_forward_s, strict=True):
            if any(p >= w for p, w in zip(part, whole, strict=True)):
                raise InputError("not less than probe_s", key="probe_forward_s", found=part, allowed=whole)
        return self


#: Kind of row -> what it must tell.
KINDS: Mapping[str, type[Row]] = {
    **dict.fromkeys(("matmul", "attention", "copy", "launch"), Timed),
    "memory": Streamed,
    "sustained": Sustained,
    "shared": Shared,
    "collective": Collective,
    "interference": Raced,
    "moving": Moving,
    "kernels": Profiled,
    "layers": Layers,
}


def _row(line: str, place: str) -> Measured | Environment | None:
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
    row = validated(KINDS.get(data["kind"], Row), data, place)
    told = {key: value for key, value in data.items() if value is not None}
    return Measured(row.kind, row.op, Line(row.params, place, "params."), row.ranks, Line(told, place), place)


def profiled(case: Measured) -> Measured:
    """The case that one of kind ``kernels`` looks into, as its key says (`Case.key`). Raises `InputError`."""
    told, *params = str(case.params["of"]).split()
    kind, _, op = told.partition("/")
    values = dict(param.partition("=")[::2] for param in params)
    data = {"kind": kind, "op": op, "params": {name: _value(text) for name, text in values.items()}, "ranks": [0]}
    row = validated(Row, data, f"{case.place}: params.of" if case.place else None)
    return Measured(kind, op, Line(row.params, case.place, "params.of: "), row.ranks, {}, case.place)


def _value(text: str) -> object:
    """A parameter as a key says it."""
    try:
        return {"True": True, "False": False}[text] if text in ("True", "False") else int(text)
    except ValueError:
        return text


def _published(path: Path, text: str) -> Iterator[Measured]:
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
            yield Measured("matmul", "mm", {**params, "role": "fwd", "dtype": "bf16"}, (0,), row_of)
    elif columns >= {"op_name", "nccl_dtype", "num_gpus", "message_size", "latency"}:
        seen: dict[tuple[str, int, int], list[float]] = {}
        for row in table:
            if row["nccl_dtype"] == "half":
                op = {"alltoall": "all_to_all"}.get(row["op_name"], row["op_name"])
                key = op, int(number(row, "num_gpus")), 2 * int(number(row, "message_size"))
                seen.setdefault(key, []).append(number(row, "latency") * 1e-3)
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
