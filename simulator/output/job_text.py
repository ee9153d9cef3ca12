"""Words on what a job is: its model, layout, batch, cluster and the work of its whole run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from simulator.adapters import ADAPTERS
from simulator.output.tables import JsonReport
from simulator.units import counted, format_count, format_encoder, format_parameters

#: Changed keys of a cluster that are named.
_CHANGED_KEYS = 2


def describe_layout(parallelism: Mapping[str, Any]) -> str:
    """Write a layout such as ``tp 8 x pp 12 x dp 16, 1f1b``.

    Degrees above one come first, then the schedule of a pipeline, then all settings that differ from common ones.
    """
    degrees = [f"{axis} {parallelism[axis]}" for axis in ("tp", "cp", "pp", "dp") if parallelism[axis] > 1]
    extras = [f"{axis} {parallelism[axis]}" for axis in ("ep", "etp") if parallelism[axis] > 1]
    extras += [PurePath(parallelism["schedule"]).name] if parallelism["pp"] > 1 else []
    if parallelism["vpp"] > 1:
        extras.append(f"{parallelism['vpp']} chunks")
    if parallelism["zero"]:
        inside = f" in groups of {parallelism['hsdp']}" if parallelism["hsdp"] else ""
        extras.append(f"ZeRO-{parallelism['zero']}{inside}")
    if parallelism["sequence_parallel"] and parallelism["tp"] > 1:
        extras.append("sequence parallel")
    if parallelism["data_parallel"] != "allreduce":
        extras.append(str(parallelism["data_parallel"]).replace("_", " "))
    if parallelism["grad_compression"] != "none":
        extras.append(f"{parallelism['grad_compression']} gradients")
    extras += [f"{what} on {place}" for what, place in parallelism["offload"].items() if place != "none"]
    return ", ".join([" x ".join(degrees) or "one GPU", *extras])


def model_and_precision(report: JsonReport) -> str:
    """Return the size of the model, its encoder, what is trained of it, and the recipe of products in 8 or 4 bits."""
    size = format_parameters(report["params_total"], report["params_active"])
    encoder = report.get("encoder")  # files of earlier versions have none
    before = f", with {format_encoder(**encoder)}" if encoder else ""
    return f"{size}{before}{_trained(report)}{_few_bits(report)}"


def _trained(report: JsonReport) -> str:
    """Return how many parameters are trained, and how, where it is not all of them."""
    tuning = report["tuning"]
    if tuning is None:  # a captured model has weights that were frozen as it was recorded
        frozen = report["params_trained"] < report["params_total"]
        return f", {format_count(report['params_trained'])} trained" if frozen else ""
    adapters, base = tuning["adapters"], tuning["base"]
    method = ADAPTERS[adapters["method"]].title + f" rank {adapters['rank']}" if adapters else ""
    how = ", ".join([*([method] if adapters else []), *([f"{base} base"] if base else [])])
    return f", {format_count(report['params_trained'])} trained" + (f" ({how})" if how else "")


def _few_bits(report: JsonReport) -> str:
    """Return whose recipe products in 8 or 4 bits have, where there are such."""
    chosen = [(bits, report[key]) for bits, key in ((8, "fp8"), (4, "fp4")) if report[key]]
    return "".join(f", products in {bits} bits ({choice['recipe']})" for bits, choice in chosen)


def run_work(run: Mapping[str, Any]) -> str:
    """Return what a whole run does; nothing of files of earlier versions.

    >>> run_work({"tokens": 1_000_000_000_000, "steps": 238_419})
    ' for 1.00 T tokens in 238,419 steps'
    """
    return f" for {format_count(run['tokens'])} tokens in {counted(run['steps'], 'step')}" if "steps" in run else ""


def batch_line(report: JsonReport) -> str:
    """Return a line on the tokens of a step, and how they are trained; nothing of files of earlier versions.

    >>> sizes = {"seq": 2048, "micro_batch": 1, "global_batch": 1536}
    >>> batch_line({"training": sizes | {"precision": "bf16", "recompute": "none", "optimizer": "adamw"}})
    'a step: 1,536 sequences of 2,048, micro-batches of 1, bf16, adamw, no recompute\\n'
    """
    training = report.get("training")
    if training is None:
        return ""
    recompute = "no recompute" if training["recompute"] == "none" else f"recompute {training['recompute']}"
    return (
        f"a step: {counted(training['global_batch'], 'sequence')} of {training['seq']:,}, micro-batches of "
        f"{training['micro_batch']:,}, {training['precision']}, {training['optimizer']}, {recompute}\n"
    )


def cluster_text(report: JsonReport) -> str:
    """Return the cluster's name, and the keys in which it differs from the shipped cluster of that name.

    >>> cluster_text({"cluster": "dgx_h100", "cluster_changes": []})
    'dgx_h100'
    >>> cluster_text({"cluster": "dgx_h100", "cluster_changes": ["node.nics.count", "node.gpus.count", "fabric.kind"]})
    'dgx_h100, changed: node.nics.count, node.gpus.count and 1 more'
    """
    keys = report["cluster_changes"]
    if not keys:
        return str(report["cluster"])
    more = f" and {len(keys) - _CHANGED_KEYS} more" if len(keys) > _CHANGED_KEYS else ""
    return f"{report['cluster']}, changed: {', '.join(keys[:_CHANGED_KEYS])}{more}"
