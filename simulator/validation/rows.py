"""A row of a table of measured steps as a workload, or the reason why it cannot be simulated.

Columns are those of the shipped tables in ``data/``; a user's table has the same. Free-text names go through `ALIASES`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.errors import InputError, SimulatorError

Row = Mapping[str, str]

#: column -> what its free text means here. Matching ignores case.
ALIASES: dict[str, dict[str, Any]] = {
    "gpu": {
        "a100-80g-sxm": "dgx_a100",
        "a100-80g-sxm4": "dgx_a100",
        "a100-80g": "dgx_a100",
        "a100 (dgx-a100)": "dgx_a100",
        "h100": "dgx_h100",
        "h100-80g": "dgx_h100",
        "h100-80g-hbm3": "dgx_h100",
        "h100-80g-hbm3 (700w)": "dgx_h100",
    },
    "precision": {
        "fp16": "fp16",
        "fp16 mixed": "fp16",
        "fp16 weights, fp32 adam": "fp16",
        "bf16": "bf16",
        "amp_bf16": "bf16",
        "": "bf16",
    },
    "recompute": {"full": "full", "selective": "selective", "none": "none", "": "none"},
    "schedule": {
        "": "1f1b",
        "none": "1f1b",
        "1f1b": "1f1b",
        "interleaved-1f1b": "interleaved",
        "1f1b-i": "interleaved",
        "gpipe": "gpipe",
        "zb-h1": "zb_h1",
        "zb-h2": "zb_h2",
        "zb-v": "zb_v",
        "zb-1p": "zb_auto",
        "zb-2p": "zb_auto",
    },
    "zero_stage": {"": 0, "0": 0, "1": 1},
    "seq_parallel": {"y": True, "n": False},
    "flash_attention": {"": "flash", "y": "flash", "n": "unfused"},
}
#: Schedule -> the memory of the automatic search, as a multiple of 1F1B's (arXiv 2401.10241, section 5).
_ZB_MEMORY_LIMITS = {"zb-1p": 1.0, "zb-2p": 2.0}
_SHORTEST_STEP_s = 1e-6
_NEEDED = ("layers", "hidden", "heads", "vocab", "seq", "gpu", "n_gpus", "tp", "pp", "micro_batch", "global_batch")
_MORE_THAN_ONE = {"ep": "expert parallelism", "cp": "context parallelism", "n_experts": "experts"}


class UnsupportedError(SimulatorError):
    """A row that cannot be simulated yet, with the reason."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV table. Raises `InputError` on an unreadable file, or one without the columns it needs."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            rows = [{key: (value or "").strip() for key, value in row.items() if key} for row in reader]
            columns = reader.fieldnames or []
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"is no CSV table: {error}", file=path) from None
    absent = [name for name in ("id", *_NEEDED) if name not in columns]
    if absent:
        raise InputError(f"lacks columns: {', '.join(absent)}", file=path, allowed="the columns of published_steps.csv")
    if not rows:
        raise InputError("has no rows", file=path)
    ids = [row["id"] for row in rows]
    if "" in ids:
        raise InputError(f"row {ids.index('') + 1} has none", file=path, key="id")
    twice = next((name for name in ids if ids.count(name) > 1), None)
    if twice is not None:
        raise InputError("stands twice", file=path, key="id", found=twice)
    return rows


def measured_step_s(row: Row) -> float:
    """The printed step time, or the one derived from the printed throughput. Raises `UnsupportedError`."""
    for column in ("measured_step_s", "derived_step_s"):
        if row.get(column):
            seconds = _number(row, column)
            if seconds < _SHORTEST_STEP_s:
                raise UnsupportedError(f"{column} {row[column]!r} is no step of a training run")
            return seconds
    raise UnsupportedError("no step time")


def workload_of(row: Row, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The workload mapping of ``row``; ``settings`` (dotted keys) says what the table does not.

    Raises `UnsupportedError` naming what is missing or not simulated.
    """
    absent = [column for column in _NEEDED if not row.get(column)]
    if absent:
        raise UnsupportedError(f"does not say {', '.join(absent)}")
    for column, what in _MORE_THAN_ONE.items():
        if row.get(column) and _number(row, column) > 1:
            raise UnsupportedError(f"{what} is not simulated yet")
    tp, pp, vpp = _whole(row, "tp"), _whole(row, "pp"), _whole(row, "vpp", 1)
    gpus = _whole(row, "n_gpus")
    dp = _whole(row, "dp", gpus // (tp * pp))
    if tp * pp * dp != gpus:
        raise UnsupportedError(f"tp {tp} x pp {pp} x dp {dp} is not its {gpus} GPUs")
    if row.get("gpus_per_node") not in (None, "", "8"):
        raise UnsupportedError(f"nodes of {row['gpus_per_node']} GPUs are not in topologies/")
    workload: dict[str, Any] = {
        "name": row["id"],
        "model": {
            "layers": _whole(row, "layers"),
            "hidden": _whole(row, "hidden"),
            "heads": _whole(row, "heads"),
            "vocab": _whole(row, "vocab"),
            "attention": _alias(row, "flash_attention"),
        },
        "training": {
            "seq": _whole(row, "seq"),
            "micro_batch": _whole(row, "micro_batch"),
            "global_batch": _whole(row, "global_batch"),
            "precision": _alias(row, "precision"),
            "recompute": _alias(row, "recompute"),
        },
        "parallelism": {
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "vpp": vpp,
            "schedule": _alias(row, "schedule") if vpp == 1 else "interleaved",
            "zero": _alias(row, "zero_stage"),
        },
        "cluster": {"name": _alias(row, "gpu")},
    }
    limit = _ZB_MEMORY_LIMITS.get(row.get("schedule", "").lower())
    if limit is not None:
        workload["parallelism"]["zb_memory_limit"] = limit
    for column in ("kv_heads", "ffn_hidden"):
        if row.get(column):
            workload["model"][column] = _whole(row, column)
    if row.get("seq_parallel"):
        workload["parallelism"]["sequence_parallel"] = _alias(row, "seq_parallel")
    for key, value in settings.items():
        section, _, name = key.partition(".")
        workload[section].setdefault(name, value)
    return workload


def _alias(row: Row, column: str) -> Any:
    text = row.get(column, "").lower()
    if text not in ALIASES[column]:
        raise UnsupportedError(f"{column} {row[column]!r} is not simulated yet")
    return ALIASES[column][text]


def _number(row: Row, column: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UnsupportedError(f"{column} {row[column]!r} is not a number above 0")
    return value


def _whole(row: Row, column: str, default: int | None = None) -> int:
    if default is not None and not row.get(column):
        return default
    value = _number(row, column)
    if value != int(value):
        raise UnsupportedError(f"{column} {row[column]!r} is not a whole number")
    return int(value)
