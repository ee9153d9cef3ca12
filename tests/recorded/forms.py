"""Measured jobs that differ from a smaller one in sizes alone: `make test` leaves them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jobs import measured


def form_of(workload: Mapping[str, Any]) -> str:
    """Return what a measured workload is but for sizes: framework, axes of its layout, and options that are texts,
    switches or mappings.

    Workloads of one form pass through the same code.
    """
    training, parallelism = workload["training"], workload.get("parallelism", {})
    options = [
        {key: value for key, value in section.items() if isinstance(value, str | bool | dict)}
        for section in (training, parallelism)
    ]
    split = [key for key, value in parallelism.items() if value != 1]
    return str((workload.get("framework"), "moe" in workload["model"], options, split, parallelism.get("zero")))


def names_of_repeated_forms() -> set[str]:
    """Return the names of measured jobs of whose form there is another one with fewer layers and micro-batches."""
    texts = {name: Path(str(job.workload)).read_text(encoding="utf-8") for name, job in measured().items()}
    workloads = {name: yaml.safe_load(text) for name, text in texts.items()}

    def work(name: str) -> int:
        return workloads[name]["model"]["layers"] * workloads[name]["training"]["global_batch"]

    smallest: dict[str, str] = {}
    for name in sorted(workloads, key=work):
        smallest.setdefault(form_of(workloads[name]), name)
    return workloads.keys() - smallest.values()
