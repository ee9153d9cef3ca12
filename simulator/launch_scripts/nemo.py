"""NeMo's configuration of GPT models in YAML, whose keys are Megatron-LM's arguments under other names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.launch_scripts import megatron
from simulator.launch_scripts.script import LaunchScript

FORMAT = "NeMo configuration"
#: Key of the section ``model`` -> argument of Megatron-LM, where they differ.
_ARGUMENTS = {
    "encoder_seq_length": "seq_length",
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_moe_experts": "num_experts",
    "ub_tp_comm_overlap": "tp_comm_overlap",
    "layernorm_epsilon": "norm_epsilon",
}
_DTYPES = {"16": "fp16", "16-mixed": "fp16", "bf16": "bf16", "bf16-mixed": "bf16"}
_NORMS = {"layernorm1p": "LayerNorm", "layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}


def is_nemo(data: Mapping[str, Any]) -> bool:
    """Return whether a file holds the sections of NeMo's configuration."""
    model = data.get("model")
    return isinstance(data.get("trainer"), Mapping) and isinstance(model, Mapping) and model.keys() >= megatron.MARKS


def read(data: Mapping[str, Any], path: Path) -> LaunchScript:
    """Return the job of a file. Values that refer to other keys (``${...}``) count as not there."""
    model, trainer = data["model"], data["trainer"]
    plain = {
        _ARGUMENTS.get(key, key): value
        for key, value in model.items()
        if not isinstance(value, Mapping) and "${" not in str(value)
    }
    options = {key: value for key, value in plain.items() if key not in ("activation", "bias", "normalization")}
    if dtype := _DTYPES.get(str(trainer.get("precision")).lower()):
        options[dtype] = True
    options["clip_grad"] = trainer.get("gradient_clip_val") or 0.0
    options["train_iters"] = trainer.get("max_steps")
    tokenizer = model.get("tokenizer") or {}
    options["tokenizer_type"] = tokenizer.get("type")
    options |= {
        "swiglu": "swiglu" in str(model.get("activation", "gelu")),
        "disable_bias_linear": model.get("bias") is False,
        "normalization": _NORMS.get(str(model.get("normalization", "layernorm")).lower()),
        "untie_embeddings_and_output_weights": model.get("share_embeddings_and_output_weights") is False,
        "group_query_attention": model.get("num_query_groups") is not None,
    }
    optimizer = str((model.get("optim") or {}).get("name"))
    options["use_distributed_optimizer"] = optimizer == "distributed_fused_adam"
    options["overlap_grad_reduce"] = (model.get("optim") or {}).get("overlap_grad_sync", True) is True
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes", 1)
    gpus = devices * nodes if isinstance(devices, int) and isinstance(nodes, int) else None
    return megatron.read(options, path, gpus, FORMAT)
