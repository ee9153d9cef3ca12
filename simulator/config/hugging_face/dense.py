"""Architectures of Hugging Face without experts: Llama's kind with its variations, and GPT-2."""

from __future__ import annotations

from collections.abc import Mapping

from simulator.config.hugging_face.keys import GATED, PLAIN, Fields, Keys, biases, mixers


def decoder(keys: Keys, activations: Mapping[str, str] = GATED, width: str = "intermediate_size") -> Fields:
    """Return the sizes that a decoder with RMSNorm and rotary positions has, with one of the ``activations``.

    ``width``: the key of the width inside an MLP.
    """
    if keys.get("attention_dropout") and not keys.get("residual_dropout"):
        raise keys.refuse("attention_dropout", "dropout of attention alone is not supported")
    fields = {
        "layers": keys.layers("num_hidden_layers"),
        "hidden": keys.size("hidden_size"),
        "heads": keys.size("num_attention_heads"),
        "ffn_hidden": keys.size(width),
        "vocab": keys.size("vocab_size"),
        "activation": keys.activation(activations, "hidden_act", "hidden_activation"),
        "norm": "rmsnorm",
        "position": "rope",
        "bias": False,
        "tied_embeddings": keys.flag("tie_word_embeddings"),
    }
    same = {"kv_heads": keys.size_or_none("num_key_value_heads"), "head_dim": keys.size_or_none("head_dim")}
    return fields | {key: value for key, value in same.items() if value is not None}


def with_biases(fields: Fields, *named: str) -> Fields:
    """Return ``fields`` with biases of the linear layers that are ``named``."""
    return {key: value for key, value in fields.items() if key != "bias"} | biases(*named)


def layer_types(keys: Keys, default: list[str]) -> list[str]:
    """Return the mixers that ``layer_types`` names, or the ``default``, layer by layer."""
    kinds = keys.for_each_layer(keys.layer_mixers("layer_types"), len(default), "layer_types")
    return default if kinds is None else kinds


def windows(keys: Keys, fields: Fields, kinds: list[str]) -> Fields:
    """Return ``fields`` with a pattern of windows, where the file has a window and some layer uses it."""
    window = keys.size_or_none("sliding_window", least=0)
    if not window or "window" not in kinds:
        return fields | mixers(["attention" if kind == "window" else kind for kind in kinds])
    return fields | mixers(kinds) | {"sliding_window": window}


def llama(keys: Keys, activations: Mapping[str, str] = GATED) -> Fields:
    """Return the fields of Llama, which can have biases of attention and of the MLP."""
    named = (("qkv", "o") if keys.flag("attention_bias") else ()) + (("mlp",) if keys.flag("mlp_bias") else ())
    fields = decoder(keys, activations)
    return fields | {"bias": True} if len(named) == 3 else with_biases(fields, *named)


def mistral(keys: Keys) -> Fields:
    """Return the fields of Mistral: all layers have the window, or none."""
    fields = decoder(keys)
    return windows(keys, fields, layer_types(keys, ["window"] * fields["layers"]))


def qwen2(keys: Keys) -> Fields:
    """Return the fields of Qwen2: biases of queries, keys and values, and windows from ``max_window_layers`` on."""
    return with_biases(_qwen(keys), "qkv")


def qwen3(keys: Keys) -> Fields:
    """Return the fields of Qwen3: norms of heads."""
    fields = _qwen(keys) | {"qk_norm": True}
    return with_biases(fields, *(("qkv", "o") if keys.flag("attention_bias") else ()))


def _qwen(keys: Keys) -> Fields:
    fields = decoder(keys)
    if not keys.flag("use_sliding_window"):
        keys.has_no_effect("sliding_window")  # the key above turns it off, in layers of windows too
        keys.need_layers("attention", "window")
        return fields
    first = keys.size("max_window_layers", default=0, least=0)
    kinds = ["window" if layer >= first else "attention" for layer in range(fields["layers"])]
    return windows(keys, fields, layer_types(keys, kinds))


def gemma(keys: Keys) -> Fields:
    """Return the fields of Gemma: GeGLU, heads wider than the residual stream, one table at both ends."""
    return with_biases(decoder(keys), *(("qkv", "o") if keys.flag("attention_bias") else ()))


def gemma2(keys: Keys) -> Fields:
    """Return the fields of Gemma 2: every second layer global, norms before and behind, capped scores and logits."""
    fields = gemma(keys) | {"norm_place": "both"} | _caps(keys)
    kinds = ["attention" if layer % 2 else "window" for layer in range(fields["layers"])]
    return windows(keys, fields, layer_types(keys, kinds))


def gemma3(keys: Keys) -> Fields:
    """Return the fields of Gemma 3's text model: every sixth layer global, norms of heads, no caps."""
    if keys.flag("use_bidirectional_attention"):
        raise keys.refuse("use_bidirectional_attention", "attention to later tokens is not supported")
    fields = gemma(keys) | {"norm_place": "both", "qk_norm": True} | _caps(keys)
    period = keys.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    kinds = ["window" if (layer + 1) % period else "attention" for layer in range(fields["layers"])]
    return windows(keys, fields, layer_types(keys, kinds))


def gemma4(keys: Keys) -> Fields:
    """Return the fields of Gemma 4's dense text models.

    Heads of global layers are wider and fewer, and in some models their values are their keys. The last layer is
    global. Models for small devices have inputs of each layer, and layers that attend to keys of others.
    """
    fields = gemma3(keys) | {"value_norm": True}
    if width := keys.size_or_none("hidden_size_per_layer_input", least=0):
        vocab = keys.size("vocab_size_per_layer_input", default=262_144)
        fields |= {"layer_inputs": {"width": width, "vocab": vocab}}
    if reusing := keys.size_or_none("num_kv_shared_layers", least=0):
        wide = {"ffn_hidden": 2 * keys.size("intermediate_size")} if keys.flag("use_double_wide_mlp") else {}
        fields |= {"reused_keys": {"layers": reusing, **wide}}
    local = {key: fields.pop(key) for key in ("kv_heads", "head_dim")}
    local["v_head_dim"] = local["head_dim"]
    joined = keys.flag("attention_k_eq_v")
    few = keys.size_or_none("num_global_key_value_heads") if joined else None
    fields |= {"head_dim": keys.size("global_head_dim", default=512), "window_heads": local}
    fields |= {"kv_heads": few or local["kv_heads"], "keys_as_values": joined}
    return fields


def _caps(keys: Keys) -> Fields:
    named = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    return {ours: keys.number(theirs, 1.0, 1e-6, 1e6) for ours, theirs in named.items() if keys.get(theirs)}


def phi3(keys: Keys) -> Fields:
    """Return the fields of Phi-3 and Phi-4: one product of queries, keys and values, one of gate and up."""
    for key in ("embd_pdrop", "resid_pdrop"):
        if keys.get(key):
            raise keys.refuse(key, "dropout of some places alone is not supported")
    fields = decoder(keys) | {"joined_products": True}
    return windows(keys, fields, ["window"] * fields["layers"])


def glm4(keys: Keys) -> Fields:
    """Return the fields of GLM-4-0414: norms before and behind, biases of queries, keys and values."""
    return with_biases(decoder(keys), *(("qkv",) if keys.flag("attention_bias") else ())) | {"norm_place": "both"}


def olmo2(keys: Keys) -> Fields:
    """Return the fields of OLMo 2: norms behind, and over the whole width of queries and of keys."""
    fields = with_biases(decoder(keys), *(("qkv", "o") if keys.flag("attention_bias") else ()))
    return fields | {"norm_place": "after", "qk_norm": True, "qk_norm_kind": "width"}


def olmo3(keys: Keys) -> Fields:
    """Return the fields of OLMo 3: OLMo 2's, with every fourth layer global."""
    fields = olmo2(keys)
    kinds = ["window" if (layer + 1) % 4 else "attention" for layer in range(fields["layers"])]
    return windows(keys, fields, layer_types(keys, kinds))


def exaone4(keys: Keys) -> Fields:
    """Return the fields of EXAONE 4: norms behind and of heads; beside windows, global layers have no positions."""
    fields = decoder(keys) | {"norm_place": "after", "qk_norm": True}
    period = keys.get("sliding_window_pattern", default=4)
    if isinstance(period, str):
        signs = period * fields["layers"]
        local = [sign == "L" for sign in signs[: fields["layers"]]]
        local[-1] = False
    else:
        every = keys.size("sliding_window_pattern", default=4, least=0)
        local = [every > 0 and (layer + 1) % every != 0 for layer in range(fields["layers"])]
    kinds = layer_types(keys, ["window" if one else "attention" for one in local])
    if keys.get("sliding_window") and "window" in kinds:
        kinds = ["no_rope" if kind == "attention" else kind for kind in kinds]
    return windows(keys, fields, kinds)


def smollm3(keys: Keys) -> Fields:
    """Return the fields of SmolLM3: some layers have no positions."""
    fields = llama(keys)
    rotated = rotated_layers(keys, fields["layers"])
    if keys.flag("use_sliding_window"):
        raise keys.refuse("use_sliding_window", "windows beside layers without positions are not supported")
    keys.has_no_effect("sliding_window")  # the key above turns it off, in layers of windows too
    keys.need_layers("attention", "window")
    return fields | mixers(["attention" if one else "no_rope" for one in rotated])


def rotated_layers(keys: Keys, layers: int) -> list[int]:
    """Return for each layer whether it has rotary positions: as ``no_rope_layers`` says, else all but every fourth.

    A list without items is as none, as in transformers.
    """
    period = keys.size("no_rope_layer_interval", default=4)
    listed = keys.for_each_layer(keys.numbers("no_rope_layers") or None, layers, "no_rope_layers")
    return listed or [(layer + 1) % period for layer in range(layers)]


def seed_oss(keys: Keys) -> Fields:
    """Return the fields of Seed-OSS: biases of some products, and one dropout."""
    attention, residual = keys.dropout("attention_dropout"), keys.dropout("residual_dropout")
    if attention != residual:
        raise keys.refuse("attention_dropout", f"a dropout other than residual_dropout ({residual}) is not supported")
    named = tuple(
        place
        for key, place in (("attention_bias", "qkv"), ("attention_out_bias", "o"), ("mlp_bias", "mlp"))
        if keys.flag(key)
    )
    return with_biases(decoder(keys), *named) | ({"dropout": attention} if attention else {})


def arcee(keys: Keys) -> Fields:
    """Return the fields of AFM: a squared ReLU without a gate."""
    return llama(keys, PLAIN)


def starcoder2(keys: Keys) -> Fields:
    """Return the fields of StarCoder 2: LayerNorm, GELU without a gate, biases of all or none."""
    dropouts = [keys.dropout(key) for key in ("attention_dropout", "residual_dropout", "embedding_dropout")]
    if dropouts[1:] != dropouts[:-1]:
        raise keys.refuse("residual_dropout", f"different dropouts are not supported: {dropouts}")
    fields = decoder(keys, PLAIN) | {"norm": "layernorm", "bias": keys.flag("use_bias")}
    fields |= {"dropout": dropouts[0]} if dropouts[0] else {}
    return windows(keys, fields, layer_types(keys, ["window"] * fields["layers"]))


def nemotron(keys: Keys) -> Fields:
    """Return the fields of Nemotron-4 and Minitron: LayerNorm, a squared ReLU without a gate."""
    return llama(keys, PLAIN) | {"norm": "layernorm"}


def gpt2(keys: Keys) -> Fields:
    """Return the fields of GPT-2."""
    dropouts = [keys.dropout(key, 0.1) for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")]
    if dropouts[1:] != dropouts[:-1]:
        raise keys.refuse("embd_pdrop, attn_pdrop, resid_pdrop", f"different dropouts are not supported: {dropouts}")
    fields = {
        "layers": keys.layers("n_layer"),
        "hidden": keys.size("n_embd"),
        "heads": keys.size("n_head"),
        "vocab": keys.size("vocab_size"),
        "activation": keys.activation(PLAIN, "activation_function"),
        "norm": "layernorm",
        "position": "learned",
        "bias": True,
        "tied_embeddings": keys.flag("tie_word_embeddings"),
        "dropout": dropouts[0],
    }
    inner = keys.size_or_none("n_inner")
    return fields | ({"ffn_hidden": inner} if inner else {})
