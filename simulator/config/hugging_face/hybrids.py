"""Architectures of Hugging Face whose layers are not all attention: linear attention and state-space layers."""

from __future__ import annotations

from simulator.config.hugging_face.dense import decoder, with_biases
from simulator.config.hugging_face.keys import MAX_PREDICTIONS, PLAIN, Fields, Keys, mixers
from simulator.config.hugging_face.mixtures import (
    gated_shared,
    granite_experts,
    has_granite_experts,
    latent,
    qwen_layers,
    sparse_layers,
    with_experts,
)
from simulator.config.hugging_face.state_space import BAMBA, MAMBA, NEMOTRON, SIGNS, mamba2_section, single_parts


def _kinds(keys: Keys, linear: str, default: list[str]) -> list[str]:
    """Return the mixers that ``layer_types`` names, of which some are ``linear`` ones, or the ``default``."""
    kinds = keys.layer_mixers("layer_types", "layers_block_type", linear=linear)
    kinds = keys.for_each_layer(kinds, len(default), "layer_types", "layers_block_type")
    if kinds is None:
        return default
    if other := set(kinds) - {linear, "attention"}:
        raise keys.refuse("layer_types", f"layers of kind {min(other)} are not supported here")
    return kinds


def _gated_delta(keys: Keys, width: str = "intermediate_size") -> Fields:
    """Return the fields of Qwen3-Next without its MLPs; ``width``: the key of the width inside one."""
    named = ("qkv", "o") if keys.flag("attention_bias") else ()
    fields = with_biases(decoder(keys, width=width), *named) | {"qk_norm": True, "attention_gate": True}
    period = keys.size("full_attention_interval", default=4)
    default = ["gated_delta" if (layer + 1) % period else "attention" for layer in range(fields["layers"])]
    kinds = _kinds(keys, "gated_delta", default)
    sizes = {
        "key_heads": keys.size("linear_num_key_heads"),
        "value_heads": keys.size("linear_num_value_heads"),
        "key_dim": keys.size("linear_key_head_dim"),
        "value_dim": keys.size("linear_value_head_dim"),
        "conv_width": keys.size("linear_conv_kernel_dim", default=4),
    }
    modules = keys.size_or_none("mtp_num_hidden_layers", least=0, most=MAX_PREDICTIONS)
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


def kimi_linear(keys: Keys) -> Fields:
    """Return the fields of Kimi Linear: Kimi delta attention, and latent attention without positions.

    Its file counts layers from 1, and names heads of the delta rule in a section of their own.
    """
    linear = keys.section("linear_attn_config")
    fields = latent(keys, decoder(keys)) | {"position": "none"}
    full = linear.numbers("full_attn_layers") or []
    default = ["attention" if layer + 1 in full else "kimi_delta" for layer in range(fields["layers"])]
    sizes = {
        "heads": linear.size_or_none("num_heads") or keys.size("linear_num_heads"),
        "head_dim": linear.size_or_none("head_dim") or keys.size("linear_head_dim"),
        "conv_width": linear.size_or_none("short_conv_kernel_size") or keys.size("linear_conv_kernel_dim", default=4),
    }
    experts = keys.size("num_experts", "num_local_experts")
    moe = {
        "experts": experts,
        "top_k": keys.size("num_experts_per_token", "num_experts_per_tok", most=experts),
        "ffn_hidden": keys.size("moe_intermediate_size"),
        "shared_experts": keys.size("num_shared_experts", "n_shared_experts", least=0),
    }
    fields |= mixers(_kinds(keys, "kimi_delta", default)) | {"kimi_delta": sizes}
    return with_experts(fields, moe, sparse_layers(keys, fields["layers"]))


def nemotron_h(keys: Keys) -> Fields:
    """Return the fields of Nemotron-H: a layer is a state-space layer, attention, an MLP, or experts."""
    places = ("hybrid_override_pattern", "layers_block_type", "layer_types")
    signs = keys.need(*places)
    pattern = list(signs) if isinstance(signs, str) else keys.words(*places)
    if not pattern:
        raise keys.refuse("hybrid_override_pattern", "has no layers")
    keys.has_no_effect("layers_block_type", "layer_types")  # of the three keys the first decides
    names = [SIGNS.get(sign, sign) for sign in pattern]
    try:
        parts = single_parts(names)
    except KeyError as unknown:
        message = f"layers of kind {unknown.args[0]} are not supported"
        raise keys.refuse("hybrid_override_pattern", message) from None
    if keys.get("moe_latent_size"):
        raise keys.refuse("moe_latent_size", "experts of a narrower stream are not supported")
    if keys.size_or_none("num_nextn_predict_layers", least=0):
        raise keys.refuse("num_nextn_predict_layers", "prediction of several tokens by such layers is not supported")
    named = (("qkv", "o") if keys.flag("attention_bias") else ()) + (
        ("mlp", "experts") if keys.flag("mlp_bias") else ()
    )
    fields = {
        "layers": len(names),
        "hidden": keys.size("hidden_size"),
        "heads": keys.size("num_attention_heads"),
        "kv_heads": keys.size("num_key_value_heads"),
        "head_dim": keys.size("head_dim", "attention_head_dim"),
        "ffn_hidden": keys.size("intermediate_size"),
        "vocab": keys.size("vocab_size"),
        "activation": keys.activation(PLAIN, "mlp_hidden_act"),
        "norm": "rmsnorm",
        "position": "none",
        "tied_embeddings": keys.flag("tie_word_embeddings"),
        **parts,
        "mamba2": mamba2_section(keys, NEMOTRON, keys.size("hidden_size")),
    }
    fields = with_biases(fields, *named)
    if "moe" not in parts["mlps"]:
        # No layer has experts.
        keys.has_no_effect("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "num_experts_per_tok")
        return fields
    experts = keys.size("n_routed_experts")
    moe = {
        "experts": experts,
        "top_k": keys.size("num_experts_per_tok", most=experts),
        "ffn_hidden": keys.size("moe_intermediate_size"),
    }
    if keys.size_or_none("n_shared_experts", least=0):
        moe |= {"shared_experts": 1, "shared_ffn_hidden": keys.size("moe_shared_expert_intermediate_size")}
    return fields | {"moe": moe}


def granitemoehybrid(keys: Keys) -> Fields:
    """Return the fields of Granite 4: state-space layers and attention, each with experts or one MLP.

    Without experts the shared MLP is all there is.
    """
    named = ("qkv", "o") if keys.flag("attention_bias") else ()
    fields = with_biases(decoder(keys), *named)
    if keys.get("position_embedding_type") != "rope":
        fields["position"] = "none"
    kinds = _kinds(keys, "mamba2", ["mamba2"] * fields["layers"])
    fields |= mixers(kinds) | ({"mamba2": mamba2_section(keys, BAMBA, fields["hidden"])} if "mamba2" in kinds else {})
    if not has_granite_experts(keys):
        return fields | {"ffn_hidden": keys.size("shared_intermediate_size")}
    return with_experts(fields, granite_experts(keys), [True] * fields["layers"])


def bamba(keys: Keys) -> Fields:
    """Return the fields of Bamba: state-space layers, and attention where ``attn_layer_indices`` says."""
    named = (("qkv", "o") if keys.flag("attention_bias") else ()) + (("mlp",) if keys.flag("mlp_bias") else ())
    fields = with_biases(decoder(keys), *named)
    chosen = keys.numbers("attn_layer_indices") or []
    kinds = _kinds(keys, "mamba2", ["attention" if layer in chosen else "mamba2" for layer in range(fields["layers"])])
    return fields | mixers(kinds) | {"mamba2": mamba2_section(keys, BAMBA, fields["hidden"])}


def mamba2(keys: Keys) -> Fields:
    """Return the fields of Mamba 2: layers without MLPs."""
    section = mamba2_section(keys, MAMBA, keys.size("hidden_size"))
    return {
        "layers": keys.layers("num_hidden_layers"),
        "hidden": keys.size("hidden_size"),
        "heads": section["heads"],
        "head_dim": section["head_dim"],
        "vocab": keys.size("vocab_size"),
        "norm": "rmsnorm",
        "position": "none",
        "bias": False,
        "tied_embeddings": keys.flag("tie_word_embeddings"),
        "mixers": ["mamba2"],
        "mlps": ["none"],
        "mamba2": section,
    }
