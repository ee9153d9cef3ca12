"""All-to-alls of experts beside another micro-batch: what Megatron-Core asks of a job.

Source: github.com/NVIDIA/Megatron-LM, megatron/core/transformer/transformer_config.py, ``__post_init__``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.errors import InputError
from simulator.input_files import brief

if TYPE_CHECKING:
    from simulator.config.workload import Workload

_KEY = "parallelism.overlap.expert_all_to_all"
#: Schedules in whose slots a forward and a backward pass overlap whoever runs them.
_PAIRS = ("dualpipe", "dualpipe_v")


def problems(workload: Workload) -> Iterator[InputError]:
    """Yield what stands in the way of hiding all-to-alls of experts behind another micro-batch."""
    layout, training = workload.parallelism, workload.training
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
    recompute = training.recompute
    for what, key, value, wrong in (
        ("whole layers are recomputed", "training.recompute", recompute.granularity, recompute.granularity == "full"),
        ("the exchange would be recomputed", "training.recompute.modules", "moe", "moe" in recompute.modules),
        ("layers are recomputed whole", "training.recompute.layers", recompute.layers, recompute.layers is not None),
        ("shared experts hide it", "parallelism.overlap.ep", True, layout.overlap.ep),
        ("more than one layer predicts further tokens", "model.mtp_layers", workload.model.mtp_layers, _many(workload)),
        (
            "activations leave layer by layer",
            "parallelism.offload.activations",
            layout.offload.activations,
            _out(workload),
        ),
        ("gradients or parameters are sharded layer by layer", "parallelism.zero", layout.zero, layout.zero > 1),
    ):
        if wrong:
            yield InputError(
                f"{what}, while all-to-alls hide behind another micro-batch only in passes that are taken apart",
                key=key,
                found=brief(value),
                allowed=_ALLOWED[key],
            )


_ALLOWED = {
    "training.recompute": "none, or selective",
    "training.recompute.modules": "without moe",
    "training.recompute.layers": "null",
    "parallelism.overlap.ep": "false",
    "model.mtp_layers": "0 or 1",
    "parallelism.offload.activations": "none",
    "parallelism.zero": "0 or 1",
}


def _many(workload: Workload) -> bool:
    return workload.model.mtp_layers > 1


def _out(workload: Workload) -> bool:
    return workload.parallelism.offload.activations != "none"


def _schedule_problems(workload: Workload) -> Iterator[InputError]:
    """Yield why the schedule runs no forward pass beside a backward pass."""
    layout = workload.parallelism
    if layout.schedule in _PAIRS:
        return
    if workload.framework.name not in ("megatron_core", "megatron_core_local"):
        yield InputError(
            "1F1B runs passes of two micro-batches at once in Megatron-Core alone",
            key=_KEY,
            found=brief(True),
            allowed=f"framework megatron_core, or schedule {' or '.join(_PAIRS)}",
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
