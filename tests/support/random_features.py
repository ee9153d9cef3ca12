"""Features of random jobs, by which a run of many says what it covered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from simulator.config import Workload
from tests.support.random_jobs import Job, load

#: Subject -> how many jobs had each of its features.
Coverage = dict[str, Counter[str]]

AXES = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp")
OVERLAPS = ("grad_reduce", "param_gather", "p2p", "tp", "ep", "expert_all_to_all", "delayed_weight_grad")


def features(job: Job) -> dict[str, list[str]]:
    """Return the features of a legal job by subject; a subject without any has ``none``."""
    workload = load(job)
    subjects = {
        "parallelism": [axis for axis in AXES if getattr(workload.parallelism, axis) > 1],
        "schedule": [workload.parallelism.schedule] if workload.parallelism.pp > 1 else [],
        "data parallel": list(_data_parallel(workload)),
        "overlap": [name for name in OVERLAPS if getattr(workload.parallelism.overlap, name)],
        "framework": [workload.framework.name + (" compiled" if workload.framework.compile else "")],
        "graphs": list(workload.framework.cuda_graphs),
        "model": list(_model(workload)),
        "precision": [workload.training.precision],
        "recipe": [recipe.name] if (recipe := workload.training.product_recipe) else [],
        "adapters": list(_adapters(workload)),
        "optimizer": [workload.training.optimizer.name],
        "loss": [workload.training.loss.name],
        "recompute": [workload.training.recompute.granularity],
        "offload": [f"{what} {place}" for what, place in workload.parallelism.offload if place != "none"],
        "dispatcher": [workload.parallelism.dispatcher] if workload.parallelism.ep > 1 else [],
        "cluster": [workload.cluster.name.removeprefix("inline_")],
        "parts of clusters": list(_parts(job["cluster"])),
    }
    return {subject: names or ["none"] for subject, names in subjects.items()}


def coverage(jobs: Iterable[Mapping[str, Iterable[str]]]) -> Coverage:
    """Return the counts of the features of jobs."""
    counts: Coverage = {}
    for job in jobs:
        for subject, names in job.items():
            counts.setdefault(subject, Counter()).update(set(names))
    return counts


def table(counts: Coverage) -> str:
    """Return a line per subject, the most frequent feature first.

    >>> table(coverage([{"schedule": ["1f1b"]}, {"schedule": ["gpipe"]}, {"schedule": ["gpipe"]}]))
    'schedule: gpipe 2, 1f1b 1'
    """
    rows = {subject: sorted(names.items(), key=lambda pair: (-pair[1], pair[0])) for subject, names in counts.items()}
    return "\n".join(f"{subject}: {', '.join(f'{name} {n}' for name, n in row)}" for subject, row in rows.items())


def _data_parallel(workload: Workload) -> Iterator[str]:
    layout = workload.parallelism
    if layout.dp * layout.cp == 1:
        return
    yield layout.data_parallel if not layout.zero else f"zero {layout.zero}"
    if layout.hsdp:
        yield "hsdp"
    if layout.grad_compression != "none":
        yield f"compressed to {layout.grad_compression}"


def _model(workload: Workload) -> Iterator[str]:
    model = workload.model
    yield from (mixer.name if mixer.name != "none" else "no mixer" for mixer in model.kinds)
    yield from (f"MLP {model.mlp(layer)}" for layer in range(model.layers))
    if model.mla:
        yield "latent attention"
    if model.residual_streams > 1:
        yield "residual streams"
    if model.encoder:
        yield "encoder"
    if model.moe and model.moe.beside_dense:
        yield "experts beside an MLP"
    if model.mtp_layers:
        yield "multi-token prediction"


def _adapters(workload: Workload) -> Iterator[str]:
    training = workload.training
    if training.adapters:
        yield training.adapters.method
    elif training.frozen:
        yield "frozen parts"
    if training.base:
        yield f"base {training.base}"


def _parts(cluster: Mapping[str, Any]) -> Iterator[str]:
    for override in cluster.get("overrides", ()):
        yield " ".join(key for key in override if key != "link")
    if "background" in cluster:
        yield "other traffic"
    if isinstance(cluster.get("node", {}).get("gpus"), list):
        yield "several types of GPU in a node"
