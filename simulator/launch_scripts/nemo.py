"""NeMo's configuration of GPT models in YAML, whose keys are Megatron-LM's arguments under other names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.launch_scripts import megatron
from simulator.launch_scripts.script import LaunchScript, Unsaid, flattened

FORMAT = "NeMo configuration"
#: Key of the file -> argument of Megatron-LM; others of the section ``model`` have the same name.
_ARGUMENTS = {
    "model.encoder_seq_length": "seq_length",
    "model.activations_checkpoint_granularity": "recompute_granularity",
    "model.activations_checkpoint_method": "recompute_method",
    "model.activations_checkpoint_num_layers": "recompute_num_layers",
    "model.virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "model.num_moe_experts": "num_experts",
    "model.ub_tp_comm_overlap": "tp_comm_overlap",
    "model.layernorm_epsilon": "norm_epsilon",
    "model.tokenizer.type": "tokenizer_type",
    "model.optim.overlap_grad_sync": "overlap_grad_reduce",
    "trainer.devices": "nproc_per_node",
    "trainer.gradient_clip_val": "clip_grad",
    "trainer.max_steps": "train_iters",
    "trainer.num_nodes": "nnodes",
}
#: Key of the file -> value of it -> an argument of Megatron-LM, and what that is set to.
_MEANINGS: Mapping[str, Mapping[str, tuple[str, object]]] = {
    "trainer.precision": {
        "16": ("fp16", True),
        "16-mixed": ("fp16", True),
        "bf16": ("bf16", True),
        "bf16-mixed": ("bf16", True),
    },
    "model.activation": {
        "fast-swiglu": ("swiglu", True),
        "swiglu": ("swiglu", True),
        "gelu": ("swiglu", False),
    },
    "model.normalization": {
        "layernorm1p": ("normalization", "LayerNorm"),
        "layernorm": ("normalization", "LayerNorm"),
        "rmsnorm": ("normalization", "RMSNorm"),
    },
    "model.bias": {"false": ("disable_bias_linear", True), "true": ("disable_bias_linear", False)},
    "model.share_embeddings_and_output_weights": {
        "false": ("untie_embeddings_and_output_weights", True),
        "true": ("untie_embeddings_and_output_weights", False),
    },
    "model.optim.name": {
        "distributed_fused_adam": ("use_distributed_optimizer", True),
        "fused_adam": ("optimizer", "adam"),
    },
}
_NEUTRAL_PREFIXES = (
    "exp_manager", "hydra", "model.data", "model.optim.betas", "model.optim.lr", "model.optim.sched",
    "model.optim.weight_decay", "model.tokenizer", "restore_from", "trainer.limit_", "trainer.log", "trainer.max_",
    "trainer.val_",
)  # fmt: skip
_NEUTRAL = frozenset(
    ["name", "trainer.enable_checkpointing", "trainer.replace_sampler_ddp", "trainer.use_distributed_sampler"]
)
_USUAL = {
    "mcore_gpt": ("true",),
    "megatron_amp_O2": ("true",),
    "trainer.accelerator": ("gpu",),
    "trainer.accumulate_grad_batches": ("1",),
}


def is_nemo(data: Mapping[str, Any]) -> bool:
    """Return whether a file holds the sections of NeMo's configuration."""
    model = data.get("model")
    return isinstance(data.get("trainer"), Mapping) and isinstance(model, Mapping) and model.keys() >= megatron.MARKS


def read(data: Mapping[str, Any], path: Path) -> LaunchScript:
    """Return the job of a file. Values that refer to other keys (``${...}``) count as not there."""
    options: dict[str, Any] = {}
    names: dict[str, str] = {}

    def hold(argument: str, value: object, key: str) -> None:
        options[argument], names[argument] = value, key

    for key, value in flattened(data).items():
        if "${" in str(value):
            hold(_argument(key), Unsaid(str(value)), key)
        elif meaning := _MEANINGS.get(key, {}).get(str(value).lower()):
            hold(*meaning, key)
        else:
            hold(key if key in _MEANINGS else _argument(key), value, key)
    if isinstance(options.get("num_query_groups"), int):
        hold("group_query_attention", True, "model.num_query_groups")
    if options.get("clip_grad") is None:
        hold("clip_grad", 0.0, names.get("clip_grad", "trainer"))
    if options.get("use_distributed_optimizer") and "overlap_grad_reduce" not in options:
        hold("overlap_grad_reduce", True, "model.optim.name")
    devices, nodes = options.get("nproc_per_node"), options.get("nnodes", 1)
    gpus = devices * nodes if isinstance(devices, int) and isinstance(nodes, int) else None
    dialect = megatron.Dialect(FORMAT, names, _NEUTRAL, _NEUTRAL_PREFIXES, _USUAL)
    return megatron.read(options, path, gpus, dialect)


def _argument(key: str) -> str:
    """Return Megatron-LM's argument for a key of the file; the key itself where it is of another section."""
    section, _, rest = key.partition(".")
    return _ARGUMENTS.get(key) or (rest if section == "model" and "." not in rest else key)
