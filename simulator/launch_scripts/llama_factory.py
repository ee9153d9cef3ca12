"""LLaMA-Factory's YAML (`src/llamafactory/hparams` names its keys)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.errors import InputError
from simulator.launch_scripts import trainer
from simulator.launch_scripts.models import put_model
from simulator.launch_scripts.script import LaunchScript, ScriptReading

FORMAT = "LLaMA-Factory arguments"


def read(data: Mapping[str, Any], path: Path) -> LaunchScript:
    """Return the job of a file. Raises `InputError` where its stage is not simulated."""
    reading = ScriptReading(FORMAT, path, data)
    reading.workload["framework"] = "hugging_face"
    stage = str(reading.look("stage", "sft"))
    if stage not in ("pt", "sft"):
        message = "is no training with one model and one loss per token, which alone is simulated"
        raise InputError(message, file=path, key="stage", found=stage, allowed="pt, sft")
    reading.leave("stage")
    put_model(reading, str(reading.look("model_name_or_path", "")), "model_name_or_path")
    if reading.take("cutoff_len", "training.seq") is None:
        reading.assume("training.seq", 2048, "LLaMA-Factory's default of cutoff_len")
    if reading.flag("pure_bf16"):
        reading.put("training.precision", "bf16", "pure_bf16")
    else:
        trainer.put_precision(reading, unsaid="fp32")
    trainer.put_batch(reading, "per_device_train_batch_size", "gradient_accumulation_steps")
    trainer.put_optimizer(reading, "optim")
    trainer.put_clipping(reading)
    if reading.flag("disable_gradient_checkpointing"):
        reading.put("training.recompute", "none", "disable_gradient_checkpointing")
    else:
        reading.assume("training.recompute", "full", "LLaMA-Factory checkpoints unless told otherwise")
    kind = str(reading.look("finetuning_type", "lora"))
    if kind == "lora":
        _adapters(reading)
    elif kind == "full":
        reading.leave("finetuning_type")
    else:
        message = "is no way of finetuning that is simulated"
        raise InputError(message, file=path, key="finetuning_type", found=kind, allowed="full, lora")
    if reading.number("quantization_bit") == 4:
        reading.put("training.base", "nf4", "quantization_bit")
        reading.leave_where("quantization_method", "bitsandbytes", "bnb")
    by_deepspeed = trainer.put_deepspeed(reading, "deepspeed")
    if kind == "full" and not reading.flag("pure_bf16") and not by_deepspeed:
        trainer.assume_wide_weights(reading, "LLaMA-Factory's unless pure_bf16")
    reading.sort_rest(trainer.NEUTRAL | {"dataset", "report_to"}, trainer.NEUTRAL_PREFIXES)
    return reading.script


def _adapters(reading: ScriptReading) -> None:
    trainer.put_adapters(reading, "lora_rank", "lora_target", chosen_by="finetuning_type", usual_rank=8, usual_all=True)
    if reading.flag("use_dora"):
        reading.put("training.adapters.method", "dora", "use_dora")
