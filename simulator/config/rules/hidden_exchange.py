"""All-to-alls of experts beside another micro-batch: what Megatron-Core asks of a job.

Source: github.com/NVIDIA/Megatron-LM, megatron/core/transformer/transformer_config.py, ``__post_init__``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from simulator.config.pipelines import find_schedule
from simulator.config.rules.dispatching import CORE_FRAMEWORKS
from simulator.errors import InputError
from simulator.input_files import brief
from simulator.schedules import SCHEDULES

if TYPE_CHECKING:
    from simulator.config.workload import Workload

_KEY = "parallelism.overlap.expert_all_to_all"
#: Names of schedules in whose slots a forward and a backward pass overlap whoever runs them.
_PAIRS = tuple(name for name, schedule in SCHEDULES.items() if schedule.joined)


def problems(workload: Workload) -> Iterator[InputError]:
    """Yield what stands in the way of hiding all-to-alls of experts behind another micro-batch."""
    layout = workload.parallelism
    if not layout.overlap.expert_all_to_all:
        if layout.overlap.delayed_weight_grad:
            yield InputError(
                "gradients of weights wait for nothing unless all-to-alls of experts are hidden",
                key="parallelism.overlap.delayed_weight_grad",
                found=brief(True),
                fix="expert_all_to_all: true",
            )
        return
    if workload.model.moe is None or layout.ep == 1:
        yield InputError(
            "no tokens travel to experts", key=_KEY, found=brief(True), allowed="false, or model.moe with ep > 1"
        )
    yield from _schedule_problems(workload)
    for row in _obstacles(workload):
        if row.wrong:
            yield InputError(
                f"all-to-alls cannot hide behind another micro-batch where {row.why}",
                key=row.key,
                found=brief(row.value),
                allowed=row.allowed,
            )


class _Obstacle(NamedTuple):
    """A value that all-to-alls cannot hide with.

    ``wrong``: the workload has such a one. ``why``: the end of a sentence that begins "where".
    """

    key: str
    value: object
    wrong: bool
    why: str
    allowed: str


def _obstacles(workload: Workload) -> Iterator[_Obstacle]:
    """Yield the keys that matter, with their values."""
    layout, recompute = workload.parallelism, workload.training.recompute
    yield _Obstacle(
        "training.recompute",
        recompute.granularity,
        recompute.granularity == "full",
        "whole layers are recomputed",
        "none, or selective",
    )
    yield _Obstacle(
        "training.recompute.modules",
        "moe",
        "moe" in recompute.modules,
        "the exchange would be recomputed",
        "without moe",
    )
    yield _Obstacle(
        "training.recompute.layers",
        recompute.layers,
        recompute.layers is not None,
        "some layers are recomputed whole",
        "null",
    )
    yield _Obstacle(
        "parallelism.overlap.ep",
        layout.overlap.ep,
        layout.overlap.ep,
        "shared experts of the same micro-batch hide them",
        "false",
    )
    mtp_layers, offloaded = workload.model.mtp_layers, layout.offload.activations
    yield _Obstacle(
        "model.mtp_layers", mtp_layers, mtp_layers > 1, "more than one layer predicts further tokens", "0 or 1"
    )
    yield _Obstacle(
        "parallelism.offload.activations",
        offloaded,
        offloaded != "none",
        "activations leave layer by layer",
        "none",
    )
    yield _Obstacle(
        "parallelism.zero",
        layout.zero,
        layout.zero > 1,
        "gradients or parameters are sharded layer by layer",
        "0 or 1",
    )


def _schedule_problems(workload: Workload) -> Iterator[InputError]:
    """Yield why the schedule runs no forward pass beside a backward pass."""
    layout = workload.parallelism
    if find_schedule(layout.schedule).joined:
        return
    if not workload.software.has_core_experts:
        yield InputError(
            "1F1B runs passes of two micro-batches at once in Megatron-Core alone",
            key=_KEY,
            found=brief(True),
            allowed=f"framework {' or '.join(CORE_FRAMEWORKS)}, or schedule {' or '.join(_PAIRS)}",
        )
    if layout.schedule not in ("1f1b", "interleaved"):
        yield InputError(
            "the schedule runs one pass at a time",
            key="parallelism.schedule",
            found=layout.schedule,
            allowed=f"interleaved, {', '.join(_PAIRS)}, or 1f1b without pipeline parallelism",
        )
    elif layout.schedule == "1f1b" and layout.pp > 1:
        yield InputError(
            "with pipeline stages Megatron-Core runs passes of two micro-batches at once only where ranks have several",
            key="parallelism.schedule",
            found=layout.schedule,
            allowed=f"interleaved with vpp > 1, or {' or '.join(_PAIRS)}",
            fix="schedule: interleaved",
        )
