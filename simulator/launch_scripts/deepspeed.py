"""DeepSpeed's configuration in JSON (`deepspeed/runtime/config.py` names its keys), by itself or beside a trainer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from simulator.errors import InputError
from simulator.launch_scripts.script import LaunchScript, ScriptReading, flattened

FORMAT = "DeepSpeed configuration"
MARKS = frozenset(("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"))
_NEUTRAL_PREFIXES = (
    "comms_", "csv_", "fp16.", "monitor", "optimizer.params", "scheduler", "tensorboard", "wandb", "flops_profiler",
)  # fmt: skip
_NEUTRAL = frozenset(
    [
        "steps_per_print",
        "wall_clock_breakdown",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "dump_state",
        "prescale_gradients",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.round_robin_gradients",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_param.pin_memory",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.sub_group_size",
    ]
)


def read(data: Mapping[str, Any], path: Path) -> LaunchScript:
    """Return the job of a configuration by itself, which says neither the model nor the length of sequences."""
    reading = ScriptReading(FORMAT, path, flattened(data))
    reading.workload["framework"] = "deepspeed"
    apply(reading)
    reading.sort_rest(_NEUTRAL, _NEUTRAL_PREFIXES)
    return reading.script


def apply(reading: ScriptReading, prefix: str = "") -> None:
    """Put what a configuration says, whose keys stand under ``prefix`` of a reading's options."""

    def name(key: str) -> str:
        return prefix + key

    stage = reading.number(name("zero_optimization.stage"), 0)
    if stage not in (0, 1, 2, 3):
        raise InputError("is no stage of ZeRO", file=reading.path, key=name("zero_optimization.stage"), found=stage)
    reading.put("parallelism.zero", stage, name("zero_optimization.stage"))
    for what, key in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        device = reading.get(name(f"zero_optimization.{what}.device"))
        if device in ("cpu", "nvme"):
            reading.put(f"parallelism.offload.{key}", device, name(f"zero_optimization.{what}.device"))
    if reading.flag(name("zero_optimization.cpu_offload")):
        reading.put("parallelism.offload.optimizer", "cpu", name("zero_optimization.cpu_offload"))
    if (overlap := reading.get(name("zero_optimization.overlap_comm"))) is not None and overlap != "auto":
        reading.put("parallelism.overlap.grad_reduce", overlap is True, name("zero_optimization.overlap_comm"))
    _batch(
        reading, name("train_batch_size"), name("train_micro_batch_size_per_gpu"), name("gradient_accumulation_steps")
    )
    _numerics(reading, name)
    sequence = reading.number(name("sequence_parallel_size"))
    if sequence and sequence > 1:
        reading.put("parallelism.cp", sequence, name("sequence_parallel_size"))
        reading.put("parallelism.cp_method", "ulysses", name("sequence_parallel_size"))
    tensor = reading.number(name("tensor_parallel.autotp_size"))
    if tensor and tensor > 1:
        reading.put("parallelism.tp", tensor, name("tensor_parallel.autotp_size"))


def _numerics(reading: ScriptReading, name: Callable[[str], str]) -> None:
    for dtype in ("bf16", "fp16"):
        if reading.flag(name(f"{dtype}.enabled")) or reading.flag(name(f"{dtype}_enabled")):
            reading.put("training.precision", dtype, name(f"{dtype}.enabled"))
    clip = reading.get(name("gradient_clipping"))
    if isinstance(clip, int | float) and clip:
        reading.put("training.grad_clip", float(clip), name("gradient_clipping"))
    kind = reading.get(name("optimizer.type"))
    if kind and str(kind).lower() in ("adam", "adamw"):
        reading.put("training.optimizer.name", "adamw", name("optimizer.type"))


def _batch(reading: ScriptReading, total: str, micro: str, steps: str) -> None:
    batch, size, accumulation = reading.number(total), reading.number(micro), reading.number(steps)
    if batch is not None:
        reading.put("training.global_batch", batch, total)
    if size is not None:
        reading.put("training.micro_batch", size, micro)
    if accumulation is not None:
        reading.accumulation = accumulation
    elif size is not None and batch is None and reading.accumulation is None:
        reading.accumulation = 1
