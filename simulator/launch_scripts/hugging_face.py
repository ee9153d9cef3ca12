"""Scripts that train with Hugging Face's `Trainer`, by its arguments on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from simulator.launch_scripts import deepspeed, trainer
from simulator.launch_scripts.models import put_model
from simulator.launch_scripts.script import LaunchScript, ScriptReading

FORMAT = "Hugging Face Trainer arguments"
MARKS = frozenset(("per_device_train_batch_size", "model_name_or_path"))
#: Names that scripts have for the length of a sequence.
_LENGTHS = ("max_seq_length", "max_seq_len", "max_length", "model_max_length", "cutoff_len", "block_size")
#: Switch of adapters -> the rank where none is said, if that is not PEFT's 8 (trl, trainer/model_config.py).
_RANKS = {"use_peft": 16}
#: Switches that scripts of trl alone have (trl, trainer/sft_config.py and trainer/model_config.py).
_OF_TRL = ("use_peft", "packing", "assistant_only_loss", "completion_only_loss")
#: Beginning of shipped models whose checkpoints are in fp32.
_IN_FP32 = "gpt2"
#: Types of weights by PyTorch's names.
_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
#: transformers' name of attention -> `model.attention`.
_ATTENTION = {"sdpa": "flash", "flash_attention_2": "flash", "flash_attention_3": "flash", "eager": "unfused"}
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
    weights = _weight_type(reading)
    trainer.put_precision(reading, unsaid="fp16" if by_example else weights.dtype)
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
        _put_weights(reading, weights)
    _put_attention(reading)
    reading.leave_where("ddp_backend", "nccl")
    reading.sort_rest(trainer.NEUTRAL, trainer.NEUTRAL_PREFIXES)
    return reading.script


class _WeightType(NamedTuple):
    """The type that a checkpoint is loaded in, the option that says so, if one does, and else why it is assumed."""

    dtype: str
    option: str = ""
    why: str = ""


def _weight_type(reading: ScriptReading) -> _WeightType:
    """Return the type of the weights as transformers 5 loads them.

    `from_pretrained` takes the checkpoint's (modeling_utils.py, ``dtype = "auto"``). Most are in bf16, GPT-2's in fp32.
    transformers 4 took fp32, and trl still asks for it (trl, ``dtype="float32"``).
    """
    option, value = reading.first_of("dtype", "torch_dtype")
    dtype = _TYPES.get(str(value).removeprefix("torch."))
    if dtype is not None:
        return _WeightType(dtype, option)
    if by := reading.first_on(*_OF_TRL):
        return _WeightType("fp32", why=f"trl, whose option {by} is, loads weights so")
    model = str(reading.workload.get("model", {}).get("preset", ""))
    if model.startswith(_IN_FP32):
        return _WeightType("fp32", why="its checkpoint is so")
    return _WeightType("bf16", why="as most checkpoints, whose type transformers 5 keeps; transformers 4 loads fp32")


def _put_weights(reading: ScriptReading, weights: _WeightType) -> None:
    """Put whether weights are kept in fp32. That follows from the type in which a checkpoint is loaded."""
    training, key = reading.workload.get("training", {}), "training.optimizer.master_weights"
    if "master_weights" in training.get("optimizer", {}):
        if weights.option and weights.dtype != "fp32":
            reading.ignore(weights.option, "under FSDP accelerate makes the weights fp32 for mixed precision")
        elif weights.option:
            reading.leave(weights.option)
    elif weights.dtype == "fp32":
        trainer.assume_wide_weights(reading, weights.why or f"{weights.option} says so")
        if weights.option:
            reading.leave(weights.option)
    elif weights.option:
        reading.put(key, False, weights.option)
    else:
        reading.assume(key, False, f"{weights.dtype} alone, {weights.why}")


def _put_attention(reading: ScriptReading) -> None:
    """Put the kind of attention; of flash kernels the newest that the GPU has is simulated."""
    option, name = reading.first_of("attn_implementation", "_attn_implementation")
    if name in _ATTENTION:
        reading.put("model.attention", _ATTENTION[name], option)
    if name == "flash_attention_2":
        reading.assumed.append("training.attention_kernel: newest of the GPU; on Hopper flash2 is FlashAttention 2")
