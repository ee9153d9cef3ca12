"""Data parallelism: what is sharded, and how gradients travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.config.rules.numbers import divisors, listed, nearest
from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.config.workload import Workload


def layout_problems(workload: Workload) -> Iterator[InputError]:
    """Groups to shard in that are none: without ZeRO nothing is sharded, and replicas must divide into whole groups."""
    layout = workload.parallelism
    if layout.hsdp is None:
        return
    if not layout.zero:
        yield InputError(
            "shards nothing without ZeRO",
            key="parallelism.hsdp",
            found=layout.hsdp,
            allowed="zero: 1, 2 or 3 beside it",
            fix="zero: 3",
        )
    replicas = layout.replicas("dp")
    if replicas % layout.hsdp:
        yield InputError(
            f"does not divide the {replicas} data-parallel ranks (dp {layout.dp} x cp {layout.cp})",
            key="parallelism.hsdp",
            found=layout.hsdp,
            allowed=listed(divisors(replicas)),
            fix=f"hsdp: {nearest(layout.hsdp, divisors(replicas))}",
        )


def warnings(workload: Workload) -> Iterator[str]:
    """Sharding over nobody, and stages that communicate for every micro-batch of a pipeline."""
    layout = workload.parallelism
    if layout.zero and layout.replicas("dp") == 1:
        state = ("optimizer state", "gradients and optimizer state", "whole state")[layout.zero - 1]
        yield f"parallelism.zero saves nothing: with dp * cp 1 there is no replica to share the {state} with"
    elif layout.zero and layout.shards("dp") == 1:
        yield "parallelism.zero saves nothing: with hsdp 1 every rank holds a whole shard"
    elif layout.zero >= 2 and layout.pp > 1:
        times = workload.microbatches
        gathers = ", and parameters gathered," if layout.zero == 3 else ""
        yield (
            f"zero {layout.zero} in a pipeline: gradients are reduced{gathers} for each of the {times} micro-batches "
            f"of a stage, where zero 1 does so once a step"
        )
