"""Random models, so small that a step has a few hundred events."""

from __future__ import annotations

from random import Random
from typing import Any

Section = dict[str, Any]

#: Kind of layer -> keys of a model that say its sizes.
SIZES: dict[str, Section] = {
    "window": {"sliding_window": 64},
    "chunked": {"attention_chunk": 48},
    "gated_delta": {"gated_delta": {"key_heads": 4, "value_heads": 8, "key_dim": 16, "value_dim": 32}},
    "kimi_delta": {"kimi_delta": {"heads": 8, "head_dim": 16}},
    "mamba2": {"mamba2": {"heads": 8, "head_dim": 32, "state": 16, "groups": 4, "chunk": 64}},
}
#: Kinds of layers that attend by latent vectors.
LATENT_KINDS = ("attention", "sparse", "none")
#: Kinds of layers of DeepSeek-V4.
COMPRESSED_KINDS = ("shared_key", "compressed_sparse", "heavily_compressed")
KINDS = ("attention", "window", "chunked", "no_rope", "gated_delta", "kimi_delta", "mamba2", "none")


def random_model(random: Random, stages: int, experts: bool, ep: int) -> Section:
    """Return the section of a model whose layers divide by ``stages``; its ``experts`` are spread over ``ep`` ranks."""
    one = random.choice
    hidden = one((256, 512, 1024))
    model: Section = {
        "layers": stages * one((1, 1, 1, 2)),
        "hidden": hidden,
        "heads": 8,
        "kv_heads": one((8, 8, 4)),
        "vocab": one((500, 1250, 5000)),
        "activation": one(("gelu", "swiglu", "geglu", "relu", "relu2")),
        "norm": one(("layernorm", "rmsnorm")),
        "position": one(("learned", "rope", "none")),
        "bias": one((True, False)),
        "tied_embeddings": one((True, False)),
        "dropout": one((0.0, 0.0, 0.1)),
        "attention": one(("flash", "flash", "unfused")),
        "sliding_window": one((None, None, 64)),
        "mtp_layers": one((0, 0, 0, 1)),
    }
    if experts:
        model["moe"] = _experts(random, ep)
    if one((True, False, False, False)):
        del model["kv_heads"]
        model |= {"mla": _latent(random), "position": "rope", "sliding_window": None}
        if one((True, False)):
            model |= _latent_pattern(random, stages, model["mla"])
    elif one((True, False)):
        model |= _pattern(random, stages) if one((True, True, True, False)) else _compressed_pattern(random, stages)
    if one((True, False, False, False)):
        model["mlps"] = _mlps(random, stages, experts)
        for key in ("first_dense_layers", "every") if experts else ():
            del model["moe"][key]
    return model | _surroundings(random, model)


def _surroundings(random: Random, model: Section) -> Section:
    """Return what few models have: several residual streams, an encoder, a dense MLP beside experts."""
    one = random.choice
    section: Section = {}
    if one((True, *[False] * 7)):
        section |= {"residual_streams": one((2, 4)), "dropout": 0.0, "mtp_layers": 0, "norm_place": "before"}
    if one((True, *[False] * 7)):
        windows = one(({}, {"window": 16, "global_layers": [1]}))
        sizes = {
            "layers": 2,
            "hidden": 256,
            "heads": 8,
            "ffn_hidden": 512,
            "patch_values": 48,
            "patches_per_image": 64,
            "patches_per_token": 4,
        }
        section["encoder"] = sizes | windows | {"images": one((1, 2)), "projector": one(([], [512]))}
    if "moe" in model and one((True, *[False] * 3)):
        section["moe"] = model["moe"] | {"beside_dense": True}
    return section


def random_llama(random: Random, stages: int) -> Section:
    """Return the section of a model of Llama's kind, whose layers divide by ``stages``."""
    one = random.choice
    return {
        "layers": stages * one((1, 1, 2)),
        "hidden": one((256, 512)),
        "heads": 8,
        "kv_heads": one((8, 4)),
        "ffn_hidden": one((512, 1024)),
        "vocab": one((500, 5000)),
        "activation": "swiglu",
        "norm": "rmsnorm",
        "position": "rope",
        "bias": False,
        "tied_embeddings": one((True, False)),
    }


def _kinds(random: Random, stages: int, names: tuple[str, ...]) -> list[str]:
    """Return kinds of layers in turn, the first of which is something."""
    kinds = [random.choice(names) for _ in range(min(stages, random.choice((1, 2, 3))))]
    return [names[0], *kinds[1:]] if kinds[0] == "none" else kinds


def _pattern(random: Random, stages: int) -> Section:
    """Return kinds of layers in turn, with what each needs, and forms of attention."""
    one = random.choice
    kinds = _kinds(random, stages, KINDS)
    section: Section = {"mixers": kinds, "sliding_window": None}
    for kind in kinds:
        section |= SIZES.get(kind, {})
    if "window" in kinds and one((True, False)):
        section["window_heads"] = {"kv_heads": 4}
    return section | {
        "norm_place": one(("before", "after", "both")),
        "qk_norm": one((True, False)),
        "attention_gate": one((True, False)),
        "attention_sinks": one((True, False, False, "window")),
        "value_norm": one((True, False)),
    }


def _latent_pattern(random: Random, stages: int, latent: Section) -> Section:
    """Return kinds of layers of latent attention; sparse ones read compressed queries."""
    kinds = _kinds(random, stages, LATENT_KINDS if latent["q_lora_rank"] else ("attention", "none"))
    section: Section = {"mixers": kinds}
    if "sparse" in kinds:
        section["indexer"] = {"heads": 4, "head_dim": 32, "top_k": 64}
    return section


def _compressed_pattern(random: Random, stages: int) -> Section:
    """Return kinds of layers with one head of keys, some of them compressed."""
    widths = {"heads": 8, "head_dim": 32, "query_rank": 64, "output_groups": 2, "output_rank": 48, "window": 32}
    compressed = {"rotary_dim": 8, "heavy_rate": 16, "index_heads": 4, "index_dim": 16, "top_k": 16}
    return {
        "mixers": _kinds(random, stages, COMPRESSED_KINDS),
        "shared_key": widths | compressed,
        "sliding_window": None,
        "attention": "flash",
    }


def _mlps(random: Random, stages: int, experts: bool) -> list[str]:
    """Return which layers have a dense MLP, experts or neither, in turn; experts are in some."""
    kinds = _kinds(random, stages, ("dense", "moe", "none") if experts else ("dense", "dense", "none"))
    return [*kinds[:-1], "moe"] if experts and "moe" not in kinds else kinds


def _experts(random: Random, ep: int) -> Section:
    one = random.choice
    moe = {
        "experts": 8,
        "top_k": one((1, 2)),
        "ffn_hidden": one((128, 256)),
        "shared_experts": one((0, 1)),
        "first_dense_layers": one((0, 0, 1)),
        "every": one((1, 1, 2)),
        "token_distribution": one(("balanced", "balanced", {"skew": 0.7})),
        "node_limit": one((None, None, None, 1, 2)),
        "redundant_experts": one((0, 0, 0, ep)) if ep > 1 else 0,
    }
    if moe["shared_experts"] and one((True, False, False)):
        moe["shared_gate"] = True
    if one((True, False, False)):
        moe |= {"capacity_factor": 1.25, "pad_to_capacity": one((True, False))}
    return moe


def _latent(random: Random) -> Section:
    return {
        "q_lora_rank": random.choice((None, 96)),
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    }
