"""DeepSeek-V4 of Hugging Face: compressed attention with one head of keys, several residual streams."""

from __future__ import annotations

from simulator.config.hugging_face.dense import decoder
from simulator.config.hugging_face.keys import Fields, Keys, mixers
from simulator.config.hugging_face.mixtures import with_experts

#: What ``layer_types`` says of a layer -> our name of its mixer.
_MIXERS = {
    "sliding_attention": "shared_key",
    "compressed_sparse_attention": "compressed_sparse",
    "heavily_compressed_attention": "heavily_compressed",
}
#: Tokens that make one key in ``compress_ratios`` -> the kind of layer that has it.
_KIND_OF_RATE = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
#: Keys of the file -> those of `shared_key`, with what the configuration class assumes.
_SIZES = {
    "heads": ("num_attention_heads", 64),
    "head_dim": ("head_dim", 512),
    "query_rank": ("q_lora_rank", 1024),
    "output_groups": ("o_groups", 8),
    "output_rank": ("o_lora_rank", 1024),
    "window": ("sliding_window", 128),
    "rotary_dim": ("qk_rope_head_dim", 64),
    "index_heads": ("index_n_heads", 64),
    "index_dim": ("index_head_dim", 128),
    "top_k": ("index_topk", 512),
}


def deepseek_v4(keys: Keys) -> Fields:
    """Return the fields of DeepSeek-V4.

    Modules of multi-token prediction are left out, as transformers leaves them out. Layers that choose experts by a
    table of tokens have the weights of the others, and are taken for them.
    """
    for key in ("attention_bias", "mlp_bias"):
        if keys.flag(key):
            raise keys.refuse(key, "biases of DeepSeek-V4 are not supported", allowed="false")
    decoded = decoder(keys, width="moe_intermediate_size")
    # The section has heads and positions of its own.
    fields = {key: value for key, value in decoded.items() if key not in ("kv_heads", "head_dim")} | {
        "position": "none"
    }
    rates = keys.section("compress_rates")
    section = {ours: keys.size(theirs, default=size) for ours, (theirs, size) in _SIZES.items()}
    section |= {
        "sparse_rate": rates.size("compressed_sparse_attention", default=keys.size("compress_rate_csa", default=4)),
        "heavy_rate": rates.size("heavily_compressed_attention", default=keys.size("compress_rate_hca", default=128)),
    }
    keys.has_no_effect("num_nextn_predict_layers", "num_mtp_layers")
    experts = keys.size("n_routed_experts", "num_local_experts", default=256)
    moe = {
        "experts": experts,
        "top_k": keys.size("num_experts_per_tok", default=6, most=experts),
        "ffn_hidden": fields["ffn_hidden"],
        "shared_experts": keys.size("n_shared_experts", default=1, least=0),
    }
    fields |= mixers([_MIXERS[kind] for kind in _kinds(keys, fields["layers"])])
    fields |= {"shared_key": section, "residual_streams": keys.size("hc_mult", default=4, most=64)}
    return with_experts(fields, moe, [True] * fields["layers"])


def _kinds(keys: Keys, layers: int) -> list[str]:
    """Return the kind of each layer, as ``layer_types`` or ``compress_ratios`` says it, or the class where both do not.

    Lists may be longer than the model, by modules of multi-token prediction. By default the first two layers are
    heavily compressed, and the others in turns.
    """
    rates = keys.numbers("compress_ratios")
    kinds = keys.words("layer_types")
    if kinds is None and rates is not None:
        if set(rates) - set(_KIND_OF_RATE):
            raise keys.refuse(
                "compress_ratios", "is no list of 0, 4 and 128", allowed="0, 4 and 128, one for each layer"
            )
        kinds = [_KIND_OF_RATE[rate] for rate in rates]
    if kinds is None:
        kinds = [_KIND_OF_RATE[4 if layer % 2 and layer > 1 else 128] for layer in range(layers)]
    if set(kinds) - set(_MIXERS):
        raise keys.refuse(
            "layer_types", "names a kind of layer that DeepSeek-V4 does not have", allowed=", ".join(_MIXERS)
        )
    if len(kinds) < layers:
        raise keys.refuse("layer_types" if rates is None else "compress_ratios", f"says less than {layers} layers")
    return kinds[:layers]
