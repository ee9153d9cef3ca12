"""Names in other frameworks for the keys of a workload file.

From the options of Megatron-LM (megatron/training/arguments.py), DeepSpeed's and torchtitan's configurations, and the
``config.json`` of Hugging Face. Used for the fix that goes with an unknown key, never to accept one.
"""

from __future__ import annotations

#: Dotted key here, or key and value -> names elsewhere, in lower case with underscores.
_ELSEWHERE = {
    "training.seq": "sequence_length seq_length seq_len max_seq_len context_length max_position_embeddings",
    "training.micro_batch": "micro_batch_size mbs local_batch_size train_micro_batch_size_per_gpu "
    "per_device_train_batch_size",
    "training.global_batch": "batch_size global_batch_size gbs train_batch_size",
    "training.global_batch: micro_batch x dp x those steps": "gradient_accumulation_steps grad_accum_steps",
    "training.grad_clip": "clip_grad gradient_clipping max_norm max_grad_norm",
    "training.precision": "dtype torch_dtype mixed_precision",
    "training.recompute": "activation_checkpoint activation_checkpointing gradient_checkpointing "
    "recompute_granularity recompute_activations",
    "training.adapters": "lora dora peft lora_config peft_config peft_scheme lora_rank lora_r lora_target "
    "lora_attn_modules",
    "training.adapters.targets": "target_modules lora_target_modules",
    "training.adapters.method: dora": "use_dora",
    "training.freeze": "frozen freeze_modules freeze_layers",
    "training.base": "quantization quantize quant quantization_config quantization_bit load_in_8bit",
    "training.base: nf4": "load_in_4bit qlora bnb_4bit_quant_type",
    "parallelism.tp": "tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree",
    "parallelism.pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree",
    "parallelism.dp": "data_parallel_size data_parallel_degree",
    "parallelism.cp": "context_parallel context_parallel_size context_parallel_degree",
    "parallelism.ep": "expert_parallel expert_parallel_size expert_model_parallel_size expert_parallel_degree",
    "parallelism.etp": "expert_tensor_parallel_size expert_tensor_parallel_degree",
    "parallelism.vpp": "virtual_pipeline_model_parallel_size num_model_chunks",
    "parallelism.zero": "zero_stage zero_optimization",
    "parallelism.zero: 1": "use_distributed_optimizer distributed_optimizer",
    "parallelism.zero: 3": "fsdp fsdp2 fully_shard data_parallel_shard_degree",
    "parallelism.schedule": "pipeline_parallel_schedule pipeline_schedule",
    "model.layers": "num_layers num_hidden_layers n_layers n_layer",
    "model.hidden": "hidden_size d_model dim n_embd",
    "model.heads": "num_attention_heads n_heads n_head",
    "model.kv_heads": "num_key_value_heads num_query_groups n_kv_heads",
    "model.head_dim": "kv_channels",
    "model.ffn_hidden": "ffn_hidden_size intermediate_size",
    "model.vocab": "vocab_size padded_vocab_size",
    "model.tied_embeddings": "tie_word_embeddings",
    "cluster.nodes": "num_nodes n_nodes nnodes",
    "cluster.nodes: GPUs of the job / GPUs of a node": "num_gpus n_gpus total_gpus",
    "cluster.node.gpus.count": "gpus_per_node nproc_per_node",
    "cluster.background.from": "source src",
    "cluster.background.to": "destination dst target",
}
#: Name elsewhere -> key here.
SYNONYMS = {name: here for here, names in _ELSEWHERE.items() for name in names.split()}
#: Section and name elsewhere -> dotted key here and its value, where the name means something else outside the section.
_IN_SECTION = {
    ("adapters", "dora"): "training.adapters.method: dora",
    ("", "gpus"): "cluster.nodes: GPUs of the job / GPUs of a node",
}

#: Product that has an adapter here -> the modules of Hugging Face, Megatron-LM and torchtune that are it.
_MODULES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj output_proj linear_proj",
    "qkv": "qkv_proj query_key_value linear_qkv",
    "q_down": "q_a_proj",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_up": "kv_b_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "gate_up": "gate_up_proj linear_fc1",
    "down": "down_proj linear_fc2",
}
_PRODUCT_OF_MODULE = {module: product for product, modules in _MODULES.items() for module in modules.split()}

#: Name of a key that was here once -> its value -> what to write now.
_REPLACED = {
    "implementation": {
        "eager": "framework: pytorch",
        "fused": "framework: megatron_core",
        "compiled": "framework: {name: pytorch, compile: true}",
    },
    "compile_loss": {"True": "loss: compiled", "False": "loss: eager"},
}


def replacement(name: str, value: object) -> str | None:
    """Return the text to write instead of a key ``name`` with this ``value``, where it was a key once.

    >>> replacement("implementation", "eager"), replacement("compile_loss", True), replacement("seq", 1)
    ('framework: pytorch', 'loss: compiled', None)
    """
    values = _REPLACED.get(name)
    return None if values is None else values.get(str(value), f"one of {', '.join(values.values())}")


def value_here(value: object) -> str | None:
    """Return the word that is written here for a ``value`` of another framework.

    >>> value_here("q_proj"), value_here("q"), value_here(3)
    ('q', None, None)
    """
    return _PRODUCT_OF_MODULE.get(value) if isinstance(value, str) else None


def here(name: str, inside: str = "") -> tuple[str, str] | None:
    """The section, and the key in it (and perhaps its value), that a ``name`` of another framework means.

    ``inside``: name of the section that it was written in.

    >>> here("fsdp"), here("--tensor-model-parallel-size"), here("colour")
    (('parallelism', 'zero: 3'), ('parallelism', 'tp'), None)
    >>> here("dora"), here("dora", "adapters")
    (('training', 'adapters'), ('training.adapters', 'method: dora'))
    """
    name = name.lower().lstrip("-").replace("-", "_")
    meant = _IN_SECTION.get((inside, name)) or SYNONYMS.get(name)
    if meant is None:
        return None
    section, _, key = meant.rpartition(".")
    return section, key
