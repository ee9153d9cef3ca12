"""Measured jobs whose parts meet in a smaller one too: `make test` leaves them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jobs import measured


def form_of(workload: Mapping[str, Any]) -> str:
    """Return what a measured workload combines: framework, axes of its layout, ZeRO, 8 bits, adapters and experts.

    Schedules, recompute, and types of gradients and states are left out: a small job of `jobs.py` has each alone.
    """
    training, parallelism = workload["training"], workload.get("parallelism", {})
    split = [axis for axis in ("tp", "pp", "dp", "cp", "ep") if parallelism.get(axis, 1) > 1]
    parts = ["fp8" in training, "adapters" in training, "moe" in workload["model"]]
    return str((workload.get("framework"), split, parallelism.get("zero"), parts))


def names_of_repeated_forms() -> set[str]:
    """Return the names of measured jobs of whose form there is another one with fewer layers and micro-batches."""
    texts = {name: Path(str(job.workload)).read_text(encoding="utf-8") for name, job in measured().items()}
    workloads = {name: yaml.load(text, Loader=yaml.CSafeLoader) for name, text in texts.items()}

    def work(name: str) -> int:
        """Return layers times micro-batches; those of a whole preset count as a hundred layers."""
        return workloads[name]["model"].get("layers", 100) * workloads[name]["training"]["global_batch"]

    smallest: dict[str, str] = {}
    for name in sorted(workloads, key=work):
        smallest.setdefault(form_of(workloads[name]), name)
    return workloads.keys() - smallest.values()
