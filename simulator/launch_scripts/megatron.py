"""Megatron-LM's arguments, from a shell script or a YAML file (`megatron/training/arguments.py` names them)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulator.launch_scripts.script import LaunchScript, ScriptReading, flattened

FORMAT = "Megatron-LM arguments"
#: What a script must have to be one of Megatron-LM's.
MARKS = frozenset(("num_layers", "hidden_size", "num_attention_heads"))
#: Option -> key of the workload, for whole numbers that mean the same.
_NUMBERS = {
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "num_attention_heads": "model.heads",
    "kv_channels": "model.head_dim",
    "vocab_size": "model.vocab",
    "make_vocab_size_divisible_by": "model.vocab_multiple",
    "mtp_num_layers": "model.mtp_layers",
    "seq_length": "training.seq",
    "micro_batch_size": "training.micro_batch",
    "global_batch_size": "training.global_batch",
    "tensor_model_parallel_size": "parallelism.tp",
    "pipeline_model_parallel_size": "parallelism.pp",
    "context_parallel_size": "parallelism.cp",
    "expert_model_parallel_size": "parallelism.ep",
    "expert_tensor_parallel_size": "parallelism.etp",
}
_MOE = {
    "num_experts": "model.moe.experts",
    "moe_router_topk": "model.moe.top_k",
    "moe_ffn_hidden_size": "model.moe.ffn_hidden",
    "moe_shared_expert_intermediate_size": "model.moe.shared_ffn_hidden",
}
_MLA = {
    "q_lora_rank": "model.mla.q_lora_rank",
    "kv_lora_rank": "model.mla.kv_lora_rank",
    "qk_head_dim": "model.mla.qk_nope_head_dim",
    "qk_pos_emb_head_dim": "model.mla.qk_rope_head_dim",
    "v_head_dim": "model.mla.v_head_dim",
}
#: Tokenizers whose vocabulary is known: of GPT-2 (Radford et al. 2019) and of Llama 2 (arXiv 2307.09288).
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
_NEUTRAL_PREFIXES = (
    "adam_", "auto_detect_ckpt", "ckpt_", "data_args", "data_cache", "data_impl", "data_path", "dataloader",
    "decoupled", "dist_ckpt", "distributed_timeout", "end_weight", "eval_", "exit_", "init_method", "log_",
    "loss_scale", "lr", "manual_gc", "merge_", "min_lr", "mock_", "moe_aux_loss_coeff", "moe_z_loss_coeff", "no_load",
    "no_save", "node_rank", "num_workers", "override_opt", "per_split", "profile", "rdzv", "save", "seed", "split",
    "start_weight", "tensorboard", "test_data", "tiktoken", "timing_", "tokenizer", "train_data", "use_checkpoint_",
    "use_mcore", "valid_", "vocab_file", "wandb", "warmup", "weight_decay", "world_size",
)  # fmt: skip
_NEUTRAL = frozenset(
    [
        "calculate_per_token_loss",
        "empty_unused_memory_level",
        "fp8_amax_compute_algo",
        "fp8_amax_history_len",
        "fp8_interval",
        "fp8_margin",
        "load",
        "master_addr",
        "master_port",
        "max_position_embeddings",
        "nnodes",
        "no_create_attention_mask_in_dataloader",
        "no_mmap_bin_files",
        "no_position_embedding",
        "norm_epsilon",
        "nproc_per_node",
        "rotary_base",
        "rotary_scaling_factor",
        "rotary_seq_len_interpolation_factor",
    ]
)
#: Option -> values, in small letters, that are what is simulated.
_USUAL = {
    "distributed_backend": ("nccl",),
    "moe_layer_freq": ("1",),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "none"),
    "moe_token_dispatcher_type": ("alltoall",),
    "num_virtual_stages_per_pipeline_rank": ("1",),
    "rotary_percent": ("1", "1.0"),
}
#: --optimizer -> ours. Its Adam decays weights apart, and its SGD has momentum.
_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd_momentum"}
#: --fp8-recipe -> ours.
_FP8_RECIPES = {"delayed": "te_delayed", "tensorwise": "te_current", "blockwise": "te_blockwise", "mxfp8": "te_mxfp8"}
#: --attention-backend -> ours.
_ATTENTION = {"flash": "flash", "fused": "flash", "unfused": "unfused"}


@dataclass(frozen=True)
class Dialect:
    """A file that holds Megatron-LM's arguments in a form of its own.

    ``names``: Megatron-LM's name of an option -> that of the file. ``neutral``, ``prefixes`` and ``usual``: options of
    the file alone that change nothing, beginnings of such, and values that are what is simulated.
    """

    form: str = FORMAT
    names: Mapping[str, str] = field(default_factory=dict)
    neutral: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()
    usual: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read(options: Mapping[str, Any], path: Path, gpus: int | None, dialect: Dialect | None = None) -> LaunchScript:
    """Return the job of Megatron-LM's arguments on so many GPUs; None: the script leaves it open.

    ``dialect``: whose file holds them; None: Megatron-LM's own.
    """
    dialect = dialect or Dialect()
    reading = ScriptReading(dialect.form, path, options, gpus=gpus, names=dialect.names)
    for option, key in _NUMBERS.items():
        reading.take(option, key)
    _modules(reading)
    _model(reading)
    _training(reading)
    _parallelism(reading)
    for option, values in {**_USUAL, **dialect.usual}.items():
        reading.leave_where(option, *values)
    reading.sort_rest(_NEUTRAL | dialect.neutral, (*_NEUTRAL_PREFIXES, *dialect.prefixes))
    return reading.script


def yaml_options(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a YAML file holds, in sections or not.

    Megatron-LM's own names come last in them. Of two such the second counts, and the first keeps its sections' names.
    """
    options: dict[str, Any] = {}
    written: dict[str, str] = {}
    for key, value in flattened(data).items():
        name = re.sub(r"^.*\.", "", key).replace("-", "_")
        if name in options:
            options[written[name]] = options[name]
        options[name], written[name] = value, key
    return options


def _modules(reading: ScriptReading) -> None:
    """Put whose modules layers are made of, and how attention is computed."""
    implementation = reading.look("transformer_impl")
    local = implementation == "local"
    if local:
        reading.put("framework", "megatron_core_local", "transformer_impl")
        reading.assume("model.attention", "unfused", "local modules have no fused attention")
        reading.leave("no_masked_softmax_fusion", "attention_softmax_in_fp32")  # as their softmax is simulated
        return
    if implementation == "transformer_engine":
        reading.put("framework", "megatron_core", "transformer_impl")
    else:
        reading.workload["framework"] = "megatron_core"
    backend = _ATTENTION.get(str(reading.look("attention_backend")).lower())
    if backend is not None:
        reading.put("model.attention", backend, "attention_backend")
    elif reading.flag("use_flash_attn"):
        reading.put("model.attention", "flash", "use_flash_attn")
    if backend != "unfused":  # a fused kernel has its softmax within, in fp32
        reading.leave("no_masked_softmax_fusion", "attention_softmax_in_fp32")


def _model(reading: ScriptReading) -> None:
    _vocabulary(reading)
    swiglu = reading.flag("swiglu")
    if swiglu:
        reading.put("model.activation", "swiglu", "swiglu")
    hidden = reading.number("hidden_size")
    if reading.take("ffn_hidden_size", "model.ffn_hidden") is None and hidden is not None and swiglu:
        reading.assume("model.ffn_hidden", int(4 * hidden * 2 / 3) // 64 * 64, "Megatron-LM's for swiglu")
    if not reading.flag("group_query_attention"):
        reading.leave("num_query_groups")
    elif (groups := reading.take("num_query_groups", "model.kv_heads")) is not None:
        reading.understand("group_query_attention", "model.kv_heads", groups)
    if (norm := reading.look("normalization")) is not None:
        reading.put("model.norm", str(norm).lower(), "normalization")
    _switches(reading)
    _dropout(reading)
    _experts(reading)
    if reading.flag("multi_latent_attention"):
        for option, key in _MLA.items():
            reading.take(option, key)
        reading.understand("multi_latent_attention", "model.mla", "a section")


def _switches(reading: ScriptReading) -> None:
    position = {"rope": "rope", "none": "none", "learned_absolute": "learned"}.get(
        str(reading.look("position_embedding_type"))
    )
    if position is not None:
        reading.put("model.position", position, "position_embedding_type")
        reading.leave("use_rotary_position_embeddings")
    elif reading.flag("use_rotary_position_embeddings"):
        reading.put("model.position", "rope", "use_rotary_position_embeddings")
    for option, key, value in (
        ("disable_bias_linear", "model.bias", False),
        ("untie_embeddings_and_output_weights", "model.tied_embeddings", False),
        ("qk_layernorm", "model.qk_norm", True),
    ):
        if reading.flag(option):
            reading.put(key, value, option)


def _vocabulary(reading: ScriptReading) -> None:
    if reading.number("vocab_size") is not None:
        return
    kind = str(reading.options.get("tokenizer_type"))
    file = next((option for option in ("vocab_file", "merge_file") if option in reading.options), None)
    if kind in _VOCABULARIES:
        reading.put("model.vocab", _VOCABULARIES[kind], "tokenizer_type")
    elif file is not None:
        reading.assume("model.vocab", _VOCABULARIES["GPT2BPETokenizer"], f"GPT-2's, whose tokenizer has a {file}")


def _dropout(reading: ScriptReading) -> None:
    dropout = reading.fraction("hidden_dropout")
    if dropout is None:
        reading.assume("model.dropout", 0.1, "Megatron-LM's default of hidden_dropout")
    else:
        reading.put("model.dropout", dropout, "hidden_dropout")
    probability = reading.fraction("attention_dropout")
    if probability is None:
        return
    if probability == reading.workload["model"]["dropout"]:
        reading.understand("attention_dropout", "model.dropout", probability)
    else:
        reading.ignore("attention_dropout", "attention drops as much as hidden_dropout says")


def _experts(reading: ScriptReading) -> None:
    if reading.number("num_experts") is None:
        return
    reading.leave_where("moe_grouped_gemm", "true")
    for option, key in _MOE.items():
        reading.take(option, key)
    moe = reading.workload["model"]["moe"]
    if "top_k" not in moe:
        reading.assume("model.moe.top_k", 2, "Megatron-LM's default of moe_router_topk")
    if "ffn_hidden" not in moe and (width := reading.workload["model"].get("ffn_hidden")):
        reading.assume("model.moe.ffn_hidden", width, "ffn_hidden_size, as Megatron-LM takes it")
    frequency = str(reading.look("moe_layer_freq", "1"))
    if match := re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", frequency.replace(" ", "")):
        reading.put("model.moe.first_dense_layers", int(match[1]), "moe_layer_freq")
    elif frequency.isdigit() and frequency != "1":
        reading.put("model.moe.every", int(frequency), "moe_layer_freq")
    if (capacity := reading.fraction("moe_expert_capacity_factor")) is not None:
        reading.put("model.moe.capacity_factor", capacity, "moe_expert_capacity_factor")


def _training(reading: ScriptReading) -> None:
    if half := reading.first_on("bf16", "fp16"):
        reading.put("training.precision", half, half)
    else:
        reading.assume("training.precision", "fp32", "Megatron-LM's without bf16 and fp16")
    _eight_bits(reading)
    clip = reading.fraction("clip_grad")
    if clip is None:
        reading.assume("training.grad_clip", 1.0, "Megatron-LM's default of clip_grad")
    else:
        reading.put("training.grad_clip", clip or None, "clip_grad")
    optimizer = _OPTIMIZERS.get(str(reading.look("optimizer")).lower())
    if optimizer is not None:
        reading.put("training.optimizer.name", optimizer, "optimizer")
    if option := reading.first_on("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_bf16"):
        reading.put("training.grad_dtype", "bf16", option)
    _recompute(reading)
    samples, steps = reading.number("train_samples"), reading.number("train_iters")
    training = reading.workload["training"]
    batch, seq = training.get("global_batch"), training.get("seq")
    if seq and (samples or (steps and batch)):
        option = "train_samples" if samples else "train_iters"
        reading.put("training.total_tokens", float((samples or steps * batch) * seq), option)
    reading.leave("train_samples", "train_iters")
    if batch is None:
        reading.accumulation = 1
        reading.assumed.append("training.global_batch: one micro-batch per replica, Megatron-LM's default")


def _eight_bits(reading: ScriptReading) -> None:
    """Put the recipe of products in 8 bits; without one of its own a script has Megatron-LM's default."""
    switch, form = reading.first_of("fp8_format", "fp8")
    if form is None or str(form).lower() == "false":
        reading.leave("fp8_recipe")
        return
    recipe = _FP8_RECIPES.get(str(reading.look("fp8_recipe", "delayed")).lower())
    if recipe is None:
        reading.ignore(switch, f"its recipe is none of {', '.join(_FP8_RECIPES)}")
    elif reading.look("fp8_recipe") is not None:
        reading.put("training.fp8", recipe, switch, "fp8_recipe")
    else:
        reading.put("training.fp8", recipe, switch)
        reading.assumed.append(f"training.fp8: {recipe}, Megatron-LM's default of fp8_recipe")


def _recompute(reading: ScriptReading) -> None:
    switch = reading.first_on("recompute_activations", "checkpoint_activations")
    option, granularity = reading.first_of("recompute_granularity")
    if granularity is None and switch is not None:  # the second, before version 3, means whole layers
        option, granularity = switch, "selective" if switch == "recompute_activations" else "full"
    if granularity not in ("full", "selective"):
        return
    recompute: dict[str, Any] = {"granularity": granularity}
    options = [option]
    method, layers = reading.look("recompute_method"), reading.number("recompute_num_layers")
    if granularity == "full" and method == "block" and layers:
        recompute["layers"] = layers
    if granularity == "full" and ((method == "block" and layers) or (method == "uniform" and layers == 1)):
        options += ["recompute_method", "recompute_num_layers"]
    modules = reading.look("recompute_modules")
    if granularity == "selective" and modules:
        recompute["modules"] = modules.split() if isinstance(modules, str) else list(modules)
        options.append("recompute_modules")
    reading.put("training.recompute", recompute if len(recompute) > 1 else granularity, *options)


def _parallelism(reading: ScriptReading) -> None:
    if reading.workload.setdefault("parallelism", {}).get("tp", 1) > 1:
        reading.switch("parallelism.sequence_parallel", "sequence_parallel")
    reading.leave("sequence_parallel")
    _chunks(reading)
    sharding = str(reading.look("data_parallel_sharding_strategy", ""))
    if fully := reading.first_on("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp"):
        stage = {"optim": 1, "optim_grads": 2, "no_shard": 0}.get(sharding, 3)
        reading.put("parallelism.zero", stage, fully, *(["data_parallel_sharding_strategy"] if sharding else []))
        reading.leave("use_distributed_optimizer")
    elif reading.flag("use_distributed_optimizer"):
        reading.put("parallelism.zero", 1, "use_distributed_optimizer")
    for option, key in (
        ("overlap_grad_reduce", "grad_reduce"),
        ("overlap_param_gather", "param_gather"),
        ("tp_comm_overlap", "tp"),
    ):
        reading.switch(f"parallelism.overlap.{key}", option)
    if reading.flag("optimizer_cpu_offload"):
        reading.put("parallelism.offload.optimizer", "cpu", "optimizer_cpu_offload")
    for option, key in (
        ("account_for_embedding_in_pipeline_split", "account_for_embedding"),
        ("account_for_loss_in_pipeline_split", "account_for_loss"),
    ):
        if reading.flag(option):
            reading.put(f"parallelism.{key}", True, option)


def _chunks(reading: ScriptReading) -> None:
    pp, layers = reading.workload["parallelism"].get("pp", 1), reading.workload["model"].get("layers")
    option, number = reading.first_number(
        "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"
    )
    if number and layers and option == "num_layers_per_virtual_pipeline_stage":
        number = layers // pp // number
    if number and number > 1 and pp > 1:
        reading.put("parallelism.vpp", number, option)
        reading.put("parallelism.schedule", "interleaved", option)
