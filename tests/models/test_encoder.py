"""Encoders of images in front of a text model: weights, FLOPs, what is kept, and where they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator import models
from simulator.api import run
from simulator.cli.app import main
from simulator.config import Workload, load_workload
from simulator.config.hugging_face import from_hugging_face
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.input_files import read_yaml
from simulator.models import Part
from simulator.output.summary import opening
from simulator.program import Attention, kernels_of
from simulator.units import format_encoder
from tests.support.jobs import job
from tests.support.pattern_models import ENCODER, LLAMA
from tests.support.unadvised import without_advice  # noqa: F401

MODELS = read_yaml(Path(__file__).parents[1] / "config" / "huggingface_models.yaml")
#: Sections `vision_config` of config.json files on huggingface.co, as far as they decide sizes.
QWEN = {
    **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3, "patch_size": 14},
    **{"out_hidden_size": 3584, "spatial_merge_size": 2, "window_size": 112, "temporal_patch_size": 2},
    "fullatt_block_indexes": [7, 15, 23, 31],
}
GEMMA = {
    **{"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304},
    **{"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False},
}
LLAMA4 = {
    **{"model_type": "llama4_vision_model", "hidden_size": 1408, "image_size": 336, "intermediate_size": 5632},
    **{"num_attention_heads": 16, "num_hidden_layers": 34, "patch_size": 14, "pixel_shuffle_ratio": 0.5},
    **{"projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096},
}
#: Model -> its type, its text model in the table of models, its tower, and the parameters of transformers 5.24's class.
FILES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "Qwen/Qwen2.5-VL-7B-Instruct": ("qwen2_5_vl", "Qwen/Qwen2.5-7B", QWEN, 8292166656),
    "google/gemma-3-4b-pt": ("gemma3", "google/gemma-3-4b-pt", GEMMA, 4300079472),
    "meta-llama/Llama-4-Scout-17B-16E": ("llama4", "meta-llama/Llama-4-Scout-17B-16E", LLAMA4, 108641793536),
}


def workload(**more: Any) -> Workload:
    model = LLAMA | {"encoder": ENCODER | more.pop("encoder", {})}
    return load_workload(job(**{"model": model, **more}))


def test_the_summary_and_check_name_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Images and patches decide the encoder's work, so that the head says them beside its layers."""
    data = job(model=LLAMA | {"encoder": ENCODER})
    (tmp_path / "job.json").write_text(json.dumps(data))
    words = format_encoder(ENCODER["layers"], ENCODER.get("images", 1), ENCODER["patches_per_image"])
    head = " ".join(opening(run(data).report).split())
    assert f"parameters, with {words}, " in head
    with pytest.raises(SystemExit, match="0"):
        main(["check", str(tmp_path / "job.json")])
    assert words in " ".join(capsys.readouterr().out.split())
    assert "encoder" not in opening(run(job()).report)


def config_of(name: str) -> dict[str, Any]:
    kind, text, tower, _ = FILES[name]
    return {"model_type": kind, "text_config": MODELS[text]["config"], "vision_config": tower}


@pytest.mark.parametrize("name", FILES)
def test_towers_of_published_models_have_every_parameter(name: str) -> None:
    """How many patches an image of Qwen2.5-VL has is for the workload to say."""
    fields = from_hugging_face(config_of(name), name)
    fields["encoder"].setdefault("patches_per_image", 1024)
    fields |= {"vocab_multiple": 1}
    ours = load_workload(job(model=fields, training={"seq": 2048, "global_batch": 16}))
    assert models.parameters(ours) == FILES[name][3]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_transformers_counts_the_same(name: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = config_of(name)
    text = config["text_config"] | {"model_type": from_text(config["model_type"])}
    tied = text.get("tie_word_embeddings", True)
    keys = {"text_config": text, "vision_config": config["vision_config"], "tie_word_embeddings": tied}
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(
            transformers.AutoConfig.for_model(config["model_type"], **keys)
        )
    assert sum(tensor.numel() for tensor in theirs.parameters()) == FILES[name][3]


def from_text(kind: str) -> str:
    """The type that transformers gives the text model of a model of this kind."""
    return "qwen2_5_vl_text" if kind == "qwen2_5_vl" else f"{kind}_text"


def encoder_parts(**more: Any) -> tuple[Part, ...]:
    """The parts of the first stage before the embedding."""
    parts = models.stage_parts(workload(**more), 0)
    return parts[: [part.name for part in parts].index("embedding")]


def test_the_encoder_stands_before_the_embedding() -> None:
    """Patches have 48 values. A layer has 4 x 128 x 128 and 2 x 128 x 256, with biases and LayerNorms.
    Four patches side by side become 512 wide, then 256 as the text model is."""
    assert [part.name for part in encoder_parts()] == ["encoder input", "encoder", "encoder", "encoder projection"]
    counts = [sum(weight.whole_elements for weight in part.weights) for part in encoder_parts()]
    layer = 4 * 128 * 128 + 4 * 128 + 2 * 128 * 256 + 256 + 128 + 4 * 128
    assert counts == [48 * 128, layer, layer, 128 + 512 * 512 + 512 * 256]


def test_rows_see_their_window_or_their_image_and_later_rows_too() -> None:
    """128 rows of 2 images: 8 windows of 16, then 2 images of 64; all pairs of each."""
    kernels = [one.kernel for part in encoder_parts() for op in part.forward for one in kernels_of(op)]
    attention = [kernel for kernel in kernels if isinstance(kernel, Attention)]
    assert [(one.batch, one.q_len, one.pairs) for one in attention] == [(8, 16, 16 * 16), (2, 64, 64 * 64)]


def test_a_layer_keeps_what_one_of_the_text_model_would_for_as_many_rows() -> None:
    """Two images have 128 rows. A row keeps in bf16 128 numbers for each of: inputs of blocks, both norms, queries,
    keys, values, the context. To these come 256 before and behind GELU, and in fp32 a statistic of each of 4 heads."""
    _, layer, *_ = encoder_parts()
    assert layer.saved_bytes == 128 * (2 * 128 * (2 + 2 + 3 + 1) + 2 * 2 * 256 + 4 * 4)


def test_what_the_text_model_alone_has_changes_no_layer_of_the_encoder() -> None:
    """Gemma 4's E2B gives layers a part of a second embedding, and its last ones the keys of others."""
    special = {
        **{"layer_inputs": {"width": 64, "vocab": 1024}, "reused_keys": {"layers": 2}},
        **{"qk_norm": True, "norm_place": "both", "logit_softcap": 30.0, "attention_gate": True, "value_norm": True},
    }
    plain = load_workload(job(model=LLAMA | {"encoder": ENCODER}))
    other = load_workload(job(model=LLAMA | {"encoder": ENCODER} | special))
    before = [models.stage_parts(one, 0)[:3] for one in (plain, other)]
    assert [part.name for part in before[0]] == ["encoder input", "encoder", "encoder"]
    assert before[0] == before[1]


def test_flops_count_rows_of_images_beside_tokens() -> None:
    """128 patches of a sequence meet 48 x 128 weights, 128 rows two layers and their attention, and 32 tokens the
    projection. Backward takes twice as many."""
    plain = load_workload(job(model=LLAMA))
    layer = 4 * 128 * 128 + 2 * 128 * 256
    attended = 2 * 128 * (16 + 64) * 128
    sequence = 128 * 48 * 128 + 128 * 2 * layer + attended + 32 * (512 * 512 + 512 * 256)
    added = models.model_flops_per_step(workload()) - models.model_flops_per_step(plain)
    assert added == 3 * 2 * 16 * sequence


@pytest.mark.usefixtures("without_advice")
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "pp": 2},
        {"zero": 3, "dp": 4},
        {"pp": 2, "schedule": "zb_h1", "dp": 2},
        {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    ],
)
def test_encoders_play_in_all_kinds_of_layouts(layout: dict[str, Any]) -> None:
    """The first stage has more to do, so that a step takes longer than without an encoder."""
    played = run(workload(parallelism=layout))
    check(played.program, played.played)
    plain = run(load_workload(job(model=LLAMA, parallelism=layout)))
    assert played.to_dict()["step_time_s"] > plain.to_dict()["step_time_s"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder": {"images": 9}}, "training.seq: 144 tokens of images are more than a sequence has"),
        ({"encoder": {"heads": 3}}, "model.encoder.heads: does not divide hidden 128"),
        (
            {"encoder": {"patches_per_token": 3}},
            "model.encoder.patches_per_token: does not divide patches_per_image 64",
        ),
        ({"encoder": {"global_layers": [0, 2]}}, "model.encoder.global_layers: the encoder has no layer 2"),
        ({"parallelism": {"tp": 8}}, "parallelism.tp: does not divide model.encoder.heads 4"),
        ({"parallelism": {"cp": 2}}, "parallelism.cp: images are not spread"),
        ({"framework": "torchtitan"}, "model.encoder: "),
    ],
)
def test_what_an_encoder_cannot_be_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        workload(**change)
