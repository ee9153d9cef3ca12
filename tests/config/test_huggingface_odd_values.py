"""Values that no config.json should have: a sentence that names the key, and never a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from simulator.config.hugging_face import from_hugging_face
from simulator.config.hugging_face.keys import Keys
from simulator.errors import InputError
from simulator.input_files import read_yaml

_CONFIGS = [model["config"] for model in read_yaml(Path(__file__).with_name("huggingface_models.yaml")).values()]
#: Architecture -> a file of it.
TEXT = {config["model_type"]: config for config in _CONFIGS}
#: The same of models with an encoder, and its section without what has a default.
TOWERS = {
    kind: {
        "model_type": kind,
        "text_config": TEXT[text],
        "vision_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    }
    for kind, text in (("qwen2_5_vl", "qwen2"), ("gemma3", "gemma3_text"), ("llama4", "llama4_text"))
}
ODD: tuple[Any, ...] = (0, -1, 1.5, 1e-200, 10**30, "7", True, [], [[0], 4], {"a": 1}, [896, 896])


@pytest.fixture
def read_keys(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of keys that readers ask for from now on."""
    names: set[str] = set()
    get = Keys.get

    def noting(self: Keys, *asked: str, default: Any = None) -> Any:
        names.update(asked)
        return get(self, *asked, default=default)

    monkeypatch.setattr(Keys, "get", noting)
    return names


def reads_or_refuses(config: Mapping[str, Any]) -> None:
    """Read a file; anything raised but `InputError` fails the test."""
    with contextlib.suppress(InputError):
        from_hugging_face(config, "config.json")


@pytest.mark.parametrize("kind", TEXT)
def test_odd_values_of_a_text_model_are_read_or_refused(kind: str, read_keys: set[str]) -> None:
    from_hugging_face(TEXT[kind], "config.json")
    assert len(read_keys) >= 10
    for key in sorted(read_keys):
        for odd in ODD:
            reads_or_refuses(TEXT[kind] | {key: odd})


@pytest.mark.parametrize("kind", TOWERS)
def test_odd_values_of_an_encoder_are_read_or_refused(kind: str, read_keys: set[str]) -> None:
    config = TOWERS[kind]
    from_hugging_face(config, "config.json")
    for key in sorted(read_keys):
        for odd in ODD:
            reads_or_refuses(config | {key: odd})
            reads_or_refuses(config | {"vision_config": config["vision_config"] | {key: odd}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TEXT["deepseek_v4"] | {"compress_rates": [4, 128]}, "compress_rates: must be a section of keys"),
        (TEXT["deepseek_v4"] | {"mlp_bias": True}, "mlp_bias: biases of DeepSeek-V4"),
        (TEXT["qwen3"] | {"num_hidden_layers": 10**12}, "num_hidden_layers: must be a whole number"),
        (TEXT["qwen3_moe"] | {"decoder_sparse_step": 0}, "decoder_sparse_step: must be a whole number"),
        (TEXT["bamba"] | {"attn_layer_indices": 9}, "attn_layer_indices: must be a list"),
    ],
)
def test_an_odd_value_is_refused_by_its_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_hugging_face(config, "config.json")


@pytest.mark.parametrize(
    ("kind", "key", "value", "message"),
    [
        ("qwen2_5_vl", "window_size", "112", "must be a whole number"),
        ("qwen2_5_vl", "hidden_act", "gelu", "this activation of an encoder is not supported"),
        ("gemma3", "hidden_act", "relu", "this activation of an encoder is not supported"),
        ("gemma3", "image_size", [896, 896], "must be a whole number"),
        ("llama4", "pixel_shuffle_ratio", 0, "must be a number"),
    ],
)
def test_a_key_of_an_encoder_is_named_with_its_section(kind: str, key: str, value: Any, message: str) -> None:
    config = TOWERS[kind]
    with pytest.raises(InputError, match=rf"vision_config\.{key}: {message}"):
        from_hugging_face(config | {"vision_config": config["vision_config"] | {key: value}}, "config.json")


#: Lists of one layer, and of none.
SHORT: tuple[list[str], ...] = (["full_attention"], [])


@pytest.mark.parametrize("kinds", SHORT)
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2", "exaone4", "qwen3_next"])
def test_layer_types_say_something_of_every_layer(kind: str, kinds: list[str]) -> None:
    """Transformers refuses such files too; filled up they would be another model."""
    with pytest.raises(InputError, match=r"config\.json: layer_types: is of (1 layer|0 layers), and the model"):
        from_hugging_face(TEXT[kind] | {"layer_types": kinds}, "config.json")


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        ("llama4_text", "no_rope_layers", [1]),
        ("smollm3", "no_rope_layers", [1]),
        ("glm4_moe_lite", "mlp_layer_types", ["sparse"]),
        ("kimi_linear", "moe_layer_freq", [1]),
    ],
)
def test_other_lists_say_something_of_every_layer(kind: str, key: str, values: list[Any]) -> None:
    with pytest.raises(InputError, match=f"{key}: is of 1 layer, and the model"):
        from_hugging_face(TEXT[kind] | {key: values}, "config.json")


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("llama", "attention_bias"),
        ("llama", "tie_word_embeddings"),
        ("qwen3", "use_sliding_window"),
        ("qwen2_moe", "qkv_bias"),
        ("bamba", "mamba_conv_bias"),
        ("llama4_text", "use_qk_norm"),
    ],
)
def test_a_word_is_no_truth_value(kind: str, key: str) -> None:
    """Python takes "false" for true."""
    with pytest.raises(InputError, match=f"config.json: {key}: must be true or false"):
        from_hugging_face(TEXT[kind] | {key: "false"}, "config.json")


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("deepseek_v3", "v_head_dim", -128),
        ("deepseek_v3", "num_nextn_predict_layers", -1),
        ("llama", "num_key_value_heads", 0),
        ("llama", "head_dim", 0),
        ("llama", "vocab_size", 1e30),
        ("qwen3_moe", "num_experts", 0),
        ("llama", "intermediate_size", [1, 2]),
        ("mistral", "sliding_window", -4),
    ],
)
def test_a_size_out_of_range_is_told_of_its_file(kind: str, key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"config.json: {key}: must be a whole number"):
        from_hugging_face(TEXT[kind] | {key: value}, "config.json")


@pytest.mark.parametrize("key", ["rope_scaling", "text_config", "quantization_config"])
@pytest.mark.parametrize("value", ["x", []])
def test_a_section_holds_keys(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"config.json: {key}: must be a section of keys"):
        from_hugging_face(TEXT["llama"] | {key: value}, "config.json")
