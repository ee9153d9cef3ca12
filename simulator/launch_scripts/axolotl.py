"""axolotl's YAML (`src/axolotl/utils/schemas` names its keys)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.errors import InputError
from simulator.launch_scripts import trainer
from simulator.launch_scripts.models import put_model
from simulator.launch_scripts.script import LaunchScript, ScriptReading, flattened, words_of

FORMAT = "axolotl configuration"
_NEUTRAL = frozenset(
    [
        "model_type",
        "pad_to_sequence_len",
        "sample_packing",
        "tf32",
        "local_rank",
        "strict",
        "flash_attention",
        "sdp_attention",
        "val_set_size",
        "xformers_attention",
    ]
)


def read(data: Mapping[str, Any], path: Path) -> LaunchScript:
    """Return the job of a file. Raises `InputError` where it trains in a way that is not simulated."""
    options = dict(data)
    for name in ("fsdp_config", "accelerator_config"):
        if isinstance(section := data.get(name), Mapping):
            del options[name]
            options |= flattened(section, f"{name}.")
    reading = ScriptReading(FORMAT, path, options)
    reading.workload["framework"] = "hugging_face"
    if method := reading.look("rl"):
        message = "is no training with one model and one loss per token, which alone is simulated"
        raise InputError(message, file=path, key="rl", found=method)
    put_model(reading, str(reading.look("base_model", "")), "base_model")
    reading.take("sequence_len", "training.seq")
    trainer.put_precision(reading, unsaid="bf16")
    trainer.put_batch(reading, "micro_batch_size", "gradient_accumulation_steps")
    trainer.put_optimizer(reading, "optimizer")
    trainer.put_clipping(reading)
    if str(reading.look("gradient_checkpointing")).lower() in ("true", "unsloth", "offload"):
        reading.put("training.recompute", "full", "gradient_checkpointing")
    if reading.look("adapter"):
        _adapters(reading)
    if reading.flag("liger_fused_linear_cross_entropy"):
        reading.put("training.loss", "fused_linear", "liger_fused_linear_cross_entropy")
    for option, key in (("tensor_parallel_size", "tp"), ("context_parallel_size", "cp")):
        if (reading.number(option) or 1) > 1:
            reading.put(f"parallelism.{key}", reading.number(option), option)
        reading.leave_where(option, "1")
    trainer.put_deepspeed(reading, "deepspeed")
    if reading.look("fsdp") or any(key.startswith("fsdp_config.") for key in options):
        trainer.put_fsdp(reading, "fsdp")
    if all("liger" in plugin.lower() for plugin in words_of(reading.look("plugins"))):
        reading.leave("plugins")  # its switches say what it changes
    reading.sort_rest(trainer.NEUTRAL | _NEUTRAL, trainer.NEUTRAL_PREFIXES)
    return reading.script


def _adapters(reading: ScriptReading) -> None:
    trainer.put_adapters(
        reading, "lora_r", "lora_target_modules", chosen_by="adapter", every="lora_target_linear", usual_rank=8
    )
    if not trainer.put_base(reading) and reading.look("adapter") == "qlora":
        reading.put("training.base", "nf4", "adapter")
