"""Numbers of GPUs that are worth a search: whole nodes, and parts of one node."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from simulator.bounds import MAX_GPUS
from simulator.config import Workload
from simulator.config.profile import load_profiles
from simulator.config.rules.numbers import divisors
from simulator.errors import InputError
from simulator.hardware.overrides import GpuOverride
from simulator.models import model_flops_per_step_causal

#: A plan without any other end goes up to so many times the GPUs that would do at their peak: 6 % of it.
MOST_TIMES_LEAST = 16


@dataclass(frozen=True)
class CountRange:
    """Least and most GPUs of a plan."""

    least: int
    most: int

    def __post_init__(self) -> None:
        """Raise `InputError` where there is no number between the two."""
        if not 1 <= self.least <= self.most:
            allowed = "least and most, such as 64..2048"
            raise InputError("is no range", file="gpus", found=f"{self.least}..{self.most}", allowed=allowed)


def whole_nodes(workload: Workload, counts: CountRange) -> Iterator[int]:
    """Yield the numbers of GPUs between two, ascending, that fill whole nodes or an even part of one.

    The numbers end with the GPUs of a cluster whose size is fixed, or whose nodes are listed.

    >>> from simulator.config import load_workload
    >>> list(whole_nodes(load_workload("gpt22b_tp8"), CountRange(1, 32)))
    [1, 2, 4, 8, 16, 24, 32]
    """
    cluster = workload.cluster
    per_node = cluster.gpus_per_node
    most = min(counts.most, most_gpus(workload) or MAX_GPUS)
    parts = [size for size in divisors(per_node) if size < per_node]
    yield from (size for size in parts if counts.least <= size <= most)
    first = math.ceil(counts.least / per_node) * per_node
    yield from range(first, most + 1, per_node)


def most_gpus(workload: Workload) -> int | None:
    """Return the GPUs of a cluster that has a size of its own, or None."""
    cluster = workload.cluster
    return cluster.n_gpus if cluster.fixed_nodes or workload.nodes is not None else None


def least_gpus(workload: Workload, step_time_s: float) -> int:
    """Return the fewest GPUs that could take so long for a step, did each compute at its peak all the time.

    No simulated step is faster, as no kernel is. Half of full attention counts, and the fastest type of GPU. Where
    products may be of several precisions, as in captured models, the peak of the fastest one counts.
    """
    profiles = load_profiles(workload.calibrations, workload.training)
    training, overrides = workload.training, workload.cluster.overrides
    scales = [one.speed_scale or 1.0 for one in overrides if isinstance(one, GpuOverride)]
    whole = workload.parallelism.model_copy(update={"tp": 1, "pp": 1, "cp": 1})  # which pads the vocabulary least
    flops = _least_flops(workload.model_copy(update={"parallelism": whole}))
    several = (training.fp8, training.fp4, training.adapters, workload.model.captured_model)
    plain = all(one is None for one in several)
    peaks = [
        figure.value
        for profile in profiles.values()
        for dtype, figure in profile.gpu_spec.peak_flops_per_s.items()
        if not plain or dtype == training.trained_dtype
    ]
    fastest = max(peaks) * max(scales, default=1.0)
    return max(1, math.ceil(flops / (fastest * step_time_s)))


def _least_flops(workload: Workload) -> float:
    """Return FLOPs that every step of the model has.

    Experts with a capacity may drop any number of tokens, so that they count nothing.
    """
    model = workload.model
    flops = model_flops_per_step_causal(workload)
    if model.moe is not None and model.moe.capacity_factor is not None:
        one, two = (model_flops_per_step_causal(_with_experts(workload, count)) for count in (1, 2))
        flops = 2 * one - two  # linear in the experts that a token meets: so much with none of them
    return flops


def _with_experts(workload: Workload, top_k: int) -> Workload:
    """Return the workload with so many experts that a token meets."""
    assert workload.model.moe is not None
    moe = workload.model.moe.model_copy(update={"top_k": top_k})
    return workload.model_copy(update={"model": workload.model.model_copy(update={"moe": moe})})
