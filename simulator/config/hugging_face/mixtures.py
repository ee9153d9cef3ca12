"""Architectures of Hugging Face with experts."""

from __future__ import annotations

from simulator.config.hugging_face.dense import (
    decoder,
    gemma4,
    layer_types,
    qwen3,
    rotated_layers,
    windows,
    with_biases,
)
from simulator.config.hugging_face.keys import MAX_PREDICTIONS, Fields, Keys, mixers, places


def with_experts(fields: Fields, moe: Fields, has: list[bool]) -> Fields:
    """Return ``fields`` with experts in the layers that have some; without any where no layer has."""
    if not any(has):
        return fields
    in_model, in_moe = places(has)
    return fields | in_model | {"moe": moe | in_moe}


def gemma4_text(keys: Keys) -> Fields:
    """Return the fields of Gemma 4's text models, some with experts beside the dense MLP of every layer."""
    fields = gemma4(keys)
    if not keys.flag("enable_moe_block"):
        return fields
    experts = keys.size("num_experts")
    moe = {
        "experts": experts,
        "top_k": keys.size("top_k_experts", most=experts),
        "ffn_hidden": keys.size("moe_intermediate_size"),
        "beside_dense": True,
    }
    return with_experts(fields, moe, [True] * fields["layers"])


def _routed(keys: Keys, count: str, width: str) -> Fields:
    """Return the section of experts whose number and width stand under these keys.

    Transformers 5 writes the number of Qwen's and DeepSeek's experts as Mixtral's.
    """
    experts = keys.size(count, "num_local_experts")
    return {
        "experts": experts,
        "top_k": keys.size("num_experts_per_tok", most=experts),
        "ffn_hidden": keys.size(width),
    }


def mixtral(keys: Keys) -> Fields:
    """Return the fields of Mixtral: experts in every layer."""
    fields = decoder(keys)
    fields = windows(keys, fields, ["window"] * fields["layers"])
    return with_experts(fields, _routed(keys, "num_local_experts", "intermediate_size"), [True] * fields["layers"])


def phimoe(keys: Keys) -> Fields:
    """Return the fields of Phi-3.5-MoE: LayerNorm, and biases of attention and of the head."""
    named = (("qkv", "o") if keys.flag("attention_bias") else ()) + (("head",) if keys.flag("lm_head_bias") else ())
    return with_biases(mixtral(keys), *named) | {"norm": "layernorm"}


def minimax_m2(keys: Keys) -> Fields:
    """Return the fields of MiniMax-M2: norms over the whole width of queries and of keys."""
    if (
        keys.flag("use_qk_norm", default=True) is not True
        or keys.get("qk_norm_type", default="per_layer") != "per_layer"
    ):
        raise keys.refuse("qk_norm_type", "norms of another kind than over all heads are not supported")
    return mixtral(keys) | {"qk_norm": True, "qk_norm_kind": "width"}


def olmoe(keys: Keys) -> Fields:
    """Return the fields of OLMoE: norms over the whole width of queries and of keys."""
    fields = with_biases(decoder(keys), *(("qkv", "o") if keys.flag("attention_bias") else ()))
    moe = _routed(keys, "num_experts", "intermediate_size")
    return with_experts(fields, moe, [True] * fields["layers"]) | {"qk_norm": True, "qk_norm_kind": "width"}


def granitemoe(keys: Keys) -> Fields:
    """Return the fields of Granite 3's mixtures, some with an MLP that all tokens pass."""
    fields = with_biases(decoder(keys), *(("qkv", "o") if keys.flag("attention_bias") else ()))
    return with_experts(fields, granite_experts(keys), [has_granite_experts(keys)] * fields["layers"])


def has_granite_experts(keys: Keys) -> bool:
    """Return whether a Granite has experts; 0 is none."""
    return bool(keys.size_or_none("num_local_experts", least=0))


def granite_experts(keys: Keys) -> Fields:
    """Return the section of Granite's experts; shared ones stand as one MLP."""
    if not has_granite_experts(keys):
        return {}
    moe = _routed(keys, "num_local_experts", "intermediate_size")
    width = keys.size_or_none("shared_intermediate_size", least=0)
    return moe | ({"shared_experts": 1, "shared_ffn_hidden": width} if width else {})


def qwen_layers(keys: Keys, layers: int) -> list[bool]:
    """Return which layers of Qwen have experts.

    Those whose number, counted from 1, divides by ``decoder_sparse_step``, but for ``mlp_only_layers``.
    """
    dense, step = keys.numbers("mlp_only_layers") or [], keys.size("decoder_sparse_step", default=1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def qwen3_moe(keys: Keys) -> Fields:
    """Return the fields of Qwen3's mixtures."""
    fields = qwen3(keys)
    return with_experts(
        fields, _routed(keys, "num_experts", "moe_intermediate_size"), qwen_layers(keys, fields["layers"])
    )


def gated_shared(keys: Keys) -> Fields:
    """Return the section of experts beside a shared one whose output a gate weighs."""
    return _routed(keys, "num_experts", "moe_intermediate_size") | {
        "shared_experts": 1,
        "shared_ffn_hidden": keys.size("shared_expert_intermediate_size"),
        "shared_gate": True,
    }


def qwen2_moe(keys: Keys) -> Fields:
    """Return the fields of Qwen2's mixtures: a shared expert with a gate, biases of queries, keys and values."""
    if keys.flag("use_sliding_window"):
        raise keys.refuse("use_sliding_window", "windows of Qwen2-MoE are not supported")
    keys.has_no_effect("sliding_window")  # the key above turns it off, in layers of windows too
    keys.need_layers("attention", "window")
    fields = with_biases(decoder(keys), *(("qkv",) if keys.flag("qkv_bias", default=True) else ()))
    return with_experts(fields, gated_shared(keys), qwen_layers(keys, fields["layers"]))


def gpt_oss(keys: Keys) -> Fields:
    """Return the fields of gpt-oss: every second layer global, sinks, biases of attention, experts and router."""
    fields = with_biases(decoder(keys), *(("qkv", "o") if keys.flag("attention_bias") else ()), "experts", "router")
    kinds = ["attention" if layer % 2 else "window" for layer in range(fields["layers"])]
    fields = windows(keys, fields, layer_types(keys, kinds)) | {"attention_sinks": True}
    return with_experts(fields, _routed(keys, "num_local_experts", "intermediate_size"), [True] * fields["layers"])


def llama4(keys: Keys) -> Fields:
    """Return the fields of Llama 4's text model.

    Layers with positions attend inside pieces, the others to all tokens. One shared expert is as wide as a routed one,
    and dense layers have a width of their own.
    """
    fields = decoder(keys) | {"ffn_hidden": keys.size("intermediate_size_mlp")}
    fields = with_biases(fields, *(("qkv", "o") if keys.flag("attention_bias") else ()))
    layers = range(fields["layers"])
    rotated = rotated_layers(keys, fields["layers"])
    chunk, kinds = keys.size_or_none("attention_chunk_size", least=0), keys.words("layer_types")
    keys.for_each_layer(kinds, fields["layers"], "layer_types")
    if kinds is not None and [kind == "chunked_attention" for kind in kinds] != [bool(one) for one in rotated]:
        raise keys.refuse("layer_types", "pieces in other layers than those with positions are not supported")
    local = "chunked" if chunk else "attention"
    fields |= mixers([local if one else "no_rope" for one in rotated]) | ({"attention_chunk": chunk} if chunk else {})
    if keys.flag("use_qk_norm"):
        fields |= {"qk_norm": True, "qk_norm_kind": "unweighted"}
    step = keys.size("interleave_moe_layer_step", default=1)
    chosen = keys.numbers("moe_layers")
    chosen = list(range(step - 1, fields["layers"], step)) if chosen is None else chosen
    moe = _routed(keys, "num_local_experts", "intermediate_size") | {"shared_experts": 1}
    return with_experts(fields, moe, [layer in chosen for layer in layers])


def sparse_layers(keys: Keys, layers: int) -> list[bool]:
    """Return which layers of DeepSeek's kind have experts.

    From layer ``first_k_dense_replace`` on, those whose number divides by ``moe_layer_freq``, or as
    ``mlp_layer_types`` says.
    """
    kinds = keys.words("mlp_layer_types")
    if kinds is not None:
        if unknown := [kind for kind in kinds if kind not in ("dense", "sparse")]:
            raise keys.refuse("mlp_layer_types", f"MLPs of kind {unknown[0]} are not supported")
        return [kind == "sparse" for kind in keys.for_each_layer(kinds, layers, "mlp_layer_types") or ()]
    if isinstance(keys.get("moe_layer_freq"), list):
        chosen = keys.for_each_layer(keys.numbers("moe_layer_freq"), layers, "moe_layer_freq")
        return [bool(one) for one in chosen or ()]
    frequency = keys.size("moe_layer_freq", default=1)
    first = keys.size("first_k_dense_replace", default=0, least=0)
    return [layer >= first and layer % frequency == 0 for layer in range(layers)]


def fine_grained(keys: Keys, fields: Fields) -> Fields:
    """Return ``fields`` with DeepSeek's experts; none where ``n_routed_experts`` is null."""
    if keys.get("n_routed_experts") is None:
        return fields
    moe = _routed(keys, "n_routed_experts", "moe_intermediate_size")
    groups = keys.size("n_group", default=1)
    if moe["experts"] % groups:
        raise keys.refuse("n_group", f"does not divide the {moe['experts']:,} experts")
    shared = keys.size_or_none("n_shared_experts", least=0)
    moe |= {"shared_experts": shared} if shared else {}
    return with_experts(fields, moe, sparse_layers(keys, fields["layers"]))


def _with_predictions(keys: Keys, fields: Fields) -> Fields:
    modules = keys.size_or_none("num_nextn_predict_layers", "num_mtp_layers", least=0, most=MAX_PREDICTIONS)
    return fields | ({"mtp_layers": modules} if modules else {})


def latent(keys: Keys, fields: Fields) -> Fields:
    """Return ``fields`` with latent attention in place of heads of keys and values."""
    same = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    rank = keys.size_or_none("q_lora_rank")
    section = {key: keys.size(key) for key in same} | ({"q_lora_rank": rank} if rank else {})
    return {key: value for key, value in fields.items() if key not in ("kv_heads", "head_dim")} | {"mla": section}


def deepseek(keys: Keys) -> Fields:
    """Return the fields of DeepSeek-V2 and V3, and of Kimi K2: latent attention."""
    if keys.flag("attention_bias") != keys.flag("mlp_bias"):
        raise keys.refuse("attention_bias", "biases of latent attention alone are not supported")
    fields = latent(keys, decoder(keys) | {"bias": keys.flag("attention_bias")})
    return _with_predictions(keys, fine_grained(keys, fields))


def deepseek_sparse(keys: Keys) -> Fields:
    """Return the fields of DeepSeek-V3.2 and GLM-5: an indexer chooses what a query attends to."""
    kinds = keys.words("indexer_types") or []
    if set(kinds) - {"full"}:
        raise keys.refuse("indexer_types", "indexers that layers share are not supported")
    keys.need_layers("sparse")
    indexer = {
        "heads": keys.size("index_n_heads"),
        "head_dim": keys.size("index_head_dim"),
        "top_k": keys.size("index_topk"),
    }
    return deepseek(keys) | {"indexer": indexer}


def glm4_moe(keys: Keys) -> Fields:
    """Return the fields of GLM-4.5: biases of queries, keys and values, and norms of heads in some sizes."""
    fields = with_biases(decoder(keys), *(("qkv",) if keys.flag("attention_bias") else ()))
    fields |= {"qk_norm": True} if keys.flag("use_qk_norm") else {}
    return _with_predictions(keys, fine_grained(keys, fields))


def mimo_v2_flash(keys: Keys) -> Fields:
    """Return the fields of MiMo-V2-Flash: windows in five layers of six, with sinks and twice the heads of keys.

    Transformers doubles these heads itself (5.24, `modeling_mimo_v2_flash.py`). The config.json
    of XiaomiMiMo/MiMo-V2-Flash says them, and other sizes of such layers, under ``swa_...``. Its
    ``hybrid_layer_pattern`` has a 1 for each layer with a window.
    """
    fields = decoder(keys) | {"v_head_dim": keys.size("v_head_dim")}
    fields["attention_sinks"] = _sinks_of_mimo(keys)
    if keys.flag("attention_bias"):
        raise keys.refuse("attention_bias", "biases of queries, keys and values alone are not supported here")
    layers = range(fields["layers"])
    default = ["window" if layer and (layer + 1) % 6 else "attention" for layer in layers]
    pattern = keys.get("hybrid_layer_pattern")
    if pattern is not None:
        if not isinstance(pattern, list) or len(pattern) != len(layers) or set(pattern) - {0, 1}:
            raise keys.refuse("hybrid_layer_pattern", "is no list of 0 and 1, one for each layer")
        default = ["window" if one else "attention" for one in pattern]
    kinds = layer_types(keys, default)
    if keys.get("sliding_window_size") is not None and "window" in kinds:  # tokens before the query
        fields |= mixers(kinds) | {"sliding_window": keys.size("sliding_window_size", least=0) + 1}
        keys.has_no_effect("sliding_window")  # the key above counts, as in transformers
    else:
        fields = windows(keys, fields, kinds)
    if "sliding_window" in fields:
        fields["window_heads"] = _window_heads_of_mimo(keys, fields)
    moe = _routed(keys, "n_routed_experts", "moe_intermediate_size")
    has = sparse_layers(keys, len(layers)) if keys.get("mlp_layer_types", "moe_layer_freq") else [*map(bool, layers)]
    return with_experts(fields, moe, has)


def _window_heads_of_mimo(keys: Keys, fields: Fields) -> Fields:
    """Return the section `window_heads`: what differs from heads of other layers."""
    usual = {
        "heads": fields["heads"],
        "kv_heads": fields["kv_heads"],
        "head_dim": fields["head_dim"],
        "v_head_dim": fields["v_head_dim"],
    }
    sizes = {
        "heads": keys.size("swa_num_attention_heads", default=usual["heads"]),
        "kv_heads": keys.size(
            "swa_num_key_value_heads", default=2 * keys.size("num_key_value_heads", default=usual["heads"])
        ),
        "head_dim": keys.size("swa_head_dim", default=usual["head_dim"]),
        "v_head_dim": keys.size("swa_v_head_dim", default=usual["v_head_dim"]),
    }
    return {key: size for key, size in sizes.items() if size != usual[key]}


def _sinks_of_mimo(keys: Keys) -> bool | str:
    """Return which layers have sinks: those with a window where the file is silent, as in transformers."""
    in_windows, in_others = (
        keys.flag("add_swa_attention_sink_bias", default=True),
        keys.flag("add_full_attention_sink_bias", default=False),
    )
    if in_others and not in_windows:
        raise keys.refuse("add_full_attention_sink_bias", "sinks of layers without a window alone are not supported")
    return in_others or ("window" if in_windows else False)
