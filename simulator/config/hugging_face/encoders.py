"""Encoders of images beside a text model, of Hugging Face: section `vision_config`, as section `encoder`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from simulator.bounds import MAX_LAYERS
from simulator.config.hugging_face.keys import PLAIN, Fields, Keys

_GELU = tuple(name for name, plain in PLAIN.items() if plain == "gelu")


def qwen2_5_vl(keys: Keys, whole: Keys) -> Fields:
    """Return the encoder of Qwen2.5-VL; how many patches an image has is for the workload to say.

    A window is ``window_size`` pixels wide. Its attention has biases, and so have gated MLPs.
    """
    if keys.get("hidden_act", default="silu") not in ("silu", "swish"):
        raise keys.refuse("hidden_act", "this activation of an encoder is not supported", allowed="silu, swish")
    hidden, side = keys.size("hidden_size", default=3584), _side(keys, 14)
    merge = keys.size("spatial_merge_size", default=2) ** 2
    channels, frames = keys.size("in_channels", "in_chans", default=3), keys.size("temporal_patch_size", default=2)
    global_layers = keys.numbers("fullatt_block_indexes")
    return {
        "layers": keys.size("depth", "num_hidden_layers", default=32, most=MAX_LAYERS),
        "hidden": hidden,
        "heads": keys.size("num_heads", "num_attention_heads", default=16),
        "ffn_hidden": keys.size("intermediate_size", default=3420),
        "patch_values": channels * frames * side**2,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "position": "rope",
        "window": (keys.size("window_size", default=112, least=side) // side) ** 2,
        "global_layers": [7, 15, 23, 31] if global_layers is None else global_layers,
        "patches_per_token": merge,
        "merge_norm": True,
        "projector": [hidden * merge],
        "projector_bias": True,
    }


def gemma3(keys: Keys, whole: Keys) -> Fields:
    """Return the encoder of Gemma 3, a SigLIP tower: means of patches become ``mm_tokens_per_image`` tokens."""
    side = _side(keys, 16)
    patches = (keys.size("image_size", default=224, least=side) // side) ** 2
    tokens = whole.size("mm_tokens_per_image", default=256)
    return _tower(keys, "gelu_pytorch_tanh", 1152) | {
        "patch_values": keys.size("num_channels", default=3) * side**2,
        "patches_per_image": patches,
        "learned_positions": patches,
        "patch_bias": True,
        "output_norm": True,
        "patches_per_token": max(1, patches // tokens),
        "merge_by": "mean",
        "merge_norm": True,
    }


def llama4(keys: Keys, whole: Keys) -> Fields:
    """Return the encoder of Llama 4: a class token, norms at both ends, four patches side by side for a token."""
    side, ratio = _side(keys, 14), keys.number("pixel_shuffle_ratio", 0.5, 0.01, 1.0)
    patches = (keys.size("image_size", default=448, least=side) // side) ** 2
    return _tower(keys, "gelu", 768) | {
        "position": "rope",
        "patch_values": keys.size("num_channels", default=3) * side**2,
        "patches_per_image": patches,
        "learned_positions": patches + 1,
        "class_token": True,
        "input_norm": True,
        "output_norm": True,
        "patches_per_token": round(1 / ratio**2),
        "projector": [keys.size("projector_input_dim", default=4096), keys.size("projector_output_dim", default=4096)],
        "projector_bias": keys.flag("multi_modal_projector_bias"),
    }


def _tower(keys: Keys, activation: str, hidden: int) -> Fields:
    """Return the sizes that a tower with LayerNorm has, and the width ``hidden`` where the file is silent."""
    if keys.get("hidden_act", default=activation) not in _GELU:
        raise keys.refuse("hidden_act", "this activation of an encoder is not supported", allowed=", ".join(_GELU))
    return {
        "layers": keys.layers("num_hidden_layers"),
        "hidden": keys.size("hidden_size", default=hidden),
        "heads": keys.size("num_attention_heads"),
        "ffn_hidden": keys.size("intermediate_size"),
    }


def _side(keys: Keys, default: int) -> int:
    """Return the pixels of a side of a patch."""
    if isinstance(keys.get("patch_size"), list):
        raise keys.refuse("patch_size", "patches that are not square are not supported", allowed="one number")
    return keys.size("patch_size", default=default)


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

    A ``tie_word_embeddings`` beside the section counts for more than one in it.
    """
    inner = config.get("text_config")
    text = dict(inner) if isinstance(inner, Mapping) else dict(config)
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return {key: value for key, value in (text | tied).items() if key != "vision_config"} | {
        "model_type": TOWERS[kind].text
    }


def encoder_of(config: Mapping[str, Any], kind: str, file: object) -> Fields:
    """Return the section `encoder` that the ``vision_config`` of a ``config`` means."""
    return TOWERS[kind].read(Keys(config["vision_config"], {}, file, "vision_config."), Keys(config, {}, file))
