"""Scripts that train with Hugging Face's `Trainer`, by its arguments on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.launch_scripts import trainer
from simulator.launch_scripts.models import put_model
from simulator.launch_scripts.script import LaunchScript, ScriptReading

FORMAT = "Hugging Face Trainer arguments"
MARKS = frozenset(("per_device_train_batch_size", "model_name_or_path"))
#: Names that scripts have for the length of a sequence.
_LENGTHS = ("max_seq_length", "max_seq_len", "max_length", "model_max_length", "cutoff_len", "block_size")


def read(options: Mapping[str, Any], path: Path, gpus: int | None) -> LaunchScript:
    """Return the job of a command's options on so many GPUs; None: the script leaves it open."""
    reading = ScriptReading(FORMAT, path, options, gpus=gpus)
    reading.workload["framework"] = "hugging_face"
    if name := reading.get("model_name_or_path"):
        put_model(reading, "model_name_or_path", str(name))
    for option in _LENGTHS:
        if "seq" not in reading.workload.get("training", {}):
            reading.take(option, "training.seq")
    trainer.put_precision(reading, unsaid="fp32" if reading.get("zero_stage") is None else "fp16")
    trainer.put_batch(reading, "per_device_train_batch_size", "gradient_accumulation_steps")
    trainer.put_optimizer(reading, "optim")
    trainer.put_clipping(reading)
    if reading.flag("gradient_checkpointing"):
        reading.put("training.recompute", "full", "gradient_checkpointing")
    if reading.flag("use_peft") or reading.flag("use_lora"):
        trainer.put_adapters(reading, "lora_r", "lora_target_modules", every=False, usual_rank=8)
    stage = reading.number("zero_stage")
    if stage is not None:  # DeepSpeedExamples build their configuration of such options
        reading.workload["framework"] = "deepspeed"
        reading.put("parallelism.zero", stage, "zero_stage")
        if reading.flag("offload"):
            reading.put("parallelism.offload.optimizer", "cpu", "offload")
        reading.used.add("deepspeed")
    elif str(reading.options.get("deepspeed", True)) != "True":
        trainer.put_deepspeed(reading, "deepspeed")
    elif reading.get("torch_dtype") in (None, "float32"):
        trainer.assume_wide_weights(reading, "transformers loads weights in fp32 unless torch_dtype says otherwise")
    if fsdp := reading.get("fsdp"):
        words = str(fsdp)
        reading.put("parallelism.zero", 0 if "no_shard" in words else 3, f"fsdp {words}")
        if "offload" in words:
            reading.put("parallelism.offload.parameters", "cpu", f"fsdp {words}")
        reading.used.add("fsdp_transformer_layer_cls_to_wrap")
    reading.sort_rest(trainer.NEUTRAL, trainer.NEUTRAL_PREFIXES)
    return reading.script
