"""Models by name, or from the `config.json` that Hugging Face checkpoints carry, as keys of a workload's `model`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from simulator.errors import InputError, PlaceOfKey
from simulator.input_files import as_path, brief, closest, read_json, read_yaml


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Preset name -> keys of a workload's `model`, and `source`."""
    return read_yaml(Path(__file__).with_name("presets.yaml"))


def expand_model(section: Mapping[str, Any], *, base: Path | None, origin: PlaceOfKey) -> dict[str, Any]:
    """A `model` section with its `preset` or `hf_config` replaced by what they stand for; keys beside them win.

    ``base``: folder that a relative `hf_config` starts from. ``origin``: where a key was written, for `InputError`.
    """
    section = {key: value for key, value in section.items() if value is not None}
    fields = {key: value for key, value in section.items() if key not in ("preset", "hf_config")}
    if "preset" in section and "hf_config" in section:
        file, key = origin("model.hf_config")
        raise InputError("give either a preset or hf_config", file=file, key=key, found=brief(section["hf_config"]))
    if "preset" in section:
        name = section["preset"]
        if not isinstance(name, str) or name not in presets():
            near = closest(name, presets())
            file, key = origin("model.preset")
            raise InputError(
                "no shipped model of this name",
                file=file,
                key=key,
                found=brief(name),
                allowed=", ".join(presets()),
                fix=f"preset: {near}" if near else None,
            )
        return _over({key: value for key, value in presets()[name].items() if key != "source"}, fields)
    if "hf_config" in section:
        name = section["hf_config"]
        if not isinstance(name, str):
            file, key = origin("model.hf_config")
            raise InputError("must be a path", file=file, key=key, found=brief(name))
        file, key = origin("model.hf_config")
        path = as_path(name, base=base, file=file, key=key)
        return _over(from_hugging_face(read_json(path), path), fields)
    return fields


def _over(shipped: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """``shipped`` with ``fields`` laid over it, key by key inside sections such as ``moe`` too."""
    merged = dict(shipped)
    for key, value in fields.items():
        inside = merged.get(key)
        merged[key] = {**inside, **value} if isinstance(inside, Mapping) and isinstance(value, Mapping) else value
    return merged


#: model_type -> what its configuration class assumes where config.json is silent (transformers 4.57,
#: `models/*/configuration_*.py`), as far as it matters here.
_SUPPORTED: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 4096},
    "qwen2": {"tie_word_embeddings": False, "use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"tie_word_embeddings": False, "use_sliding_window": False, "max_window_layers": 28},
    "gpt2": {"tie_word_embeddings": True},
    "mixtral": {"tie_word_embeddings": False, "sliding_window": None},
    "qwen3_moe": {
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "decoder_sparse_step": 1,
    },
    "deepseek_v2": {"tie_word_embeddings": False, "moe_layer_freq": 1, "first_k_dense_replace": 0},
    "deepseek_v3": {"tie_word_embeddings": False, "moe_layer_freq": 1, "first_k_dense_replace": 3},
}
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
_PLAIN = {"gelu": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}


def from_hugging_face(config: Mapping[str, Any], file: object) -> dict[str, Any]:
    """Return the keys of a workload's `model` that a Hugging Face ``config`` means.

    Left out are biases of the query, key and value projections alone (Qwen2), and biases of a choice of experts
    (DeepSeek-V3). They are less than a ten-thousandth of the parameters. Stretched rotary embeddings
    cost what plain ones do. ``topk_group`` limits the groups of experts that a token may choose from. A group is a node
    in some layouts only, so that ``moe.node_limit`` does not follow from it.

    Raises `InputError`, naming the key, for what the simulator does not model: sliding windows in some layers,
    biases of attention alone, quantised weights, other architectures. Keys of other architectures are refused too.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _SUPPORTED:
        raise InputError(
            "this architecture is not supported",
            file=file,
            key="model_type",
            found=brief(kind),
            allowed=", ".join(_SUPPORTED),
        )
    _refuse_foreign(config, kind, file)
    # DeepSeek-V3 has fp8 weights because it was trained with fp8 products (arXiv 2412.19437, section 3.3).
    if config.get("quantization_config") and kind != "deepseek_v3":
        raise InputError("quantised weights are not trained", file=file, key="quantization_config")
    config = _SUPPORTED[kind] | dict(config)
    return _gpt2(config, file) if kind == "gpt2" else _llama(config, file)


def _llama(config: Mapping[str, Any], file: object) -> dict[str, Any]:
    if config.get("attention_dropout"):
        key, message = "attention_dropout", "dropout of attention alone is not supported"
        raise InputError(message, file=file, key=key, found=config[key])
    fields = {
        "layers": _required(config, "num_hidden_layers", file),
        "hidden": _required(config, "hidden_size", file),
        "heads": _required(config, "num_attention_heads", file),
        "ffn_hidden": _required(config, "intermediate_size", file),
        "vocab": _required(config, "vocab_size", file),
        "activation": _activation(config, "hidden_act", _GATED, file),
        "norm": "rmsnorm",
        "position": "rope",
        "bias": _bias(config, file),
        "tied_embeddings": config["tie_word_embeddings"],
    }
    if config["model_type"] in _HEAD_NORMS:
        fields["qk_norm"] = True
    if config.get("kv_lora_rank"):
        same = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        fields["mla"] = {key: config[key] for key in same if config.get(key) is not None}
    else:
        same_name = {"kv_heads": config.get("num_key_value_heads"), "head_dim": config.get("head_dim")}
        fields |= {key: value for key, value in same_name.items() if value is not None}
    if (window := _window(config, file)) is not None:
        fields["sliding_window"] = window
    if config.get("num_nextn_predict_layers"):
        fields["mtp_layers"] = config["num_nextn_predict_layers"]
    moe = _EXPERTS[config["model_type"]](config, file) if config["model_type"] in _EXPERTS else {}
    return fields | ({"moe": moe} if moe else {})


def _mixtral(config: Mapping[str, Any], file: object) -> dict[str, Any]:
    return {
        "experts": _required(config, "num_local_experts", file),
        "top_k": _required(config, "num_experts_per_tok", file),
        "ffn_hidden": _required(config, "intermediate_size", file),
    }


def _qwen3_moe(config: Mapping[str, Any], file: object) -> dict[str, Any]:
    """Layers whose number, counted from 1, divides by ``decoder_sparse_step`` have experts, but for
    ``mlp_only_layers``, which are understood at the model's beginning."""
    dense, step = config.get("mlp_only_layers") or [], config["decoder_sparse_step"]
    if dense != list(range(len(dense))):
        raise InputError(
            "dense layers elsewhere than at the beginning are not supported",
            file=file,
            key="mlp_only_layers",
            found=brief(dense),
        )
    first = next(layer for layer in range(len(dense), len(dense) + step) if (layer + 1) % step == 0)
    return {
        "experts": _required(config, "num_experts", file),
        "top_k": _required(config, "num_experts_per_tok", file),
        "ffn_hidden": _required(config, "moe_intermediate_size", file),
    } | _spacing(first, step)


def _deepseek(config: Mapping[str, Any], file: object) -> dict[str, Any]:
    """Return the experts of DeepSeek's layers; none where ``n_routed_experts`` is null.

    From layer ``first_k_dense_replace`` on, layers whose number divides by ``moe_layer_freq`` have experts."""
    if config.get("n_routed_experts") is None:
        return {}
    step = config["moe_layer_freq"]
    fields = {
        "experts": config["n_routed_experts"],
        "top_k": _required(config, "num_experts_per_tok", file),
        "ffn_hidden": _required(config, "moe_intermediate_size", file),
    }
    shared = {"shared_experts": config["n_shared_experts"]} if config.get("n_shared_experts") else {}
    return fields | shared | _spacing(-(-config["first_k_dense_replace"] // step) * step, step)


def _spacing(first: int, step: int) -> dict[str, int]:
    return ({"first_dense_layers": first} if first else {}) | ({"every": step} if step > 1 else {})


#: Architectures that norm each head of queries and keys.
_HEAD_NORMS = ("qwen3", "qwen3_moe")
#: model_type -> what its config.json says of experts.
_EXPERTS = {"mixtral": _mixtral, "qwen3_moe": _qwen3_moe, "deepseek_v2": _deepseek, "deepseek_v3": _deepseek}


#: Key of config.json -> the architectures whose configuration class reads it (transformers 4.57); all others drop it.
_READ_BY: dict[str, Collection[str]] = {
    "num_local_experts": _EXPERTS,
    "num_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "kv_lora_rank": _EXPERTS,
    "sliding_window": ("mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"),
    "attention_bias": ("llama", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
    "mlp_bias": ("llama", "deepseek_v2"),
}


def _refuse_foreign(config: Mapping[str, Any], kind: str, file: object) -> None:
    """Raise `InputError` for a key that has an effect in other architectures, and none in this one."""
    for key, kinds in _READ_BY.items():
        unused = key == "sliding_window" and not config.get("use_sliding_window", True)
        if kind not in kinds and config.get(key) and not unused:
            message = f"is not known of the architecture {kind}"
            raise InputError(message, file=file, key=key, found=brief(config[key]))


def _bias(config: Mapping[str, Any], file: object) -> bool:
    """Return whether linear layers have biases: those of attention and of the MLP, or none."""
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if attention != mlp:
        key, where = ("attention_bias", "attention") if attention else ("mlp_bias", "the MLP")
        raise InputError(
            f"biases of {where} alone are not supported",
            file=file,
            key=key,
            found=config[key],
            fix="false: such biases are less than a thousandth of the parameters",
        )
    return attention


def _window(config: Mapping[str, Any], file: object) -> Any:
    """The sliding window, where the model uses one: in all layers, or (Qwen) in those from ``max_window_layers`` on."""
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", True):
        return None
    if config.get("max_window_layers") or len(set(config.get("layer_types") or ())) > 1:
        raise InputError(
            "sliding windows in some of the layers are not supported",
            file=file,
            key="sliding_window",
            found=window,
            fix="null, where the sequence is no longer than the window",
        )
    return window


def _gpt2(config: Mapping[str, Any], file: object) -> dict[str, Any]:
    dropouts = [config.get(key, 0.1) for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")]
    if dropouts[1:] != dropouts[:-1]:
        raise InputError(
            "different dropouts are not supported",
            file=file,
            key="embd_pdrop, attn_pdrop, resid_pdrop",
            found=brief(dropouts),
        )
    fields = {
        "layers": _required(config, "n_layer", file),
        "hidden": _required(config, "n_embd", file),
        "heads": _required(config, "n_head", file),
        "vocab": _required(config, "vocab_size", file),
        "activation": _activation(
            {"activation_function": "gelu_new"} | dict(config), "activation_function", _PLAIN, file
        ),
        "norm": "layernorm",
        "position": "learned",
        "bias": True,
        "tied_embeddings": config["tie_word_embeddings"],
        "dropout": dropouts[0],
    }
    return fields | ({"ffn_hidden": config["n_inner"]} if config.get("n_inner") else {})


def _required(config: Mapping[str, Any], key: str, file: object) -> Any:
    if config.get(key) is None:
        raise InputError("a required key is missing", file=file, key=key)
    return config[key]


def _activation(config: Mapping[str, Any], key: str, names: Mapping[str, str], file: object) -> str:
    value = _required(config, key, file)
    if not isinstance(value, str) or value not in names:
        raise InputError("unknown activation", file=file, key=key, found=brief(value), allowed=", ".join(names))
    return names[value]
