"""Hugging Face's `config.json` as keys of a workload's `model`. A new architecture is a function, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from simulator.config.hugging_face import deepseek_v4, dense, hybrids, mixtures
from simulator.config.hugging_face.encoders import TOWERS, encoder_of, text_config
from simulator.config.hugging_face.keys import Fields, Keys
from simulator.errors import InputError
from simulator.input_files import brief

_UNTIED: dict[str, Any] = {"tie_word_embeddings": False, "hidden_act": "silu"}
_TIED: dict[str, Any] = {"tie_word_embeddings": True, "hidden_act": "silu"}
_QWEN = _UNTIED | {"use_sliding_window": False, "max_window_layers": 28}
_GEMMA = _TIED | {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh"}
_LATENT = _UNTIED | {"moe_layer_freq": 1}

#: model_type -> the reader of its keys, and what its configuration class assumes where config.json is silent
#: (transformers 5.17, `models/*/configuration_*.py`), as far as it matters here.
ARCHITECTURES: dict[str, tuple[Callable[[Keys], Fields], dict[str, Any]]] = {
    "gpt2": (dense.gpt2, _TIED | {"activation_function": "gelu_new"}),
    "llama": (dense.llama, _UNTIED),
    "mistral": (dense.mistral, _UNTIED | {"sliding_window": 4096}),
    "ministral3": (dense.mistral, _UNTIED),
    "qwen2": (dense.qwen2, _QWEN),
    "qwen3": (dense.qwen3, _QWEN),
    "gemma": (dense.gemma, _GEMMA),
    "gemma2": (dense.gemma2, _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3_text": (dense.gemma3, _GEMMA),
    "gemma4_text": (mixtures.gemma4_text, _GEMMA | {"sliding_window": 512, "hidden_size_per_layer_input": 256}),
    "phi3": (dense.phi3, _UNTIED),
    "glm4": (dense.glm4, _UNTIED),
    "olmo2": (dense.olmo2, _UNTIED),
    "olmo3": (dense.olmo3, _UNTIED | {"sliding_window": 4096}),
    "exaone4": (dense.exaone4, _UNTIED),
    "smollm3": (dense.smollm3, _TIED),
    "seed_oss": (dense.seed_oss, _UNTIED | {"attention_bias": True}),
    "granite": (dense.llama, _UNTIED),
    "starcoder2": (dense.starcoder2, _TIED | {"use_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "arcee": (dense.arcee, _UNTIED | {"hidden_act": "relu2"}),
    "nemotron": (dense.nemotron, _UNTIED | {"hidden_act": "relu2"}),
    "mixtral": (mixtures.mixtral, _UNTIED),
    "phimoe": (mixtures.phimoe, _UNTIED),
    "minimax_m2": (mixtures.minimax_m2, _UNTIED),
    "olmoe": (mixtures.olmoe, _UNTIED),
    "granitemoe": (mixtures.granitemoe, _UNTIED),
    "granitemoeshared": (mixtures.granitemoe, _UNTIED),
    "qwen2_moe": (mixtures.qwen2_moe, _QWEN),
    "qwen3_moe": (mixtures.qwen3_moe, _QWEN),
    "gpt_oss": (mixtures.gpt_oss, _UNTIED | {"attention_bias": True}),
    "llama4_text": (mixtures.llama4, _UNTIED | {"use_qk_norm": True, "attention_chunk_size": 8192}),
    "deepseek_v2": (mixtures.deepseek, _LATENT | {"first_k_dense_replace": 0}),
    "deepseek_v3": (mixtures.deepseek, _LATENT | {"first_k_dense_replace": 3}),
    "kimi_k2": (mixtures.deepseek, _LATENT | {"first_k_dense_replace": 3}),
    "deepseek_v32": (mixtures.deepseek_sparse, _LATENT | {"first_k_dense_replace": 3}),
    "deepseek_v4": (deepseek_v4.deepseek_v4, _UNTIED),
    "glm_moe_dsa": (mixtures.deepseek_sparse, _LATENT | {"first_k_dense_replace": 3}),
    "glm4_moe": (mixtures.glm4_moe, _UNTIED | {"first_k_dense_replace": 1}),
    "glm4_moe_lite": (mixtures.deepseek, _LATENT | {"first_k_dense_replace": 1}),
    "mimo_v2_flash": (mixtures.mimo_v2_flash, _UNTIED | {"sliding_window": 129, "head_dim": 192}),
    "qwen3_next": (hybrids.qwen3_next, _UNTIED),
    "qwen3_5_text": (hybrids.qwen3_5, _UNTIED),
    "qwen3_5_moe_text": (hybrids.qwen3_5_moe, _UNTIED),
    "kimi_linear": (hybrids.kimi_linear, _LATENT | {"first_k_dense_replace": 1}),
    "nemotron_h": (hybrids.nemotron_h, _UNTIED),
    "granitemoehybrid": (hybrids.granitemoehybrid, _UNTIED),
    "bamba": (hybrids.bamba, _UNTIED),
    "mamba2": (hybrids.mamba2, _UNTIED | {"conv_kernel": 4, "chunk_size": 256}),
}

#: Keys with an effect on sizes or operations in some architecture. A file that gives one which its own architecture
#: does not read is refused.
EFFECTS = (
    *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "n_shared_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
    *("kv_lora_rank", "q_lora_rank", "index_topk", "index_n_heads"),
    *("layer_types", "sliding_window", "attention_chunk_size", "attn_logit_softcapping", "final_logit_softcapping"),
    *("attention_bias", "mlp_bias", "qkv_bias", "lm_head_bias", "use_bias", "use_qk_norm", "use_parallel_residual"),
    *("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "ssm_state_size", "hybrid_override_pattern"),
    "linear_attn_config",
    *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "hybrid_layer_pattern"),
    *("hidden_size_per_layer_input", "num_kv_shared_layers", "attention_k_eq_v", "enable_moe_block", "hc_mult"),
    *("num_nextn_predict_layers", "num_mtp_layers", "vision_config", "audio_config"),
)
#: Formats that checkpoints are released in and trained from; the precision of a job is its own.
RELEASED_IN = ("fp8", "mxfp4")
#: Keys that hold keys, whatever the architecture.
_SECTIONS = ("text_config", "vision_config", "quantization_config", "rope_scaling", "rope_parameters")


def from_hugging_face(config: Mapping[str, Any], file: object) -> Fields:
    """Return the keys of a workload's `model` that a Hugging Face ``config`` means.

    Left out are biases of a choice of experts (DeepSeek-V3), which are no parameters there. Rotary embeddings that are
    stretched, or of a part of a head, cost what plain ones do. ``topk_group`` limits the groups of experts that a token
    may choose from. A group is a node in some layouts only, so that ``moe.node_limit`` does not follow from it.

    Raises `InputError`, naming the key, for what the simulator does not model: other architectures, and keys of others.
    """
    for name in _SECTIONS:
        Keys(config, {}, file).section(name)  # which refuses what is none
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in TOWERS and isinstance(config.get("vision_config"), Mapping):
        text = from_hugging_face(text_config(config, kind), file)
        return text | {"encoder": encoder_of(config, kind, file)}
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and kind not in ARCHITECTURES:
        raise InputError(
            "the model has an encoder beside its text model, which is simulated of others alone",
            file=file,
            key="text_config",
            found=brief(kind),
            allowed=", ".join(TOWERS),
            fix=f"hf_config: {file}#text_config, for the text model alone",
        )
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise InputError(
            "this architecture is not supported",
            file=file,
            key="model_type",
            found=brief(kind),
            allowed=", ".join(ARCHITECTURES),
        )
    quantised = config.get("quantization_config")
    if quantised and not (isinstance(quantised, Mapping) and quantised.get("quant_method") in RELEASED_IN):
        raise InputError(
            "quantised weights are not trained",
            file=file,
            key="quantization_config",
            allowed=f"left out, or quant_method {' or '.join(RELEASED_IN)}, which checkpoints are released in",
        )
    read, defaults = ARCHITECTURES[kind]
    keys = Keys(config, defaults, file)
    fields = read(keys)
    keys.refuse_unread(kind, EFFECTS)
    return fields
