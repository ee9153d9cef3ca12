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
MARKS = frozenset(("model_name_or_path", "finetuning_type"))


def read(data: Mapping[str, Any], path: Path) -> LaunchScript:
    """Return the job of a file. Raises `InputError` where its stage is not simulated."""
    reading = ScriptReading(FORMAT, path, data)
    reading.workload["framework"] = "hugging_face"
    stage = str(reading.get("stage", "sft"))
    if stage not in ("pt", "sft"):
        message = "is no training with one model and one loss per token, which alone is simulated"
        raise InputError(message, file=path, key="stage", found=stage, allowed="pt, sft")
    put_model(reading, "model_name_or_path", str(reading.get("model_name_or_path", "")))
    if reading.take("cutoff_len", "training.seq") is None:
        reading.assume("training.seq", 2048, "LLaMA-Factory's default of cutoff_len")
    trainer.put_precision(reading, unsaid="fp32")
    trainer.put_batch(reading, "per_device_train_batch_size", "gradient_accumulation_steps")
    trainer.put_optimizer(reading, "optim")
    trainer.put_clipping(reading)
    if reading.flag("disable_gradient_checkpointing"):
        reading.put("training.recompute", "none", "disable_gradient_checkpointing")
    else:
        reading.assume("training.recompute", "full", "LLaMA-Factory checkpoints unless told otherwise")
    kind = str(reading.get("finetuning_type", "lora"))
    if kind == "lora":
        trainer.put_adapters(reading, "lora_rank", "lora_target", every=False, usual_rank=8)
        if reading.flag("use_dora"):
            reading.workload["training"]["adapters"]["method"] = "dora"
    elif kind != "full":
        message = "is no way of finetuning that is simulated"
        raise InputError(message, file=path, key="finetuning_type", found=kind, allowed="full, lora")
    bits = reading.number("quantization_bit")
    if bits == 4:
        reading.put("training.base", "nf4", "quantization_bit")
    elif bits:
        reading.ignored.append(f"quantization_bit {bits}")
    reading.used.add("quantization_method")
    trainer.put_deepspeed(reading, "deepspeed")
    if kind == "full" and not reading.flag("pure_bf16") and reading.workload["framework"] == "hugging_face":
        trainer.assume_wide_weights(reading, "LLaMA-Factory's unless pure_bf16")
    reading.sort_rest(trainer.NEUTRAL | {"dataset", "report_to"}, trainer.NEUTRAL_PREFIXES)
    return reading.script
