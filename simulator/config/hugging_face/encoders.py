"""Encoders of images beside a text model, of Hugging Face: section `vision_config`, as section `encoder`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from simulator.config.hugging_face.keys import PLAIN, Fields, Keys


def qwen2_5_vl(keys: Keys, whole: Keys) -> Fields:
    """Return the encoder of Qwen2.5-VL; how many patches an image has is for the workload to say.

    A window is ``window_size`` pixels wide. Its attention has biases, and so have gated MLPs.
    """
    hidden, side = keys.get("hidden_size", default=3584), _side(keys, 14)
    merge = keys.get("spatial_merge_size", default=2) ** 2
    frames = keys.get("temporal_patch_size", default=2)
    return {
        "layers": keys.get("depth", "num_hidden_layers", default=32),
        "hidden": hidden,
        "heads": keys.get("num_heads", "num_attention_heads", default=16),
        "ffn_hidden": keys.get("intermediate_size", default=3420),
        "patch": keys.get("in_channels", "in_chans", default=3) * frames * side**2,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "position": "rope",
        "window": (keys.get("window_size", default=112) // side) ** 2,
        "global_layers": list(keys.get("fullatt_block_indexes", default=(7, 15, 23, 31))),
        "merge": merge,
        "merged_norm": True,
        "projector": [hidden * merge],
        "projector_bias": True,
    }


def gemma3(keys: Keys, whole: Keys) -> Fields:
    """Return the encoder of Gemma 3, a SigLIP tower: means of patches become ``mm_tokens_per_image`` tokens."""
    side = _side(keys, 16)
    patches = (keys.get("image_size", default=224) // side) ** 2
    tokens = whole.get("mm_tokens_per_image", default=256)
    return _tower(keys, "gelu_pytorch_tanh", 1152) | {
        "patch": keys.get("num_channels", default=3) * side**2,
        "patches": patches,
        "positions": patches,
        "patch_bias": True,
        "output_norm": True,
        "merge": max(1, patches // tokens),
        "merged": "mean",
        "merged_norm": True,
    }


def llama4(keys: Keys, whole: Keys) -> Fields:
    """Return the encoder of Llama 4: a class token, norms at both ends, four patches side by side for a token."""
    side, ratio = _side(keys, 14), keys.get("pixel_shuffle_ratio", default=0.5)
    patches = (keys.get("image_size", default=448) // side) ** 2
    return _tower(keys, "gelu", 768) | {
        "position": "rope",
        "patch": keys.get("num_channels", default=3) * side**2,
        "patches": patches,
        "positions": patches + 1,
        "class_token": True,
        "input_norm": True,
        "output_norm": True,
        "merge": round(1 / ratio**2),
        "projector": [keys.get("projector_input_dim", default=4096), keys.get("projector_output_dim", default=4096)],
        "projector_bias": bool(keys.get("multi_modal_projector_bias")),
    }


def _tower(keys: Keys, activation: str, hidden: int) -> Fields:
    """Return the sizes that a tower with LayerNorm has, and the width ``hidden`` where the file is silent."""
    if keys.get("hidden_act", default=activation) not in PLAIN:
        raise keys.refuse("hidden_act", "this activation of an encoder is not supported")
    return {
        "layers": keys.need("num_hidden_layers"),
        "hidden": keys.get("hidden_size", default=hidden),
        "heads": keys.need("num_attention_heads"),
        "ffn_hidden": keys.need("intermediate_size"),
    }


def _side(keys: Keys, default: int) -> int:
    """Return the pixels of a side of a patch."""
    side = keys.get("patch_size", default=default)
    if not isinstance(side, int) or isinstance(side, bool) or side < 1:
        raise keys.refuse("patch_size", "patches that are not square are not supported")
    return side


class Tower(NamedTuple):
    """An architecture with an encoder: the ``model_type`` of its text model, and the reader of `vision_config`."""

    text: str
    read: Callable[[Keys, Keys], Fields]


TOWERS: Mapping[str, Tower] = {
    "qwen2_5_vl": Tower("qwen2", qwen2_5_vl),
    "gemma3": Tower("gemma3_text", gemma3),
    "llama4": Tower("llama4_text", llama4),
}


def text_config(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the keys of the text model of a ``config`` with an encoder, which stand in a section or beside it.

    Whether the embedding is tied is said outside of the section, where it is said.
    """
    inner = config.get("text_config")
    text = dict(inner) if isinstance(inner, Mapping) else dict(config)
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return {key: value for key, value in (text | tied).items() if key != "vision_config"} | {
        "model_type": TOWERS[kind].text
    }


def encoder_of(config: Mapping[str, Any], kind: str, file: object) -> Fields:
    """Return the section `encoder` that the ``vision_config`` of a ``config`` means."""
    return TOWERS[kind].read(Keys(config["vision_config"], {}, file), Keys(config, {}, file))
