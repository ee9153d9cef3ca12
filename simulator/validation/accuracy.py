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

_GPU, _LINKS, _SCALE = "cluster.node.gpus.type", "links in a node", "GPUs"
_SIZES: dict[str, Callable[[Workload], float]] = {
    "model.hidden": lambda workload: workload.model.hidden,
    "model.layers": lambda workload: workload.model.layers,
    "training.seq": lambda workload: workload.training.seq,
    _SCALE: lambda workload: workload.n_ranks,
}
_KINDS: dict[str, Callable[[Workload], str]] = {
    _GPU: lambda workload: " and ".join(workload.gpu_types),
    _LINKS: lambda workload: _links_in_nodes(workload),
    "training.precision": lambda workload: workload.training.precision,
    "framework": lambda workload: workload.framework.title,
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
#: Keys that decide which kernels and collectives run, and how long each takes.
_WEIGHTY = {
    _GPU,
    "framework",
    _SCALE,
    _LINKS,
    "training.precision",
    "model.attention",
    "parallelism.zero",
    "parallelism.data_parallel",
}
#: A size so many times what a suite saw at most, or at least, is unseen like another kind of thing.
FAR = 10
#: A suite that lacks more things, or more of `_WEIGHTY`, says little about a workload. So does one of another GPU, or
#: of far more or fewer GPUs.
MOST_UNSEEN, MOST_UNSEEN_WEIGHTY = 3, 1


def accuracy(workload: Workload) -> dict[str, Any]:
    """Return the figures of the suite that is nearest to ``workload``.

    They are its rows, the mean and largest absolute error of the step time, its note, and how the workload differs.
    A suite lacks a thing where it has no row of that kind, or none within a factor `FAR` of that size.
    A suite is ``close`` where it has rows of the GPU and of such numbers of GPUs. It then lacks at most
    `MOST_UNSEEN_WEIGHTY` of `_WEIGHTY`, and at most `MOST_UNSEEN` things in all.
    Close suites come before others. Among them the nearest suite lacks the fewest of `_WEIGHTY`, then the fewest
    things. Then it has the fewest notes of ``extrapolation``, which count sizes a little outside too, weightiest first.
    Of equals that are close the one with a row closest in size is taken. Of other equals it is the one with the
    largest mean error, as nothing says that a smaller error holds.
    """
    suite = min(SUITES, key=lambda name: _remoteness(workload, name))
    unseen = _unseen(workload, suite)
    errors = [abs(error) for error in recorded()[suite].values()]
    return {
        "nearest_suite": suite,
        "rows": len(errors),
        "mean_error": _mean_error(suite),
        "max_error": max(errors),
        "note": SUITES[suite].note,
        "close": _is_close(unseen),
        "extrapolation": list(_differences(workload, suite).values()),
    }


def coverage(workloads: Sequence[Workload]) -> dict[str, Any]:
    """Return the coverage of measured steps: each kind of thing that occurs in them, and their sizes."""
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
    coverage_of_suite: dict[str, dict[str, Any]] = json.loads(COVERED.read_text(encoding="utf-8"))
    return coverage_of_suite


def _remoteness(workload: Workload, suite: str) -> tuple[bool, int, int, int, float]:
    """Return a key that sorts the nearest suite first, by the rule of `accuracy`."""
    unseen = _unseen(workload, suite)
    close = _is_close(unseen)
    last = _distance(workload, suite) if close else -_mean_error(suite)
    return not close, len(unseen.keys() & _WEIGHTY), len(unseen), len(_differences(workload, suite)), last


def _is_close(unseen: Mapping[str, str]) -> bool:
    few = len(unseen) <= MOST_UNSEEN and len(unseen.keys() & _WEIGHTY) <= MOST_UNSEEN_WEIGHTY
    return few and not unseen.keys() & {_GPU, _SCALE}


def _mean_error(suite: str) -> float:
    return statistics.fmean(map(abs, recorded()[suite].values()))


def _links_in_nodes(workload: Workload) -> str:
    """Return the links between GPUs of the job's nodes, such as ``nvlink nvswitch`` or ``PCIe``."""
    links = [node.nvlink for node in workload.cluster.kinds if node.gpus.type in workload.gpu_types]
    return " and ".join(dict.fromkeys("PCIe" if link.kind == "none" else f"{link.name} {link.kind}" for link in links))


def _told(kind: str) -> str:
    return {"null": "none"}.get(kind, kind.replace(", compiled", " compiled"))


def _unseen(workload: Workload, suite: str) -> dict[str, str]:
    """Key -> what the workload has of it and the suite never saw, those of `_WEIGHTY` first."""
    seen: Mapping[str, list[str]] = covered()[suite]["kinds"]
    notes = {
        key: f"{key} {_told(kind(workload))}: measured with {' or '.join(map(_told, seen[key]))} only"
        for key, kind in _KINDS.items()
        if kind(workload) not in seen[key]
    } | _outside(workload, suite, FAR)
    return {key: notes[key] for key in sorted(notes, key=lambda key: key not in _WEIGHTY)}


def _differences(workload: Workload, suite: str) -> dict[str, str]:
    """`_unseen`, and sizes outside those of the suite by less than that."""
    return _unseen(workload, suite) | _outside(workload, suite, 1)


def _outside(workload: Workload, suite: str, times: float) -> dict[str, str]:
    """Key of `_SIZES` -> that of the workload, where it is more than ``times`` the suite's largest, or less than its
    smallest / ``times``."""
    notes = {}
    for key, size in _SIZES.items():
        sizes = [step[key] for step in covered()[suite]["sizes"]]
        if not min(sizes) / times <= size(workload) <= max(sizes) * times:
            notes[key] = f"{key} {size(workload):,}: measured from {min(sizes):,} to {max(sizes):,}"
    return notes


def _distance(workload: Workload, suite: str) -> float:
    """Return the distance of the closest row: the sum over sizes of the logarithm of their ratio."""
    return min(
        sum(abs(math.log(size(workload) / step[key])) for key, size in _SIZES.items())
        for step in covered()[suite]["sizes"]
    )
