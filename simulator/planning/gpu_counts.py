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
from simulator.hardware.cluster_spec import ClusterSpec
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


def whole_nodes(cluster: ClusterSpec, counts: CountRange) -> Iterator[int]:
    """Yield the numbers of GPUs between two, ascending, that fill whole nodes or an even part of one.

    A cluster of a fixed size has no more than it has.

    >>> from simulator.config import load_workload
    >>> list(whole_nodes(load_workload("gpt22b_tp8").cluster, CountRange(1, 32)))
    [1, 2, 4, 8, 16, 24, 32]
    """
    per_node = cluster.gpus_per_node
    most = min(counts.most, cluster.n_gpus if cluster.fixed_nodes else MAX_GPUS)
    parts = [size for size in divisors(per_node) if size < per_node]
    yield from (size for size in parts if counts.least <= size <= most)
    first = math.ceil(counts.least / per_node) * per_node
    yield from range(first, most + 1, per_node)


def least_gpus(workload: Workload, step_time_s: float) -> int:
    """Return the fewest GPUs that could take so long for a step, did each compute at its peak all the time.

    No simulated step is faster, as no kernel is. Half of full attention counts, and the fastest type of GPU. Where some
    products are of another precision, the peak of the fastest one counts.
    """
    profiles = load_profiles(workload.calibrations, workload.training.attention_kernel)
    training, overrides = workload.training, workload.cluster.overrides
    scales = [one.speed_scale or 1.0 for one in overrides if isinstance(one, GpuOverride)]
    whole = workload.parallelism.model_copy(update={"tp": 1, "pp": 1, "cp": 1})  # which pads the vocabulary least
    flops = model_flops_per_step_causal(workload.model_copy(update={"parallelism": whole}))
    plain = training.fp8 is None and training.fp4 is None and training.adapters is None
    peaks = [
        figure.value
        for profile in profiles.values()
        for dtype, figure in profile.gpu_spec.peak_flops_per_s.items()
        if not plain or dtype == training.trained_dtype
    ]
    fastest = max(peaks) * max(scales, default=1.0)
    return max(1, math.ceil(flops / (fastest * step_time_s)))
