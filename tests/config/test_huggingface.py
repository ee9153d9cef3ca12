"""Hugging Face's config.json as a model; what is not modelled is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator.config import load_workload, presets
from simulator.config.hugging_face import from_hugging_face
from simulator.errors import InputError
from simulator.input_files import read_json

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "tie_word_embeddings": False,
}
#: What MiMo-V2-Flash's config.json says, with fewer layers.
MIMO: dict[str, Any] = {
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 6,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "intermediate_size": 16384,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 152576,
    "tie_word_embeddings": False,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257}
#: What Mixtral 8x7B's, Qwen3-235B-A22B's and DeepSeek-V3's config.json say beside what a llama's does.
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "sliding_window": None,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8"},
}


@pytest.mark.parametrize(
    ("name", "config"), [("mixtral-8x7b", MIXTRAL), ("qwen3-235b-a22b", QWEN), ("deepseek-v3", DEEPSEEK)]
)
def test_models_with_experts_are_the_presets_of_their_names(name: str, config: dict[str, Any]) -> None:
    preset = {key: value for key, value in presets()[name].items() if key != "source"}
    assert from_hugging_face(LLAMA | config, "config.json") == preset


#: Gemma 2's and Nemotron-H's, as far as it matters here.
GEMMA: dict[str, Any] = {"model_type": "gemma2", "sliding_window": 4096, "head_dim": 256}
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "head_dim": 128,
    "hybrid_override_pattern": "M-M*",
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
    "mlp_hidden_act": "relu2",
}


@pytest.mark.parametrize(
    ("changes", "key", "pattern"),
    [
        # Counted from 0, every second layer is global, beginning with the second.
        (GEMMA, "mixers", ["window", "attention"]),
        # A list of the file wins over the class's own rule.
        (GEMMA | {"layer_types": ["full_attention"] * 16 + ["sliding_attention"] * 16}, "mixers", None),
        # From layer 28 of 32 on.
        (
            {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True},
            "mixers",
            ["attention"] * 28 + ["window"] * 4,
        ),
        # Llama 4: every fourth layer has no positions, and sees all tokens.
        (
            {
                "model_type": "llama4_text",
                "intermediate_size_mlp": 8192,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
            },
            "mixers",
            ["chunked", "chunked", "chunked", "no_rope"],
        ),
        # Layer 3 alone is dense: no rule of first layers and steps says so.
        (QWEN | {"mlp_only_layers": [3]}, "mlps", ["moe"] * 3 + ["dense"] + ["moe"] * 90),
        (NEMOTRON, "mixers", ["mamba2", "none", "mamba2", "attention"]),
        (NEMOTRON, "mlps", ["none", "dense", "none", "none"]),
    ],
)
def test_layers_by_pattern(changes: dict[str, Any], key: str, pattern: list[str] | None) -> None:
    expected = ["attention"] * 16 + ["window"] * 16 if pattern is None else pattern
    assert from_hugging_face(LLAMA | changes, "config.json")[key] == expected


@pytest.mark.parametrize(
    ("config", "first", "every"),
    [
        (DEEPSEEK | {"moe_layer_freq": 2}, 4, 2),  # from layer 3 on, those that divide by 2: 4, 6 ...
        (QWEN | {"decoder_sparse_step": 2}, 1, 2),  # counted from 1, those that divide by 2: from 0, 1, 3 ...
        (QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}, 3, 2),
        (QWEN | {"mlp_only_layers": [0]}, 1, 1),
    ],
)
def test_spacing_of_layers_with_experts(config: dict[str, Any], first: int, every: int) -> None:
    moe = from_hugging_face(LLAMA | config, "config.json")["moe"]
    assert (moe.get("first_dense_layers", 0), moe.get("every", 1)) == (first, every)


def test_llama_3_8b_is_the_preset_of_that_name() -> None:
    preset = {key: value for key, value in presets()["llama3-8b"].items() if key != "source"}
    assert from_hugging_face(LLAMA, "config.json") == preset


def test_gpt2_is_the_preset_of_that_name_with_its_dropout(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    rest = {"training": {"seq": 1024, "global_batch": 8}, "cluster": "dgx_a100"}
    (tmp_path / "w.yaml").write_text(json.dumps({"model": {"hf_config": "config.json"}, **rest}))
    job = load_workload(tmp_path / "w.yaml")  # the path is looked for beside the workload file
    assert job.model == load_workload({"model": {"preset": "gpt2-1.5b", "dropout": 0.1}, **rest}).model
    (tmp_path / "w.yaml").write_text(
        json.dumps({"model": {"hf_config": "config.json", "layers": 2, "dropout": 0}, **rest})
    )
    changed = load_workload(tmp_path / "w.yaml").model
    assert (changed.layers, changed.dropout, changed.hidden) == (2, 0.0, 1600)


def test_qwen3_keeps_its_own_head_dim_and_its_unused_window() -> None:
    config = LLAMA | {"model_type": "qwen3", "head_dim": 128, "hidden_size": 1024, "sliding_window": 4096}
    fields = from_hugging_face(config | {"use_sliding_window": False}, "config.json")
    assert (fields["head_dim"], fields["hidden"]) == (128, 1024)


def test_biases_are_of_all_linear_layers_or_of_none() -> None:
    assert from_hugging_face(LLAMA | {"attention_bias": True, "mlp_bias": True}, "config.json")["bias"]


@pytest.mark.parametrize(
    ("changes", "biases"),
    [
        ({"attention_bias": True}, ["qkv", "o"]),
        ({"mlp_bias": True}, ["mlp"]),
        ({"model_type": "qwen2"}, ["qkv"]),  # its class has no key for them
        ({"model_type": "qwen3", "attention_bias": True}, ["qkv", "o"]),
    ],
)
def test_biases_of_some_layers_are_named(changes: dict[str, Any], biases: list[str]) -> None:
    fields = from_hugging_face(LLAMA | changes, "config.json")
    assert fields["biases"] == biases
    assert "bias" not in fields


def test_a_window_that_llama_does_not_use_is_let_be() -> None:
    """Null, and one that the file itself turns off."""
    for window in ({"sliding_window": None}, {"sliding_window": 4096, "use_sliding_window": False}):
        assert from_hugging_face(LLAMA | window, "config.json") == from_hugging_face(LLAMA, "config.json")


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"model_type": "mixtral"}, "num_local_experts", "missing"),
        (DEEPSEEK | {"num_experts_per_tok": None}, "num_experts_per_tok", "missing"),
        (DEEPSEEK | {"kv_lora_rank": None}, "kv_lora_rank", "missing"),
        (DEEPSEEK | {"n_group": 7}, "n_group", "does not divide the 256 experts"),
        (DEEPSEEK | {"num_experts_per_tok": 300}, "num_experts_per_tok", "1 to 256"),
        ({"model_type": "bert"}, "model_type", "gpt2, llama, mistral"),
        ({"model_type": None}, "model_type", "not supported"),
        ({"hidden_act": "relu2"}, "hidden_act", "silu"),
        ({"attention_dropout": 0.1}, "attention_dropout", "alone"),
        ({"sliding_window": 4096}, "sliding_window", "not known of the architecture llama"),
        (DEEPSEEK | {"sliding_window": 4096}, "sliding_window", "not known of the architecture deepseek_v3"),
        (GPT2 | {"sliding_window": 512}, "sliding_window", "not known of the architecture gpt2"),
        (DEEPSEEK | {"attention_bias": True}, "attention_bias", "biases of latent attention alone"),
        (GEMMA | {"attn_logit_softcapping": None, "layer_types": ["hyena"]}, "layer_types", "hyena"),
        (LLAMA | {"layer_types": ["sliding_attention"]}, "layer_types", "not known of the architecture llama"),
        (LLAMA | {"model_type": "smollm3", "layer_types": ["linear_attention"]}, "layer_types", "linear_attention"),
        (LLAMA | {"model_type": "qwen2_moe", "layer_types": ["chunked_attention"]}, "layer_types", "chunked"),
        (DEEPSEEK | {"model_type": "deepseek_v32", "layer_types": ["full_attention"]}, "layer_types", "attention"),
        (QWEN | {"model_type": "qwen3", "layer_types": 3}, "layer_types", "must be a list"),
        (
            {"model_type": "deepseek_v4", "moe_intermediate_size": 64, "compress_ratios": [0, 7]},
            "compress_ratios",
            "0, 4 and 128",
        ),
        (DEEPSEEK | {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared"]}, "indexer_types", "share"),
        (NEMOTRON | {"moe_latent_size": 1024}, "moe_latent_size", "narrower"),
        (NEMOTRON | {"hybrid_override_pattern": "M-Q"}, "hybrid_override_pattern", "Q"),
        (LLAMA | {"model_type": "phi3", "resid_pdrop": 0.1}, "resid_pdrop", "alone"),
        (LLAMA | {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input", "architecture llama"),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias", "not known of the architecture qwen3"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias", "not known of the architecture mistral"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "quantised"),
        ({"hidden_size": None}, "hidden_size", "missing"),
    ],
)
def test_what_is_not_modelled_is_refused_with_the_reason(changes: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        from_hugging_face(LLAMA | changes, "config.json")
    assert str(caught.value).startswith(f"config.json: {key}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"model_type": "mistral"}, 4096),  # what its class assumes where the file is silent
        ({"model_type": "mistral", "sliding_window": 2048}, 2048),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 4096}, None),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 0}, 512),
    ],
)
def test_windows_are_those_that_the_model_uses(changes: dict[str, Any], window: int | None) -> None:
    assert from_hugging_face(LLAMA | changes, "config.json").get("sliding_window") == window


def test_different_dropouts_are_refused() -> None:
    with pytest.raises(InputError, match="different dropouts"):
        from_hugging_face(GPT2 | {"attn_pdrop": 0.0}, "config.json")


def test_a_config_that_is_not_there_names_key_and_folders(tmp_path: Path) -> None:
    """A relative path starts in the folder of the workload file, or in the current one; a whole one nowhere else."""
    rest = {"training": {"seq": 8, "global_batch": 8}, "cluster": "dgx_a100"}
    for path, allowed in (
        ("no/config.json", f"a path that starts in {tmp_path.resolve()} or {Path().resolve()}"),
        (str(tmp_path / "none.json"), "the path of a config.json"),
    ):
        (tmp_path / "w.yaml").write_text(json.dumps({"model": {"hf_config": path}, **rest}))
        with pytest.raises(InputError, match="no such file") as refused:
            load_workload(tmp_path / "w.yaml")
        assert (refused.value.key, refused.value.found, refused.value.allowed) == ("model.hf_config", path, allowed)
        assert refused.value.file == str(tmp_path / "w.yaml")


def test_a_broken_config_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama",\n "hidden_size": }')
    model = {"hf_config": str(tmp_path / "config.json")}
    with pytest.raises(InputError, match=r"config\.json: line 2, column 17"):
        load_workload({"model": model, "training": {"seq": 8, "global_batch": 8}, "cluster": "dgx_a100"})


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """As in YAML: which of two sizes is meant cannot be said."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2", "n_layer": 12, "n_layer": 24}')
    with pytest.raises(InputError, match="duplicate key 'n_layer'"):
        read_json(path)


def test_layers_that_are_all_plain_attention_may_be_listed() -> None:
    """Transformers writes the list into files of architectures that have no other kind."""
    plain = from_hugging_face(LLAMA, "config.json")
    assert from_hugging_face(LLAMA | {"layer_types": ["full_attention"] * 32}, "config.json") == plain


def test_layers_of_mimo_with_a_window_have_the_sizes_that_the_file_says() -> None:
    """Transformers doubles the heads of keys; a file's own ``swa_...`` keys and pattern count before that.

    A ``sliding_window_size`` of 128 counts the tokens before the query, so that 129 are attended to.
    """
    silent = from_hugging_face(MIMO, "config.json")
    assert silent["window_heads"] == {"kv_heads": 8}
    assert silent["mixers"] == ["attention", "window", "window", "window", "window", "attention"]
    sizes = {"swa_num_attention_heads": 32, "swa_num_key_value_heads": 16, "swa_head_dim": 96, "swa_v_head_dim": 64}
    pattern = {"hybrid_layer_pattern": [0, 1, 0, 1, 0, 1], "sliding_window": 128, "sliding_window_size": 128}
    stated = from_hugging_face({**MIMO, **sizes, **pattern}, "config.json")
    assert stated["window_heads"] == {"heads": 32, "kv_heads": 16, "head_dim": 96, "v_head_dim": 64}
    assert stated["mixers"] == ["attention", "window"]
    assert stated["sliding_window"] == 129
    assert "window_heads" not in from_hugging_face({**MIMO, "hybrid_layer_pattern": [0] * 6}, "config.json")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (MIMO | {"hybrid_layer_pattern": [0, 1, 2, 1, 0, 1]}, "hybrid_layer_pattern"),
        (MIMO | {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern"),
        (MIMO | {"add_swa_attention_sink_bias": False, "add_full_attention_sink_bias": True}, "add_full"),
        (LLAMA | {"swa_head_dim": 64}, "swa_head_dim"),
    ],
)
def test_sizes_of_layers_with_a_window_are_not_ignored(config: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as refused:
        from_hugging_face(config, "config.json")
    assert str(refused.value.key).startswith(key)
