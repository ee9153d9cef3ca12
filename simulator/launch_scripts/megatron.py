"""Megatron-LM's arguments, from a shell script or a YAML file (`megatron/training/arguments.py` names them)."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    "adam_", "attention_backend", "attention_softmax", "auto_", "ckpt_", "data_", "dataloader", "decoupled",
    "dist_ckpt", "distributed_", "end_weight", "eval_", "exit_", "init_", "load", "log_", "loss_scale", "lr",
    "manual_gc", "master_", "merge_", "min_lr", "mock_", "moe_aux", "moe_router_load", "moe_z_loss", "no_load",
    "no_save", "node_rank", "num_workers", "override_", "per_split", "profile", "rampup", "rdzv", "reset_",
    "rotary_", "save", "seed", "split", "start_weight", "tensorboard", "test_", "tiktoken", "timing_",
    "tokenizer", "train_data", "use_mcore", "use_checkpoint", "valid_", "vocab_", "wandb", "warmup",
    "weight_decay", "world_size",
)  # fmt: skip
_NEUTRAL = frozenset(
    [
        "bf16",
        "fp16",
        "clip_grad",
        "max_position_embeddings",
        "no_position_embedding",
        "use_rotary_position_embeddings",
        "optimizer",
        "no_masked_softmax_fusion",
        "no_create_attention_mask_in_dataloader",
        "no_mmap_bin_files",
        "empty_unused_memory_level",
        "calculate_per_token_loss",
        "transformer_impl",
        "nnodes",
        "nproc_per_node",
        "use_flash_attn",
        "norm_epsilon",
    ]
)


def read(options: Mapping[str, Any], path: Path, gpus: int | None, form: str = FORMAT) -> LaunchScript:
    """Return the job of Megatron-LM's arguments on so many GPUs; None: the script leaves it open.

    ``form``: whose file holds them.
    """
    reading = ScriptReading(form, path, options, gpus=gpus)
    reading.workload["framework"] = "megatron_core"
    for option, key in _NUMBERS.items():
        reading.take(option, key)
    _model(reading)
    _training(reading)
    _parallelism(reading)
    reading.sort_rest(_NEUTRAL, _NEUTRAL_PREFIXES)
    return reading.script


def yaml_options(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a YAML file holds, in sections or not; Megatron-LM's own names come last in them."""
    flat = flattened(data)
    return {re.sub(r"^.*\.", "", key).replace("-", "_"): value for key, value in flat.items()}


def _model(reading: ScriptReading) -> None:
    _vocabulary(reading)
    swiglu = reading.flag("swiglu")
    if swiglu:
        reading.put("model.activation", "swiglu", "swiglu")
    hidden = reading.number("hidden_size")
    if reading.take("ffn_hidden_size", "model.ffn_hidden") is None and hidden is not None and swiglu:
        reading.assume("model.ffn_hidden", int(4 * hidden * 2 / 3) // 64 * 64, "Megatron-LM's for swiglu")
    if reading.flag("group_query_attention"):
        reading.take("num_query_groups", "model.kv_heads")
    reading.used.add("num_query_groups")
    if reading.get("normalization") is not None:
        reading.put("model.norm", str(reading.get("normalization")).lower(), "normalization")
    _switches(reading)
    _dropout(reading)
    _experts(reading)
    if reading.flag("multi_latent_attention"):
        for option, key in _MLA.items():
            reading.take(option, key)


def _switches(reading: ScriptReading) -> None:
    position = reading.get("position_embedding_type")
    if position in ("rope", "none"):
        reading.put("model.position", position, "position_embedding_type")
    elif reading.options.get("use_rotary_position_embeddings"):
        reading.put("model.position", "rope", "use_rotary_position_embeddings")
    if reading.flag("disable_bias_linear"):
        reading.put("model.bias", False, "disable_bias_linear")
    if reading.flag("untie_embeddings_and_output_weights"):
        reading.put("model.tied_embeddings", False, "untie_embeddings_and_output_weights")
    if reading.flag("qk_layernorm"):
        reading.put("model.qk_norm", True, "qk_layernorm")


def _vocabulary(reading: ScriptReading) -> None:
    if not reading.options.get("vocab_size"):
        size = _VOCABULARIES.get(str(reading.options.get("tokenizer_type")))
        if size is None and ("merge_file" in reading.options or "vocab_file" in reading.options):
            size = _VOCABULARIES["GPT2BPETokenizer"]
        if size is not None:
            reading.assume("model.vocab", size, "the vocabulary of the tokenizer that the script names")


def _dropout(reading: ScriptReading) -> None:
    dropout = reading.get("hidden_dropout")
    reading.used.add("attention_dropout")
    if dropout is None:
        reading.assume("model.dropout", 0.1, "Megatron-LM's default of hidden_dropout")
    elif float(dropout):
        reading.put("model.dropout", float(dropout), "hidden_dropout")


def _experts(reading: ScriptReading) -> None:
    if reading.number("num_experts") is None:
        return
    if reading.get("moe_token_dispatcher_type") == "allgather":
        reading.ignored.append("moe_token_dispatcher_type allgather: tokens go by all-to-alls")
    reading.neutral += [name for name in ("moe_grouped_gemm",) if reading.get(name)]
    for option, key in _MOE.items():
        reading.take(option, key)
    moe = reading.workload["model"]["moe"]
    if "top_k" not in moe:
        reading.assume("model.moe.top_k", 2, "Megatron-LM's default of moe_router_topk")
    if "ffn_hidden" not in moe and (width := reading.workload["model"].get("ffn_hidden")):
        reading.assume("model.moe.ffn_hidden", width, "ffn_hidden_size, as Megatron-LM takes it")
    frequency = str(reading.get("moe_layer_freq", "1"))
    if match := re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", frequency.replace(" ", "")):
        reading.put("model.moe.first_dense_layers", int(match[1]), "moe_layer_freq")
    elif frequency.isdigit() and frequency != "1":
        reading.put("model.moe.every", int(frequency), "moe_layer_freq")
    elif frequency != "1":
        reading.ignored.append(f"moe_layer_freq {frequency}")
    if (capacity := reading.get("moe_expert_capacity_factor")) is not None:
        reading.put("model.moe.capacity_factor", float(capacity), "moe_expert_capacity_factor")


def _training(reading: ScriptReading) -> None:
    half = next((name for name in ("bf16", "fp16") if reading.flag(name)), None)
    if (eight := reading.get("fp8_format") or reading.get("fp8")) is not None:
        reading.put("training.precision", "fp8", f"fp8_format {eight}")
    elif half:
        reading.put("training.precision", half, half)
    else:
        reading.assume("training.precision", "fp32", "Megatron-LM's without bf16 and fp16")
    clip = reading.get("clip_grad")
    if clip is None:
        reading.assume("training.grad_clip", 1.0, "Megatron-LM's default of clip_grad")
    elif float(clip):
        reading.put("training.grad_clip", float(clip), "clip_grad")
    if reading.flag("grad_reduce_in_bf16") or reading.flag("accumulate_allreduce_grads_in_bf16"):
        reading.put("training.grad_dtype", "bf16", "grad_reduce_in_bf16")
    _recompute(reading)
    samples, steps = reading.number("train_samples"), reading.number("train_iters")
    training = reading.workload.get("training", {})
    batch, seq = training.get("global_batch"), training.get("seq")
    if seq and (samples or (steps and batch)):
        option = "train_samples" if samples else "train_iters"
        reading.put("training.total_tokens", float((samples or steps * batch) * seq), option)
    if "global_batch" not in training:
        reading.accumulation = 1
        reading.assumed.append("training.global_batch: one micro-batch per replica, Megatron-LM's default")


def _recompute(reading: ScriptReading) -> None:
    granularity = reading.get("recompute_granularity")
    if granularity is None and reading.flag("recompute_activations"):
        granularity = "selective"
    if granularity is None and reading.flag("checkpoint_activations"):  # before version 3
        granularity = "full"
    if granularity in ("full", "selective"):
        recompute: dict[str, Any] = {"granularity": granularity}
        layers = reading.number("recompute_num_layers")
        if granularity == "full" and reading.get("recompute_method") == "block" and layers:
            recompute["layers"] = layers
        if granularity == "selective" and (modules := reading.get("recompute_modules")):
            recompute["modules"] = modules.split() if isinstance(modules, str) else list(modules)
        whole = recompute if len(recompute) > 1 else granularity
        reading.put("training.recompute", whole, "recompute_granularity")
    reading.used |= {"recompute_method", "recompute_num_layers", "recompute_activations"}


def _parallelism(reading: ScriptReading) -> None:
    parallelism = reading.workload.setdefault("parallelism", {})
    tp, pp = parallelism.get("tp", 1), parallelism.get("pp", 1)
    sequence = reading.flag("sequence_parallel")
    if tp > 1:
        reading.put("parallelism.sequence_parallel", sequence, reading.named("sequence_parallel"))
    layers = reading.workload.get("model", {}).get("layers")
    chunks = reading.number("num_virtual_stages_per_pipeline_rank")
    per_chunk = reading.number("num_layers_per_virtual_pipeline_stage")
    if chunks is None and per_chunk and layers:
        chunks = layers // pp // per_chunk
    if chunks and chunks > 1 and pp > 1:
        reading.put("parallelism.vpp", chunks, "num_layers_per_virtual_pipeline_stage")
        reading.put("parallelism.schedule", "interleaved", "num_layers_per_virtual_pipeline_stage")
    sharding = str(reading.get("data_parallel_sharding_strategy", ""))
    if reading.flag("use_torch_fsdp2") or reading.flag("use_megatron_fsdp") or reading.flag("use_custom_fsdp"):
        stage = {"optim": 1, "optim_grads": 2, "no_shard": 0}.get(sharding, 3)
        reading.put("parallelism.zero", stage, "use_megatron_fsdp")
    elif reading.flag("use_distributed_optimizer"):
        reading.put("parallelism.zero", 1, "use_distributed_optimizer")
    for option, key in (
        ("overlap_grad_reduce", "grad_reduce"),
        ("overlap_param_gather", "param_gather"),
        ("tp_comm_overlap", "tp"),
    ):
        reading.put(f"parallelism.overlap.{key}", reading.flag(option), reading.named(option))
    if reading.flag("optimizer_cpu_offload"):
        reading.put("parallelism.offload.optimizer", "cpu", "optimizer_cpu_offload")
    for option, key in (
        ("account_for_embedding_in_pipeline_split", "account_for_embedding"),
        ("account_for_loss_in_pipeline_split", "account_for_loss"),
    ):
        if reading.flag(option):
            reading.put(f"parallelism.{key}", True, option)
