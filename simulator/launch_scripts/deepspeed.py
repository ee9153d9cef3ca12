"""DeepSpeed's configuration in JSON (`deepspeed/runtime/config.py` names its keys), by itself or beside a trainer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from simulator.errors import InputError
from simulator.input_files import brief
from simulator.launch_scripts.script import LaunchScript, ScriptReading, flattened

FORMAT = "DeepSpeed configuration"
_NEUTRAL_PREFIXES = (
    "comms_", "csv_", "flops_profiler", "fp16.hysteresis", "fp16.initial_scale", "fp16.loss_scale", "fp16.min_loss",
    "monitor", "scheduler", "tensorboard", "wandb",
)  # fmt: skip
_NEUTRAL = frozenset(
    [
        "steps_per_print",
        "wall_clock_breakdown",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "dump_state",
        "prescale_gradients",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.lr",
        "optimizer.params.weight_decay",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.round_robin_gradients",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ]
)
#: Key of a configuration -> the option of a script that holds it.
OptionOf = Callable[[str], str]


def read(data: Mapping[str, Any], path: Path) -> LaunchScript:
    """Return the job of a configuration by itself, which says neither the model nor the length of sequences."""
    reading = ScriptReading(FORMAT, path, flattened(data))
    reading.workload["framework"] = "deepspeed"
    apply(reading)
    sort_rest(reading)
    return reading.script


def sort_rest(reading: ScriptReading, under: str = "") -> None:
    """Sort the keys of a configuration that nothing has taken, whose options begin with ``under``."""
    reading.sort_rest(_NEUTRAL, _NEUTRAL_PREFIXES, under=under)


def apply(reading: ScriptReading, name: OptionOf = str) -> None:
    """Put what a configuration says; ``name``: the option that holds one of DeepSpeed's keys."""
    _sharding(reading, name)
    _offload(reading, name)
    _batch(reading, name)
    _numerics(reading, name)
    sequence = name("sequence_parallel_size")
    if (reading.number(sequence) or 1) > 1:
        reading.put("parallelism.cp", reading.number(sequence), sequence)
        reading.put("parallelism.cp_method", "ulysses", sequence)
    tensor = name("tensor_parallel.autotp_size")
    if (reading.number(tensor) or 1) > 1:
        reading.put("parallelism.tp", reading.number(tensor), tensor)
    reading.leave_where(sequence, "1")
    reading.leave_where(tensor, "0", "1")


def _sharding(reading: ScriptReading, name: OptionOf) -> None:
    option = name("zero_optimization.stage")
    section = reading.look(name("zero_optimization"), False)
    if section is not False:
        raise InputError(
            "must be a section",
            file=reading.path,
            key=name("zero_optimization"),
            found=brief(section),
            allowed="{stage: 1}",
        )
    stage = reading.number(option)
    if str(reading.look(option)).lower() == "auto":
        stage = -1  # which nothing fills in
    if stage is None:
        reading.assume("parallelism.zero", 0, "DeepSpeed's default of zero_optimization.stage")
    elif stage in (0, 1, 2, 3):
        reading.put("parallelism.zero", stage, option)
    else:
        raise InputError(
            "is no stage of ZeRO",
            file=reading.path,
            key=option,
            found=brief(reading.look(option)),
            allowed="0, 1, 2, 3",
        )
    overlap = name("zero_optimization.overlap_comm")
    if reading.look(overlap) not in (None, "auto"):
        reading.put("parallelism.overlap.grad_reduce", reading.flag(overlap), overlap)


def _offload(reading: ScriptReading, name: OptionOf) -> None:
    for section, key in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        option = name(f"zero_optimization.{section}.device")
        if (device := reading.look(option)) in ("cpu", "nvme"):
            reading.put(f"parallelism.offload.{key}", device, option)
        pinned = name(f"zero_optimization.{section}.pin_memory")
        if reading.look(pinned) is not None and not reading.flag(pinned) and device in ("cpu", "nvme"):
            reading.ignore(pinned, "the host's memory is pinned")
        reading.leave(pinned)
    if reading.flag(option := name("zero_optimization.cpu_offload")):
        reading.put("parallelism.offload.optimizer", "cpu", option)


def _numerics(reading: ScriptReading, name: OptionOf) -> None:
    reading.refuse_both(name("bf16.enabled"), name("fp16.enabled"))
    for dtype in ("bf16", "fp16"):
        if option := reading.first_on(name(f"{dtype}.enabled"), name(f"{dtype}_enabled")):
            reading.put("training.precision", dtype, option)
    clip = name("gradient_clipping")
    if (norm := reading.fraction(clip)) is not None:
        reading.put("training.grad_clip", norm or None, clip)
    kind = name("optimizer.type")
    if str(reading.look(kind)).lower() in ("adam", "adamw"):
        reading.put("training.optimizer.name", "adamw", kind)


def _batch(reading: ScriptReading, name: OptionOf) -> None:
    batch = reading.take(name("train_batch_size"), "training.global_batch")
    size = reading.take(name("train_micro_batch_size_per_gpu"), "training.micro_batch")
    option = name("gradient_accumulation_steps")
    if (steps := reading.number(option)) is not None:
        reading.accumulation = steps
        reading.understand(option, "micro-batches of a step", steps)
    elif size is not None and batch is None and reading.accumulation is None:
        reading.accumulation = 1
