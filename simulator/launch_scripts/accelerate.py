"""accelerate's configuration in YAML (`accelerate config` writes it)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.errors import InputError
from simulator.launch_scripts import trainer
from simulator.launch_scripts.script import LaunchScript, ScriptReading, flattened

FORMAT = "accelerate configuration"
MARKS = frozenset(("distributed_type", "compute_environment"))
_NEUTRAL = frozenset(
    [
        "compute_environment",
        "debug",
        "downcast_bf16",
        "enable_cpu_affinity",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "main_training_function",
        "num_machines",
        "rdzv_backend",
        "same_network",
        "use_cpu",
        "tpu_env",
        "tpu_use_cluster",
        "tpu_use_sudo",
    ]
)


def read(data: Mapping[str, Any], path: Path) -> LaunchScript:
    """Return the job of a configuration, which says neither the model nor batches. Raises `InputError`."""
    reading = ScriptReading(FORMAT, path, flattened(data))
    reading.workload["framework"] = "hugging_face"
    reading.gpus = reading.number("num_processes")
    precision = str(reading.get("mixed_precision", "no")).lower()
    if precision in ("bf16", "fp16", "fp8"):
        reading.put("training.precision", precision, "mixed_precision")
    else:
        reading.assume("training.precision", "fp32", "mixed_precision is no")
    kind = str(reading.get("distributed_type", "NO")).upper()
    if kind == "FSDP":
        trainer.put_fsdp(reading, "fsdp_config.")
    elif kind == "DEEPSPEED":
        _deepspeed(reading)
    elif kind not in ("NO", "MULTI_GPU"):
        message = "is no kind of distribution that is simulated"
        raise InputError(
            message, file=path, key="distributed_type", found=kind, allowed="NO, MULTI_GPU, FSDP, DEEPSPEED"
        )
    reading.sort_rest(_NEUTRAL)
    return reading.script


def _deepspeed(reading: ScriptReading) -> None:
    prefix = "deepspeed_config."
    trainer.put_deepspeed(reading, f"{prefix}deepspeed_config_file")
    reading.workload["framework"] = "hugging_face_deepspeed"
    if (stage := reading.number(f"{prefix}zero_stage")) is not None:
        reading.put("parallelism.zero", stage, f"{prefix}zero_stage")
    for what, key in (("offload_optimizer_device", "optimizer"), ("offload_param_device", "parameters")):
        device = reading.get(f"{prefix}{what}")
        if device in ("cpu", "nvme"):
            reading.put(f"parallelism.offload.{key}", device, f"{prefix}{what}")
    reading.accumulation = reading.number(f"{prefix}gradient_accumulation_steps", reading.accumulation)
    if (clip := reading.get(f"{prefix}gradient_clipping")) not in (None, "auto"):
        reading.put("training.grad_clip", float(clip), f"{prefix}gradient_clipping")
    for name in ("deepspeed_multinode_launcher", "zero3_init_flag", "zero3_save_16bit_model"):
        reading.used.add(prefix + name)
