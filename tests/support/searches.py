"""Searches of small jobs, and the same layouts simulated one and all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from simulator.api import run
from simulator.config import Workload, load_workload
from simulator.config.variants import Variants
from simulator.searching.bounds import LayoutBound, LayoutBounds
from simulator.searching.space import LayoutSpace
from tests.support.jobs import job

#: Eight layers of which one GPU cannot hold all, few micro-batches: quick to simulate, and not all layouts fit.
LARGE = job(
    model={"layers": 8, "hidden": 8192, "heads": 64, "vocab": 1024},
    training={"seq": 2048, "global_batch": 8, "precision": "bf16"},
)


def space_on(gpus: int, workload: Mapping[str, Any] = LARGE, **fixed: Any) -> LayoutSpace:
    """The layouts of a job on so many GPUs. ``fixed``: last part of a key -> its values."""
    base = load_workload(workload)
    sections = {"micro_batch": "training", "recompute": "training"}
    keys = {f"{sections.get(name, 'parallelism')}.{name}": values for name, values in fixed.items()}
    return LayoutSpace(Variants(base, replace(base.cluster, nodes=base.cluster.nodes_for(gpus))), gpus, keys)


def bound_of(workload: Workload) -> LayoutBound:
    """Bounds of a layout whatever memory GPUs have."""
    return replace(LayoutBounds.for_workload(workload), capacity_bytes=math.inf).bound({}, workload)


def figures_of(workload: Workload) -> Mapping[str, Any]:
    return run(workload).key_figures()
