"""accelerate's configuration in YAML (`accelerate config` writes it)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.errors import InputError
from simulator.launch_scripts import deepspeed, trainer
from simulator.launch_scripts.script import LaunchScript, ScriptReading, flattened

FORMAT = "accelerate configuration"
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
        "tpu_env",
        "tpu_use_cluster",
        "tpu_use_sudo",
        "deepspeed_config.deepspeed_multinode_launcher",
        "deepspeed_config.zero3_init_flag",
        "deepspeed_config.zero3_save_16bit_model",
    ]
)
#: DeepSpeed's own names of keys -> those of the section ``deepspeed_config``, where they differ.
_DEEPSPEED = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.device": "offload_param_device",
}


def read(data: Mapping[str, Any], path: Path) -> LaunchScript:
    """Return the job of a configuration, which says neither the model nor batches. Raises `InputError`."""
    reading = ScriptReading(FORMAT, path, flattened(data))
    reading.workload["framework"] = "hugging_face"
    if (processes := reading.number("num_processes")) is not None:
        reading.gpus = processes
        reading.understand("num_processes", "GPUs", processes)
    _precision(reading)
    kind = str(reading.look("distributed_type") or "NO").upper()  # NO without quotes is false in YAML
    if kind == "FSDP":
        trainer.put_fsdp(reading)
    elif kind == "DEEPSPEED":
        _deepspeed(reading)
    elif kind not in ("NO", "MULTI_GPU"):
        message = "is no kind of distribution that is simulated"
        raise InputError(
            message, file=path, key="distributed_type", found=kind, allowed="NO, MULTI_GPU, FSDP, DEEPSPEED"
        )
    if reading.look("distributed_type") is not None:
        reading.understand("distributed_type", "data parallelism", kind)
    reading.sort_rest(_NEUTRAL)
    return reading.script


def _precision(reading: ScriptReading) -> None:
    precision = str(reading.look("mixed_precision", "no")).lower()
    if precision in ("bf16", "fp16"):
        reading.put("training.precision", precision, "mixed_precision")
    elif precision == "fp8":
        reading.ignore("mixed_precision", "no recipe in 8 bits is simulated with Hugging Face's Trainer")
        reading.assume("training.precision", "bf16", "what is not in 8 bits is in it")
    else:
        reading.assume("training.precision", "fp32", "mixed_precision is no")


def _deepspeed(reading: ScriptReading) -> None:
    prefix = "deepspeed_config."
    if not trainer.put_deepspeed(reading, f"{prefix}deepspeed_config_file"):
        reading.workload["framework"] = "hugging_face_deepspeed"
        deepspeed.apply(reading, lambda key: f"{prefix}{_DEEPSPEED.get(key, key)}")
