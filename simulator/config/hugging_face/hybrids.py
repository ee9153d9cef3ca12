"""Architectures of Hugging Face whose layers are not all attention: linear attention and state-space layers."""

from __future__ import annotations

from simulator.config.hugging_face.dense import decoder, with_biases
from simulator.config.hugging_face.keys import PLAIN, Fields, Keys, mixers, shortest
from simulator.config.hugging_face.mixtures import gated_shared, granite_experts, qwen_layers, with_experts

#: A layer of Nemotron-H, by its sign or its name -> mixer and MLP.
_NEMOTRON = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), ("mamba2", "none")),
    **dict.fromkeys(("*", "attention", "full_attention"), ("attention", "none")),
    **dict.fromkeys(("-", "mlp"), ("none", "dense")),
    **dict.fromkeys(("E", "moe"), ("none", "moe")),
}


def _kinds(keys: Keys, linear: str, default: list[str]) -> list[str]:
    """Return the mixers that ``layer_types`` names, of which some are ``linear`` ones, or the ``default``."""
    names = {"linear_attention": linear, "mamba": linear, "full_attention": "attention", "attention": "attention"}
    kinds = keys.get("layer_types", "layers_block_type", default=None)
    if kinds is None:
        return default
    if unknown := [kind for kind in kinds if kind not in names]:
        raise keys.refuse("layer_types", f"layers of kind {unknown[0]} are not supported here")
    return [names[kind] for kind in kinds]


def _gated_delta(keys: Keys, width: str = "intermediate_size") -> Fields:
    """Return the fields of Qwen3-Next without its MLPs; ``width``: the key of the width inside one."""
    named = ("qkv", "o") if keys.get("attention_bias") else ()
    fields = with_biases(decoder(keys, width=width), *named) | {"qk_norm": True, "attention_gate": True}
    period = keys.get("full_attention_interval", default=4)
    default = ["gated_delta" if (layer + 1) % period else "attention" for layer in range(fields["layers"])]
    kinds = _kinds(keys, "gated_delta", default)
    sizes = {
        "key_heads": keys.need("linear_num_key_heads"),
        "value_heads": keys.need("linear_num_value_heads"),
        "key_dim": keys.need("linear_key_head_dim"),
        "value_dim": keys.need("linear_value_head_dim"),
        "conv_width": keys.get("linear_conv_kernel_dim", default=4),
    }
    modules = keys.get("mtp_num_hidden_layers")
    return (
        fields
        | mixers(kinds)
        | ({"gated_delta": sizes} if "gated_delta" in kinds else {})
        | ({"mtp_layers": modules} if modules else {})
    )


def qwen3_next(keys: Keys) -> Fields:
    """Return the fields of Qwen3-Next: three layers in four have the gated delta rule, the others gated attention."""
    fields = _gated_delta(keys)
    return with_experts(fields, gated_shared(keys), qwen_layers(keys, fields["layers"]))


def qwen3_5(keys: Keys) -> Fields:
    """Return the fields of Qwen3.5's dense text models."""
    return _gated_delta(keys)


def qwen3_5_moe(keys: Keys) -> Fields:
    """Return the fields of Qwen3.5's mixtures, all of whose layers have experts."""
    fields = _gated_delta(keys, width="moe_intermediate_size")
    return with_experts(fields, gated_shared(keys), [True] * fields["layers"])


def nemotron_h(keys: Keys) -> Fields:
    """Return the fields of Nemotron-H: a layer is a state-space layer, attention, an MLP, or experts."""
    pattern = keys.get("hybrid_override_pattern", "layers_block_type", "layer_types")
    if pattern is None:
        raise keys.refuse("hybrid_override_pattern", "a required key is missing")
    keys.get("layers_block_type", "layer_types")
    if unknown := [sign for sign in pattern if sign not in _NEMOTRON]:
        raise keys.refuse("hybrid_override_pattern", f"layers of kind {unknown[0]} are not supported")
    if keys.get("moe_latent_size"):
        raise keys.refuse("moe_latent_size", "experts of a narrower stream are not supported")
    if keys.get("num_nextn_predict_layers"):
        raise keys.refuse("num_nextn_predict_layers", "prediction of several tokens by such layers is not supported")
    kinds = [_NEMOTRON[sign][0] for sign in pattern]
    mlps = [_NEMOTRON[sign][1] for sign in pattern]
    named = (("qkv", "o") if keys.get("attention_bias") else ()) + (("mlp", "experts") if keys.get("mlp_bias") else ())
    fields = {
        "layers": len(kinds),
        "hidden": keys.need("hidden_size"),
        "heads": keys.need("num_attention_heads"),
        "kv_heads": keys.need("num_key_value_heads"),
        "head_dim": keys.need("head_dim", "attention_head_dim"),
        "ffn_hidden": keys.need("intermediate_size"),
        "vocab": keys.need("vocab_size"),
        "activation": keys.activation(PLAIN, "mlp_hidden_act"),
        "norm": "rmsnorm",
        "position": "none",
        "tied_embeddings": keys.need("tie_word_embeddings"),
        "mlps": shortest(mlps),
        "mixers": shortest(kinds),
        "mamba2": {
            "heads": keys.need("mamba_num_heads"),
            "head_dim": keys.need("mamba_head_dim"),
            "state": keys.need("ssm_state_size"),
            "groups": keys.need("n_groups"),
            "conv_width": keys.need("conv_kernel"),
            "chunk": keys.need("chunk_size"),
            "conv_bias": keys.get("use_conv_bias", default=True),
            "bias": bool(keys.get("use_bias") or keys.get("mamba_proj_bias")),
        },
    }
    fields = with_biases(fields, *named)
    if "moe" not in mlps:
        for key in ("n_routed_experts", "n_shared_experts", "moe_intermediate_size"):
            keys.get(key)
        return fields
    moe = {
        "experts": keys.need("n_routed_experts"),
        "top_k": keys.need("num_experts_per_tok"),
        "ffn_hidden": keys.need("moe_intermediate_size"),
    }
    if keys.get("n_shared_experts"):
        moe |= {"shared_experts": 1, "shared_ffn_hidden": keys.need("moe_shared_expert_intermediate_size")}
    return fields | {"moe": moe}


def _mamba(keys: Keys, hidden: int) -> Fields:
    """Return the section of state-space layers as Bamba and Granite 4 name their sizes."""
    heads, width = keys.need("mamba_n_heads"), keys.get("mamba_d_head", default="auto")
    return {
        "heads": heads,
        "head_dim": keys.get("mamba_expand", default=2) * hidden // heads if width == "auto" else width,
        "state": keys.need("mamba_d_state"),
        "groups": keys.need("mamba_n_groups"),
        "conv_width": keys.need("mamba_d_conv"),
        "chunk": keys.need("mamba_chunk_size"),
        "conv_bias": keys.get("mamba_conv_bias", default=True),
        "bias": bool(keys.get("mamba_proj_bias")),
    }


def granitemoehybrid(keys: Keys) -> Fields:
    """Return the fields of Granite 4: state-space layers and attention, each with experts or one MLP.

    Without experts the shared MLP is all there is.
    """
    named = ("qkv", "o") if keys.get("attention_bias") else ()
    fields = with_biases(decoder(keys), *named)
    if keys.get("position_embedding_type") != "rope":
        fields["position"] = "none"
    kinds = _kinds(keys, "mamba2", ["mamba2"] * fields["layers"])
    fields |= mixers(kinds) | ({"mamba2": _mamba(keys, fields["hidden"])} if "mamba2" in kinds else {})
    if not keys.get("num_local_experts"):
        return fields | {"ffn_hidden": keys.need("shared_intermediate_size")}
    return with_experts(fields, granite_experts(keys), [True] * fields["layers"])


def bamba(keys: Keys) -> Fields:
    """Return the fields of Bamba: state-space layers, and attention where ``attn_layer_indices`` says."""
    named = (("qkv", "o") if keys.get("attention_bias") else ()) + (("mlp",) if keys.get("mlp_bias") else ())
    fields = with_biases(decoder(keys), *named)
    chosen = keys.get("attn_layer_indices", default=[])
    kinds = ["attention" if layer in chosen else "mamba2" for layer in range(fields["layers"])]
    return fields | mixers(kinds) | {"mamba2": _mamba(keys, fields["hidden"])}


def mamba2(keys: Keys) -> Fields:
    """Return the fields of Mamba 2: layers without MLPs."""
    heads = keys.need("num_heads")
    return {
        "layers": keys.need("num_hidden_layers"),
        "hidden": keys.need("hidden_size"),
        "heads": heads,
        "head_dim": keys.need("head_dim"),
        "vocab": keys.need("vocab_size"),
        "norm": "rmsnorm",
        "position": "none",
        "bias": False,
        "tied_embeddings": keys.need("tie_word_embeddings"),
        "mixers": ["mamba2"],
        "mlps": ["none"],
        "mamba2": {
            "heads": heads,
            "head_dim": keys.need("head_dim"),
            "state": keys.need("state_size"),
            "groups": keys.need("n_groups"),
            "conv_width": keys.need("conv_kernel"),
            "chunk": keys.need("chunk_size"),
            "conv_bias": keys.get("use_conv_bias", default=True),
            "bias": bool(keys.get("use_bias")),
        },
    }
