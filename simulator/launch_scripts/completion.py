"""A workload file from a launch script and from what people add: the machines, the number of GPUs, other keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from simulator.errors import InputError, raise_all
from simulator.input_files import brief, with_changes
from simulator.launch_scripts.script import LaunchScript
from simulator.units import counted

#: Dotted key -> the part of a workload that no simulation can do without, and how it is added.
_NEEDED = {
    "model": (
        "the model",
        "--set model.preset=llama3-8b (see llmsim list models), or --set model.hf_config=config.json",
    ),
    "model.vocab": ("the size of the vocabulary", "--set model.vocab=50257"),
    "training.seq": ("tokens per sequence", "--set training.seq=4096"),
    "training.micro_batch": ("the micro-batch", "--set training.micro_batch=1"),
    "training.global_batch": ("the global batch", "--set training.global_batch=64"),
    "cluster": ("the machines", "--cluster dgx_h100, or another of llmsim list topologies, or a file"),
}


def workload_data(
    script: LaunchScript, name: str, file: object, cluster: str | None, gpus: int | None, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of a workload file.

    ``cluster``: a cluster by name or path. ``gpus``: how many are used, in place of what the script says. ``changes``:
    dotted keys that replace those of the script. Raises `InputError` that lists what neither the script nor these say.
    """
    data = {"name": name, **{key: value for key, value in script.workload.items() if value != {}}}
    if cluster is not None:
        data["cluster"] = cluster
    data = with_changes(data, changes, {"model": "preset", "framework": "name"})
    missing = [key for key in _NEEDED if _is_missing(data, script, key)]
    if missing:
        raise_all(
            InputError("the script does not say it", file=file, key=_NEEDED[key][0], fix=_NEEDED[key][1])
            for key in missing
        )
    layout = data.setdefault("parallelism", {})
    if not isinstance(layout, dict):
        return data  # which the check of the workload refuses
    sizes = [_size(layout, axis) for axis in ("tp", "pp", "cp")]
    if "dp" not in layout:
        layout["dp"] = _replicas(script, sizes, gpus, file)
    elif gpus not in (None, count := math.prod(sizes) * _size(layout, "dp")):
        raise InputError("is not tp x pp x cp x dp of the job", file="--gpus", found=gpus, fix=f"--gpus {count}")
    if script.copies is not None:
        _share(layout, script.copies, file)
    training = data["training"]
    if "global_batch" not in training:
        training["global_batch"] = _size(training, "micro_batch") * (script.accumulation or 1) * _size(layout, "dp")
    if script.steps is not None and "total_tokens" not in training:
        training["total_tokens"] = float(script.steps * _size(training, "global_batch") * _size(training, "seq"))
    order = ("name", "model", "framework", "training", "parallelism", "cluster")
    return {key: data[key] for key in (*order, *(data.keys() - set(order))) if key in data}


def _size(section: Mapping[str, Any], key: str) -> int:
    """Return a number of a section; 1 for what is none, which the check of the workload refuses."""
    value = section.get(key)
    return int(value) if isinstance(value, int | float) and value > 0 and value % 1 == 0 else 1


def _share(layout: dict[str, Any], copies: int, file: object) -> None:
    """Put how many replicas share a copy of the model. Raises `InputError` where they do not divide over copies."""
    replicas = _size(layout, "dp")
    if replicas % copies:
        raise InputError(
            f"{counted(replicas, 'replica')} do not divide over {copies:,} copies of the sharded model",
            file=file,
            key="parallelism.dp",
        )
    shards = replicas // copies
    if layout.setdefault("zero", 3 if shards > 1 else 0) and shards > 1:
        layout.setdefault("hsdp", shards)


def _is_missing(data: Mapping[str, Any], script: LaunchScript, key: str) -> bool:
    section, _, inner = key.partition(".")
    if key == "cluster":
        return data.get(section) is None
    values = set(data[section]) if isinstance(data.get(section), Mapping) else set()
    if key == "model":
        return not {"preset", "hf_config", "layers"} & values
    if key == "model.vocab":
        return "layers" in values and not {"preset", "hf_config", "vocab"} & values
    if key == "training.micro_batch":
        return not {"micro_batch", "global_batch"} & values
    if key == "training.global_batch" and script.accumulation is not None:
        return False
    return inner not in values


def settled(script: LaunchScript, changes: Mapping[str, Any]) -> LaunchScript:
    """Return a script of which nothing is understood that ``changes`` replace: such options are told instead."""

    kept, replaced = [], []
    for entry in script.understood:
        key = next((change for change in changes if f"{entry.key}.".startswith(f"{change}.")), None)
        if key is None or changes[key] == entry.value:
            kept.append(entry)
        else:
            replaced.append(f"{entry.option} {brief(entry.value)}: {key} is set to {brief(changes[key])}")
    return replace(script, understood=tuple(kept), ignored=(*script.ignored, *replaced))


def _replicas(script: LaunchScript, sizes: list[int], gpus: int | None, file: object) -> int:
    """Return the data parallelism: GPUs over those of a replica. Raises `InputError` where they do not divide."""
    tp, pp, cp = sizes
    replica = tp * pp * cp
    count = script.gpus if gpus is None else gpus
    if count is None:
        raise InputError(
            "the script does not say how many GPUs it runs on", file=file, key="GPUs", fix=f"--gpus {8 * replica}"
        )
    if count % replica or not count:
        raise InputError(
            f"{count:,} GPUs are no multiple of tp {tp} x pp {pp} x cp {cp}, which are those of one replica",
            file="--gpus" if gpus is not None else file,
            key=None if gpus is not None else "GPUs",
            fix=f"--gpus {max(count // replica, 1) * replica}",
        )
    return count // replica
