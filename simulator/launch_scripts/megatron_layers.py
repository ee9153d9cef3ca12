"""Layers of Megatron-LM's models: sizes, attention, experts, vocabulary (`megatron/training/arguments.py`)."""

from __future__ import annotations

import ast
import re

from simulator.bounds import is_digits
from simulator.config.hugging_face.keys import mixers
from simulator.launch_scripts.megatron_hybrids import put_pattern
from simulator.launch_scripts.script import ScriptReading

_MOE = {
    "num_experts": "model.moe.experts",
    "moe_router_topk": "model.moe.top_k",
    "moe_ffn_hidden_size": "model.moe.ffn_hidden",
    "moe_shared_expert_intermediate_size": "model.moe.shared_ffn_hidden",
}
#: Option of latent attention -> key of the workload, and Megatron-LM's default; None: queries are not compressed.
_MLA: dict[str, tuple[str, int | None]] = {
    "q_lora_rank": ("model.mla.q_lora_rank", None),
    "kv_lora_rank": ("model.mla.kv_lora_rank", 32),
    "qk_head_dim": ("model.mla.qk_nope_head_dim", 128),
    "qk_pos_emb_head_dim": ("model.mla.qk_rope_head_dim", 64),
    "v_head_dim": ("model.mla.v_head_dim", 128),
}
#: Tokenizers whose vocabulary is known: of GPT-2 (Radford et al. 2019) and of Llama 2 (arXiv 2307.09288).
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}


def put_layers(reading: ScriptReading, *, by_default: bool) -> None:
    """Put what layers are made of. Raises `InputError` where they are of several kinds.

    ``by_default``: where the file does not say how experts run, Megatron-LM's defaults hold.
    """
    put_pattern(reading)
    _vocabulary(reading)
    swiglu = reading.flag("swiglu")
    if swiglu:
        reading.put("model.activation", "swiglu", "swiglu")
    elif reading.flag("squared_relu"):
        reading.put("model.activation", "relu2", "squared_relu")
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
    _loss(reading)
    _dropout(reading)
    _experts(reading, by_default=by_default)
    _latent_attention(reading)
    _window(reading)


def _latent_attention(reading: ScriptReading) -> None:
    if not reading.flag("multi_latent_attention"):
        reading.take("kv_channels", "model.head_dim")
        return
    for option, (key, default) in _MLA.items():
        if reading.take(option, key) is None and default is not None:
            reading.assume(key, default, f"Megatron-LM's default of {option}")
    reading.understand("multi_latent_attention", "model.mla", "a section")
    if "position" not in reading.workload["model"]:
        reading.assume(
            "model.position", "rope", "as latent attention rotates; a learned table beside it is not simulated"
        )
    # Norms are of what queries and keys are compressed to, simulated anyhow; heads have the widths above.
    reading.leave("qk_layernorm", "kv_channels")


def _window(reading: ScriptReading) -> None:
    """Put sliding windows, of all layers or of those that a frequency does not skip.

    A query sees ``window_size[0]`` tokens before its own (Transformer Engine's `DotProductAttention`), -1: all.
    """
    layers = reading.workload["model"].get("layers", 1)
    sizes = re.findall(r"-?\d+", str(reading.look("window_size", "")))
    if not sizes or sizes[0] == "-1":
        reading.leave("window_size", "window_attn_skip_freq")
        return
    kinds = _windows_of(str(reading.look("window_attn_skip_freq", "")).replace(" ", ""), layers)
    if kinds is None or len(sizes) != 2 or int(sizes[0]) < 0:
        return
    if "window" not in kinds:
        reading.leave("window_size", "window_attn_skip_freq")
        return
    reading.put("model.sliding_window", int(sizes[0]) + 1, "window_size")
    pattern = mixers(kinds).get("mixers")
    if pattern is not None:
        reading.put("model.mixers", pattern, "window_attn_skip_freq")
    reading.leave("window_attn_skip_freq")


def _windows_of(frequency: str, layers: int) -> list[str] | None:
    """Return the mixer of each layer: every so many-th, or each 0 of a list, sees all tokens; None: neither of them."""
    if frequency == "":
        return ["window"] * layers
    if is_digits(frequency) and int(frequency) > 0:
        return ["window" if layer % int(frequency) else "attention" for layer in range(1, layers + 1)]
    if re.fullmatch(r"\[[01](,[01])*\]", frequency) and len(pattern := ast.literal_eval(frequency)) == layers:
        return ["window" if entry else "attention" for entry in pattern]
    return None


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
    ):
        if reading.flag(option):
            reading.put(key, value, option)
    if reading.flag("qk_layernorm") and not reading.flag("multi_latent_attention"):
        reading.put("model.qk_norm", True, "qk_layernorm")


def _loss(reading: ScriptReading) -> None:
    local = reading.workload.get("framework") == "megatron_core_local"
    if reading.flag("cross_entropy_loss_fusion") and reading.look("cross_entropy_fusion_impl") == "te" and not local:
        reading.put("training.loss", "te_fused", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl")


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


def _experts(reading: ScriptReading, *, by_default: bool) -> None:
    if reading.number("num_experts") is None:
        return
    _grouped_products(reading, by_default=by_default)
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
    elif is_digits(frequency) and frequency != "1":
        reading.put("model.moe.every", int(frequency), "moe_layer_freq")
    if (capacity := reading.fraction("moe_expert_capacity_factor")) is not None:
        reading.put("model.moe.capacity_factor", capacity, "moe_expert_capacity_factor")
    kind = str(reading.look("moe_router_load_balancing_type", "aux_loss")).lower()
    if kind in ("aux_loss", "seq_aux_loss") and reading.fraction("moe_aux_loss_coeff"):
        reading.put("model.moe.balancing_loss", True, "moe_aux_loss_coeff")


def _grouped_products(reading: ScriptReading, *, by_default: bool) -> None:
    """Tell where products of experts are run in another way than the script has them run."""
    grouped = reading.flag("moe_grouped_gemm")
    if reading.workload.get("framework") == "megatron_core_local":
        if grouped:
            reading.ignore("moe_grouped_gemm", "experts of local modules compute one after another here")
    elif grouped:
        reading.leave("moe_grouped_gemm")
    elif by_default or reading.look("moe_grouped_gemm") is not None:
        reading.assumed.append(
            "experts of a rank compute together: one after another, as without moe_grouped_gemm, is not simulated with "
            "Transformer Engine"
        )
