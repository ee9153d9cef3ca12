"""Parameter servers, and compression of gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.config.workload import Workload


def problems(workload: Workload) -> Iterator[InputError]:
    """Yield options that parameter servers, or compressed gradients, do not go with.

    Megatron-LM, torchtitan and DeepSpeed have no parameter servers; compression is DeepSpeed's and FP8-LM's.
    """
    layout, training = workload.parallelism, workload.training
    if layout.data_parallel == "allreduce":
        if layout.servers > 1:
            yield InputError(
                "has no meaning with data_parallel allreduce",
                key="parallelism.servers",
                found=layout.servers,
                fix="data_parallel: parameter_server",
            )
        yield from _compression_problems(workload)
        return
    with_servers = f"with data_parallel {layout.data_parallel}"
    for key, value, none, why in (
        ("parallelism.zero", layout.zero, 0, "servers hold the optimizer state, workers have none to shard"),
        (
            "parallelism.offload.optimizer",
            layout.offload.optimizer,
            "none",
            "servers hold the optimizer state, workers have none to offload",
        ),
        (
            "training.grad_clip",
            training.grad_clip,
            None,
            "each server knows its part of the gradients only, not their norm",
        ),
        (
            "parallelism.grad_compression",
            layout.grad_compression,
            "none",
            "servers add up gradients in the type they are kept in",
        ),
    ):
        if value != none:
            shown = "null" if none is None else none
            yield InputError(
                f"{with_servers}: {why}", key=key, found=value, allowed=f"{shown}, or data_parallel: allreduce"
            )
    plan = layout.pipeline_schedule
    if plan.copies > 1 or (layout.data_parallel == "async" and plan.steady):
        yield InputError(
            f"{with_servers}: the schedule {layout.schedule} "
            + ("adds up the gradients of two ranks" if plan.copies > 1 else "runs on from step to step"),
            key="parallelism.schedule",
            found=layout.schedule,
            fix="schedule: 1f1b",
        )


def _compression_problems(workload: Workload) -> Iterator[InputError]:
    layout = workload.parallelism
    kind = layout.grad_compression
    if kind == "none":
        return
    if layout.hsdp is not None:
        yield InputError(
            f"with grad_compression {kind}: shards are reduced twice, and would have to be unpacked in between",
            key="parallelism.hsdp",
            found=layout.hsdp,
            allowed="null, or grad_compression: none",
        )
    if kind == "1bit" and layout.zero:
        yield InputError(
            "with grad_compression 1bit: what is sent is momentum, which every rank needs whole (DeepSpeed's 1-bit "
            "optimizers do not shard it)",
            key="parallelism.zero",
            found=layout.zero,
            allowed="0, or grad_compression: int8 or fp8",
        )
    if kind == "1bit" and layout.offload.optimizer != "none":
        yield InputError(
            "with grad_compression 1bit: what is sent is momentum, which has to be on the GPU",
            key="parallelism.offload.optimizer",
            found=layout.offload.optimizer,
            allowed="none, or grad_compression: int8 or fp8",
        )


def warnings(workload: Workload) -> Iterator[str]:
    """Compression of what is not sent."""
    layout = workload.parallelism
    if layout.grad_compression != "none" and layout.replicas("dp") == 1:
        kind = layout.grad_compression
        yield f"parallelism.grad_compression {kind} saves nothing: with dp * cp 1 no gradient is sent"
