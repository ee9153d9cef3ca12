"""A row of a table of measured steps as a workload, or the reason why it cannot be simulated.

Columns are those of the shipped tables in ``data/``; a user's table has the same. Free-text names go through `ALIASES`.
A row may name a workload file instead (column ``workload``), beside which none of those may be filled. A column named
by a dotted key of workload files sets that key, as ``--set`` does. Columns with other names are labels, as long as none
is nearly one of these (see `tables`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.config import Workload, load_workload
from simulator.config.cluster import load_cluster
from simulator.config.presets import presets
from simulator.config.section import paths
from simulator.errors import InputError, SimulatorError
from simulator.input_files import as_path, closest, parse_yaml
from simulator.validation.suites import DATA
from simulator.validation.tables import is_key, read_table, unknown

Row = Mapping[str, str]

#: column -> what its free text means here. Matching ignores case.
ALIASES: dict[str, dict[str, Any]] = {
    "gpu": {
        "a100-80g-sxm": "dgx_a100",
        "a100-80g-sxm4": "dgx_a100",
        "a100-80g": "dgx_a100",
        "a100 (dgx-a100)": "dgx_a100",
        "a100": "dgx_a100",
        "a100-40g": "oci_a100_40gb",
        "h100": "dgx_h100",
        "h100-80g": "dgx_h100",
        "h100-80g-hbm3": "dgx_h100",
        "h100-80g-hbm3 (700w)": "dgx_h100",
        "h100-96g-hbm2e-500w": "grand_teton_h100",
        "h200": "dgx_h200",
        "b200": "dgx_b200",
        "b200-sxm": "dgx_b200",
        "b300": "dgx_b300",
        "gb200": "gb200_nvl72",
        "gb300": "gb300_nvl72",
    },
    # Whose clock plays the events of a row that is read for its memory, which depends on their order alone.
    "stand-in": {
        "v100-16g": "dgx_a100",
        "v100-32g": "dgx_a100",
        "h100-96g-hbm2e-500w": "dgx_h100",
        "h200": "dgx_h100",
        "b200-sxm": "dgx_h100",
        "gb300": "dgx_h100",
    },
    "precision": {
        "fp16": "fp16",
        "fp16 mixed": "fp16",
        "fp16 weights, fp32 adam": "fp16",
        "bf16": "bf16",
        "amp_bf16": "bf16",
        "": "bf16",
    },
    # To memory: weights, gradients and what is kept are as wide as in bf16.
    "8 bits": {"float8": "bf16", "fp8 current scaling": "bf16"},
    "recompute": {"full": "full", "selective": "selective", "selective op": "ops", "none": "none", "": "none"},
    "schedule": {
        "": "1f1b",
        "none": "1f1b",
        "1f1b": "1f1b",
        "interleaved-1f1b": "interleaved",
        "1f1b-i": "interleaved",
        "gpipe": "gpipe",
        "fsdp": "1f1b",
        "hsdp": "1f1b",
        "fsdp+tp": "1f1b",
        "zb-h1": "zb_h1",
        "zb-h2": "zb_h2",
        "zb-v": "zb_v",
        "zb-1p": "zb_auto",
        "zb-2p": "zb_auto",
    },
    "zero_stage": {"": 0, "0": 0, "1": 1, "2": 2, "3": 3},
    "seq_parallel": {"y": True, "n": False},
    "flash_attention": {"": "flash", "y": "flash", "n": "unfused"},
}
#: Schedule -> the memory of the automatic search, as a multiple of 1F1B's (arXiv 2401.10241, section 5).
_ZB_MEMORY_LIMITS = {"zb-1p": 1.0, "zb-2p": 2.0}
#: What a step of a training run takes, s.
_SHORTEST_STEP_s, _LONGEST_STEP_s = 1e-6, 1e6
#: No figure of a table is larger: a cell is mistyped.
_LARGEST = 1e15
_NEEDED = ("layers", "hidden", "heads", "vocab", "seq", "gpu", "n_gpus", "tp", "pp", "micro_batch", "global_batch")
#: What a shipped model that is named in column ``model`` has.
_OF_A_PRESET = ("layers", "hidden", "heads", "vocab")
#: What else `workload_of` reads.
_OPTIONAL = (
    *("model", "params_b", "kv_heads", "ffn_hidden", "n_experts", "flash_attention", "precision", "recompute"),
    *("dp", "cp", "ep", "vpp", "schedule", "zero_stage", "seq_parallel", "gpus_per_node"),
)
_TIMES = ("measured_step_s", "derived_step_s")
#: Sections of workload files, of which a column sets one key.
_SECTIONS = tuple(key for key in Workload.model_fields if key not in ("name", "note", "model"))
#: All columns that are read or refused, beside dotted keys.
_KNOWN = ("id", "workload", *_NEEDED, *_OPTIONAL, *_TIMES, *_SECTIONS)


class UnsupportedError(SimulatorError):
    """A row that cannot be simulated yet, with the reason."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table of steps, workload files found beside it. Raises `InputError` on an unreadable file, or one
    without the columns it needs or with a misspelt one."""
    needed = [name for name in _NEEDED if name not in _OF_A_PRESET]
    rows = read_table(path, needed, _KNOWN, reference=str(DATA / "megatron-2022.csv"), instead="workload")
    keys = list(paths(Workload))
    for name in filter(is_key, rows[0]):
        # Below a key that holds no section, a mapping of anything may be.
        if not any(key == name or (name.startswith(f"{key}.") and not _has_keys(key, keys)) for key in keys):
            near = closest(name, keys)
            raise InputError("no such key of a workload", file=path, key=name, fix=f"{near} instead" if near else None)
    for row in rows:
        if row.get("workload"):
            row["workload"] = str(as_path(row["workload"], base=path.parent, file=path, key=f"workload of {row['id']}"))
    return rows


def _has_keys(section: str, keys: Sequence[str]) -> bool:
    return any(key.startswith(f"{section}.") for key in keys)


def labels(rows: Sequence[Row]) -> list[str]:
    """Columns of a table of steps that nothing reads, beside the labels of the shipped tables."""
    return [name for name in unknown(rows[0], _KNOWN) if not is_key(name)]


def measured_step_s(row: Row) -> float:
    """The printed step time, or the one derived from the printed throughput. Raises `UnsupportedError`."""
    for column in _TIMES:
        if row.get(column):
            seconds = number(row, column)
            if not _SHORTEST_STEP_s <= seconds <= _LONGEST_STEP_s:
                raise UnsupportedError(f"{column} {row[column]!r} is no step of a training run")
            return seconds
    raise UnsupportedError("no step time")


def measured_memory(row: Row) -> float:
    """The printed memory, in the unit of its source. Raises `UnsupportedError`."""
    if not row.get("mem_gb"):
        raise UnsupportedError("no memory")
    return number(row, "mem_gb")


def preset_of(row: Row) -> str | None:
    """The shipped model that a row names, such as llama3-8b for "Llama3.1-8B"; its columns say what differs."""
    words = row.get("model", "").lower().replace("llama3.1", "llama3").split()
    named = re.sub(r"[^a-z0-9]", "", words[0]) if words else ""
    return next((name for name in presets() if re.sub(r"[^a-z0-9]", "", name) == named), None)


def loaded(row: Row, settings: Mapping[str, Any], *, memory_only: bool = False) -> Workload:
    """The workload of ``row``: the file that it names, or what its columns say (see `workload_of`), with the dotted
    keys that are columns. Such a file leaves nothing open for ``settings`` or ``memory_only`` to say.

    Raises `UnsupportedError` and `InputError`.
    """
    place = f"row {row['id']}"
    changes = {key: parse_yaml(value, f"{place} {key}") for key, value in row.items() if value and is_key(key)}
    if whole := [key for key in _SECTIONS if row.get(key)]:
        raise UnsupportedError(f"columns set dotted keys, such as cluster.name, not {', '.join(whole)}")
    if not row.get("workload"):
        return load_workload(workload_of(row, settings, memory_only=memory_only), changes, by=place)
    if beside := [*(key for key in (*_NEEDED, *_OPTIONAL) if key != "gpu" and row.get(key)), *settings]:
        raise UnsupportedError(f"a workload file says {', '.join(beside)} itself; columns of dotted keys change it")
    workload = load_workload(row["workload"], changes, by=place)
    named = ALIASES["gpu"].get(row.get("gpu", "").lower())  # else a label that means nothing here
    if named is not None and load_cluster(named).gpu_types != workload.gpu_types:
        types = " and ".join(workload.gpu_types)
        raise UnsupportedError(f"gpu {row['gpu']!r} is not the {types} of its workload file")
    return workload


def workload_of(row: Row, settings: Mapping[str, Any], *, memory_only: bool = False) -> dict[str, Any]:
    """Return the workload mapping of ``row``; ``settings`` (dotted keys) fill in what the table does not say.

    ``memory_only``: the memory is wanted and not the time, so that a GPU without a profile will do.
    Raises `UnsupportedError` naming what is missing or not simulated.
    """
    preset = preset_of(row)
    row = _with_layers({key: value for key, value in row.items() if value})
    keys = {*row, *(key.partition(".")[2] for key in settings), *(presets()[preset] if preset else ())}
    _check_columns_said(row, keys, memory_only)
    tp, pp, vpp, cp = _whole(row, "tp"), _whole(row, "pp"), _whole(row, "vpp", 1), _whole(row, "cp", 1)
    dp = _data_parallel(row, tp, pp, cp)
    workload: dict[str, Any] = {
        "name": row["id"],
        "model": {**({"preset": preset} if preset else {}), **_model_keys(row)},
        "training": {
            "seq": _whole(row, "seq"),
            "micro_batch": _whole(row, "micro_batch"),
            # Memory does not ask how many micro-batches there are once they fill the pipeline.
            "global_batch": _whole(row, "global_batch", 4 * pp * vpp * dp * _whole(row, "micro_batch")),
            "precision": _precision(row, memory_only),
            "recompute": _recompute(row),
        },
        "parallelism": {
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "vpp": vpp,
            "schedule": _alias(row, "schedule") if vpp == 1 else "interleaved",
            **_optional_parallelism(row),
        },
        "cluster": {"name": _cluster(row, memory_only)},
    }
    counts = split_layers(_whole(row, "layers"), pp * vpp) if "layers" in row else None
    if counts is not None and not any(key.startswith("parallelism.account_for") for key in settings):
        workload["parallelism"]["layers_per_stage"] = counts
    for key, value in settings.items():
        section, _, name = key.partition(".")
        workload.setdefault(section, {}).setdefault(name, value)
    return workload


def _check_columns_said(row: Row, keys: Collection[str], memory_only: bool) -> None:
    """Raise `UnsupportedError` where neither the row nor the ``keys`` beside it say what a workload needs."""
    optional = {"global_batch"} if memory_only and "micro_batch" in row else set()
    absent = [column for column in _NEEDED if column not in keys and column not in optional]
    if absent:
        raise UnsupportedError(f"does not say {', '.join(absent)}")
    if _whole(row, "n_experts", 1) > 1 and "moe" not in keys:
        raise UnsupportedError("its experts are not those of a shipped model")
    if row.get("gpus_per_node") not in (None, "", "8"):
        raise UnsupportedError(f"nodes of {row['gpus_per_node']} GPUs are not in topologies/")


def _data_parallel(row: Row, tp: int, pp: int, cp: int) -> int:
    """Return the row's replicas. Raises `UnsupportedError` where its degrees do not multiply to its GPUs."""
    gpus = _whole(row, "n_gpus")
    dp = _whole(row, "dp", gpus // (tp * pp * cp))
    if tp * pp * cp * dp != gpus:
        degrees = f"tp {tp} x pp {pp}{f' x cp {cp}' if cp > 1 else ''} x dp {dp}"
        raise UnsupportedError(f"{degrees} is not its {gpus} GPUs")
    return dp


def _model_keys(row: Row) -> dict[str, Any]:
    """Return the keys of section ``model`` that the row has columns for."""
    sizes = ("layers", "hidden", "heads", "vocab", "kv_heads", "ffn_hidden")
    keys: dict[str, Any] = {column: _whole(row, column) for column in sizes if column in row}
    if "flash_attention" in row:
        keys["attention"] = _alias(row, "flash_attention")
    return keys


def _optional_parallelism(row: Row) -> dict[str, Any]:
    """Return the keys of section ``parallelism`` that rows may leave out."""
    keys: dict[str, Any] = {axis: _whole(row, axis) for axis in ("cp", "ep") if _whole(row, axis, 1) > 1}
    limit = _ZB_MEMORY_LIMITS.get(row.get("schedule", "").lower())
    if limit is not None:
        keys["zb_memory_limit"] = limit
    if "zero_stage" in row:
        keys["zero"] = _alias(row, "zero_stage")
    if row.get("seq_parallel"):
        keys["sequence_parallel"] = _alias(row, "seq_parallel")
    return keys


def _with_layers(row: Row) -> Row:
    """Return ``row`` with the layers that follow from its parameters, where it lacks layers.

    A layer whose MLP is 4 h wide has 12 h^2 parameters; the vocabulary has one table.
    """
    if "layers" in row or not {"params_b", "hidden", "vocab"} <= set(row):
        return row
    hidden, params = _whole(row, "hidden"), 1e9 * number(row, "params_b")
    return {**row, "layers": str(round((params - _whole(row, "vocab") * hidden) / (12 * hidden**2)))}


def split_layers(layers: int, stages: int) -> list[int] | None:
    """Return layers per stage where they do not divide; None where they do.

    The ends have one layer fewer where the embedding and the head count as one each. Else stages are filled from the
    front, each as full as the largest has to be (DeepSpeed's ``partition_balanced``).
    """
    if layers % stages == 0:
        return None
    each = math.ceil(layers / stages)
    if (layers + 2) % stages == 0:
        return [each - 1, *[each] * (stages - 2), each - 1]
    counts = [each] * (layers // each)
    counts.append(layers - sum(counts))
    counts += [0] * (stages - len(counts))
    while 0 in counts:  # each stage has a layer
        counts[max(at for at, count in enumerate(counts) if count > 1)] -= 1
        counts[counts.index(0)] = 1
    return counts


def _cluster(row: Row, memory_only: bool) -> str:
    gpu = row["gpu"].lower()
    if memory_only and gpu in ALIASES["stand-in"]:
        return str(ALIASES["stand-in"][gpu])
    return str(_alias(row, "gpu"))


def _precision(row: Row, memory_only: bool) -> str:
    text = row.get("precision", "").lower()
    if memory_only and text in ALIASES["8 bits"]:
        return str(ALIASES["8 bits"][text])
    return str(_alias(row, "precision"))


def _recompute(row: Row) -> Any:
    """Megatron-LM's modules may stand in brackets: "selective (mlp, core_attn)"."""
    named = re.fullmatch(r"selective \((.+)\)", row.get("recompute", ""))
    if named is None:
        return _alias(row, "recompute")
    return {"granularity": "selective", "modules": [module.strip() for module in named[1].split(",")]}


def _alias(row: Row, column: str) -> Any:
    text = row.get(column, "").lower()
    if text not in ALIASES[column]:
        raise UnsupportedError(f"{column} {row[column]!r} is not simulated yet")
    return ALIASES[column][text]


def number(row: Row, column: str) -> float:
    """The figure of a cell, above 0. Raises `UnsupportedError`."""
    try:
        value = float(re.sub(r"^(\d+)k\b.*", r"\g<1>000", row[column]))  # a vocabulary of "250k (approx.)"
    except ValueError:
        value = math.nan
    if not 0 < value <= _LARGEST:
        raise UnsupportedError(f"{column} {row[column]!r} is not a number above 0, and at most {_LARGEST:g}")
    return value


def _whole(row: Row, column: str, default: int | None = None) -> int:
    if default is not None and not row.get(column):
        return default
    value = number(row, column)
    if value != int(value):
        raise UnsupportedError(f"{column} {row[column]!r} is not a whole number")
    return int(value)
