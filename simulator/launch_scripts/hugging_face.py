"""Scripts that train with Hugging Face's `Trainer`, by its arguments on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.launch_scripts import deepspeed, trainer
from simulator.launch_scripts.models import put_model
from simulator.launch_scripts.script import LaunchScript, ScriptReading

FORMAT = "Hugging Face Trainer arguments"
MARKS = frozenset(("per_device_train_batch_size", "model_name_or_path"))
#: Names that scripts have for the length of a sequence.
_LENGTHS = ("max_seq_length", "max_seq_len", "max_length", "model_max_length", "cutoff_len", "block_size")
#: Switch of adapters -> the rank where none is said, if that is not PEFT's 8 (trl, trainer/model_config.py).
_RANKS = {"use_peft": 16}
#: DeepSpeed's names of keys -> options of the scripts in DeepSpeedExamples, which make a configuration of them.
_EXAMPLES = {"zero_optimization.stage": "zero_stage", "zero_optimization.cpu_offload": "offload"}


def read(options: Mapping[str, Any], path: Path, gpus: int | None) -> LaunchScript:
    """Return the job of a command's options on so many GPUs; None: the script leaves it open."""
    reading = ScriptReading(FORMAT, path, options, gpus=gpus)
    reading.workload["framework"] = "hugging_face"
    if name := reading.look("model_name_or_path"):
        put_model(reading, str(name), "model_name_or_path")
    reading.take(reading.first_of(*_LENGTHS)[0], "training.seq")
    by_example = reading.number("zero_stage") is not None
    trainer.put_precision(reading, unsaid="fp16" if by_example else "fp32")
    trainer.put_batch(reading, "per_device_train_batch_size", "gradient_accumulation_steps")
    trainer.put_optimizer(reading, "optim")
    trainer.put_clipping(reading)
    if reading.flag("gradient_checkpointing"):
        reading.put("training.recompute", "full", "gradient_checkpointing")
    if switch := reading.first_on("use_peft", "use_lora"):
        trainer.put_adapters(
            reading, "lora_r", "lora_target_modules", chosen_by=switch, usual_rank=_RANKS.get(switch, 8)
        )
        trainer.put_base(reading)
    if by_example:
        reading.put("framework", "deepspeed", *(["deepspeed"] if reading.flag("deepspeed") else []))
        deepspeed.apply(reading, lambda key: _EXAMPLES.get(key, key))
    by_deepspeed = by_example or trainer.put_deepspeed(reading, "deepspeed")
    if reading.look("fsdp"):
        trainer.put_fsdp(reading, "fsdp")
    if not by_deepspeed:
        _weights(reading)
    reading.leave_where("ddp_backend", "nccl")
    reading.sort_rest(trainer.NEUTRAL, trainer.NEUTRAL_PREFIXES)
    return reading.script


def _weights(reading: ScriptReading) -> None:
    """Put the type of the weights that a checkpoint is loaded in."""
    dtype = str(reading.look("torch_dtype", "float32")).removeprefix("torch.")
    decided = "master_weights" in reading.workload.get("training", {}).get("optimizer", {})
    if dtype == "float32":
        if not decided:
            trainer.assume_wide_weights(reading, "transformers loads weights in fp32 unless torch_dtype says otherwise")
        reading.leave("torch_dtype")
    elif decided and dtype in ("bfloat16", "float16"):
        reading.ignore("torch_dtype", "under FSDP accelerate makes the weights fp32 for mixed precision")
    elif dtype in ("bfloat16", "float16"):
        reading.put("training.optimizer.master_weights", False, "torch_dtype")
