"""How far predictions like this one have been from measurement: the errors of the nearest suite, and what that covers,
as last recorded by `simulator.validation.record`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from simulator.config import Workload
from simulator.validation.suites import DATA, SUITES

RECORD, COVERED = DATA / "errors.json", DATA / "covered.json"

_GPU, _LINKS = "cluster.node.gpus.type", "links in a node"
_SIZES: dict[str, Callable[[Workload], float]] = {
    "model.hidden": lambda workload: workload.model.hidden,
    "model.layers": lambda workload: workload.model.layers,
    "training.seq": lambda workload: workload.training.seq,
    "GPUs": lambda workload: workload.n_ranks,
}
_KINDS: dict[str, Callable[[Workload], str]] = {
    _GPU: lambda workload: " and ".join(workload.gpu_types),
    _LINKS: lambda workload: _links_in_nodes(workload),
    "training.precision": lambda workload: workload.training.precision,
    "training.implementation": lambda workload: workload.training.implementation,
    "model.attention": lambda workload: workload.model.attention,
    "model.activation": lambda workload: workload.model.activation,
    "parallelism.schedule": lambda workload: workload.parallelism.schedule,
    "training.recompute": lambda workload: workload.training.recompute.granularity,
    "model.moe": lambda workload: "null" if workload.model.moe is None else "experts",
    "model.mla": lambda workload: "null" if workload.model.mla is None else "latent attention",
    "model.mtp_layers": lambda workload: "0" if not workload.model.mtp_layers else "some",
    "parallelism.cp": lambda workload: "1" if workload.parallelism.cp == 1 else "more than 1",
    "parallelism.zero": lambda workload: str(workload.parallelism.zero),
    "parallelism.data_parallel": lambda workload: workload.parallelism.data_parallel,
    "parallelism.grad_compression": lambda workload: workload.parallelism.grad_compression,
    "parallelism.offload": lambda workload: (
        "none" if set(workload.parallelism.offload.model_dump().values()) == {"none"} else "to the host"
    ),
}
#: Of `_KINDS`, those that decide which kernels and collectives there are.
_WEIGHTY = {
    _LINKS,
    "training.precision",
    "training.implementation",
    "model.attention",
    "parallelism.zero",
    "parallelism.data_parallel",
}
#: A suite that never saw more of `_KINDS`, or of `_WEIGHTY`, says little about a workload, and nothing that is measured
#: on another GPU does.
MOST_UNSEEN, MOST_UNSEEN_WEIGHTY = 3, 1


def accuracy(workload: Workload) -> dict[str, Any]:
    """Of the suite that comes nearest to ``workload``: rows, mean and largest absolute error of the step time, its
    note, and where the workload lies outside what the suite covers.

    Nearest is, of the suites that are close if any is, the one that never saw the fewest of `_WEIGHTY`, then of all
    kinds of thing, then the one with a row closest in size. It is ``close`` where it saw the GPU, and never saw at most
    `MOST_UNSEEN_WEIGHTY` of the former and at most `MOST_UNSEEN` of all.
    """
    suite = min(SUITES, key=lambda name: _remoteness(workload, name))
    unseen = _unseen(workload, suite)
    errors = [abs(error) for error in recorded()[suite].values()]
    return {
        "nearest_suite": suite,
        "rows": len(errors),
        "mean_error": statistics.fmean(errors),
        "max_error": max(errors),
        "note": SUITES[suite].note,
        "close": _is_close(unseen),
        "extrapolation": [*unseen.values(), *_outside(workload, suite)],
    }


def coverage(workloads: Sequence[Workload]) -> dict[str, Any]:
    """What measured steps cover: of every kind of thing those that occur, and the sizes that steps have."""
    sizes = dict.fromkeys(tuple(size(workload) for size in _SIZES.values()) for workload in workloads)
    return {
        "kinds": {key: list(dict.fromkeys(map(kind, workloads))) for key, kind in _KINDS.items()},
        "sizes": [dict(zip(_SIZES, each, strict=True)) for each in sizes],
    }


@lru_cache
def recorded() -> dict[str, dict[str, float]]:
    """suite -> row -> (predicted - measured) / measured, as last recorded."""
    errors: dict[str, dict[str, float]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return errors


@lru_cache
def covered() -> dict[str, dict[str, Any]]:
    """suite -> its `coverage`, as last recorded."""
    found: dict[str, dict[str, Any]] = json.loads(COVERED.read_text(encoding="utf-8"))
    return found


def _remoteness(workload: Workload, suite: str) -> tuple[bool, int, int, float]:
    unseen = _unseen(workload, suite)
    return not _is_close(unseen), len(unseen.keys() & _WEIGHTY), len(unseen), _distance(workload, suite)


def _is_close(unseen: Mapping[str, str]) -> bool:
    few = len(unseen) <= MOST_UNSEEN and len(unseen.keys() & _WEIGHTY) <= MOST_UNSEEN_WEIGHTY
    return few and _GPU not in unseen


def _links_in_nodes(workload: Workload) -> str:
    """What joins the GPUs of the job's nodes, such as ``nvlink nvswitch`` or ``PCIe``."""
    links = [node.nvlink for node in workload.cluster.kinds if node.gpus.type in workload.gpu_types]
    return " and ".join(dict.fromkeys("PCIe" if one.kind == "none" else f"{one.name} {one.kind}" for one in links))


def _unseen(workload: Workload, suite: str) -> dict[str, str]:
    """Key of `_KINDS` -> what the workload has of it and the suite never saw."""
    seen: Mapping[str, list[str]] = covered()[suite]["kinds"]
    return {
        key: f"{key} {kind(workload)}: measured with {', '.join(seen[key])} only"
        for key, kind in _KINDS.items()
        if kind(workload) not in seen[key]
    }


def _outside(workload: Workload, suite: str) -> list[str]:
    notes = []
    for key, size in _SIZES.items():
        sizes = [step[key] for step in covered()[suite]["sizes"]]
        if not min(sizes) <= size(workload) <= max(sizes):
            notes.append(f"{key} {size(workload):,}: measured from {min(sizes):,} to {max(sizes):,}")
    return notes


def _distance(workload: Workload, suite: str) -> float:
    """Of the closest row: the sum over sizes of the logarithm of their ratio."""
    return min(
        sum(abs(math.log(size(workload) / step[key])) for key, size in _SIZES.items())
        for step in covered()[suite]["sizes"]
    )
