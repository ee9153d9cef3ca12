"""Data parallelism: what is sharded, and how gradients travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.config.rules.numbers import divisors, listed, nearest
from simulator.errors import InputError
from simulator.frameworks import FRAMEWORKS
from simulator.input_files import brief

if TYPE_CHECKING:
    from simulator.config.workload import Workload


def layout_problems(workload: Workload) -> Iterator[InputError]:
    """Yield groups of shards without ZeRO, or that do not divide replicas; and what `_rhythm_problems` yields."""
    layout = workload.parallelism
    yield from _rhythm_problems(workload)
    if layout.hsdp is None:
        return
    if not layout.zero:
        yield InputError(
            "shards nothing without ZeRO",
            key="parallelism.hsdp",
            found=layout.hsdp,
            allowed="parallelism.zero above 0 beside it",
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


def _fully_sharding(workload: Workload) -> list[str]:
    """Return the frameworks that would shard the parameters of a workload by torch's fully_shard."""
    return [name for name, one in FRAMEWORKS.items() if one.replication(workload.traits).fully_sharded]


def _rhythm_problems(workload: Workload) -> Iterator[InputError]:
    """Yield gradients that the framework reduces more often, or less, than the workload says."""
    if workload.adds_whole_gradients and not workload.replication.fully_sharded:
        yield InputError(
            f"{workload.framework.title} reduces the gradients of every micro-batch",
            key="parallelism.sync_each_micro_batch",
            found=brief(False),
            allowed=f"true, or framework: {', '.join(_fully_sharding(workload))}",
        )
    layout = workload.parallelism
    if layout.sync_each_micro_batch and layout.zero == 3 and workload.stage_runtime.keeps_units:
        yield InputError(
            "torch's pipelines reduce the gradients of sharded stages once, behind the last micro-batch",
            key="parallelism.sync_each_micro_batch",
            found=brief(True),
            allowed="false",
        )


def warnings(workload: Workload) -> Iterator[str]:
    """Yield lines on shards of one rank alone, and on stages that communicate for every micro-batch of a pipeline."""
    layout = workload.parallelism
    if layout.zero and layout.replicas("dp") == 1:
        state = ("optimizer state", "gradients and optimizer state", "whole state")[layout.zero - 1]
        yield f"parallelism.zero saves nothing: with dp * cp 1 there is no replica to share the {state} with"
    elif layout.zero and layout.shards("dp") == 1:
        yield "parallelism.zero saves nothing: with hsdp 1 every rank holds a whole shard"
    elif layout.zero >= 2 and layout.pp > 1 and not workload.stage_runtime.keeps_units:
        times = workload.microbatches
        gathers = ", and parameters gathered," if layout.zero == 3 else ""
        yield (
            f"zero {layout.zero} in a pipeline: gradients are reduced{gathers} for each of the {times} micro-batches "
            f"of a stage, where zero 1 does so once a step"
        )
