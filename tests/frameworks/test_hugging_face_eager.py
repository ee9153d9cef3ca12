"""Attention in steps, gpt-oss, Gemma 2 and fp32 under Hugging Face: kernels counted by hand in transformers' source."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from simulator import models
from simulator.config import load_workload
from simulator.config.loading import check_products
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.errors import InputError
from simulator.frameworks import hugging_face_gpt_oss
from simulator.models.vocabulary import embedding, head
from simulator.program import Attention, Compute, Matmul, Memory
from tests.support.hugging_face import FIRST, HEADS, LLAMA, MIXTRAL, SEQ, TOKENS, load

MEASURED = Path(__file__).parents[2] / "calibration" / "measurements" / "eager-kernels.csv"
STEPS = LLAMA | {"attention": "unfused"}
GEMMA_2: dict[str, Any] = LLAMA | {
    "activation": "geglu",
    "norm_place": "both",
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
}
GPT_OSS: dict[str, Any] = {key: value for key, value in MIXTRAL.items() if key != "bias"} | {
    "attention": "unfused",
    "attention_sinks": True,
    "biases": ["qkv", "o", "experts", "router"],
    "sliding_window": 4,
    "mixers": ["window"],
}
SCORES = 2 * TOKENS * SEQ * HEADS  # bytes of all scores of a layer in 16 bits: of each token and head a row of SEQ


def kernels(model: dict[str, Any], kind: str, **job: Any) -> dict[str, Any]:
    """Return kernels of a layer's pass by name."""
    part = models.layer(load(model, **job), turn=FIRST)
    return {op.name: op.kernel for op in part.ops(kind) if isinstance(op, Compute)}


def kept(model: dict[str, Any], **job: Any) -> dict[str, float]:
    """Return what a layer keeps, by name."""
    return {tensor.name: tensor.nbytes for tensor in models.layer(load(model, **job), turn=FIRST).saved}


def test_softmax_of_attention_in_steps_is_in_fp32() -> None:
    """Scaled, masked, cast, a softmax over rows of fp32, and cast back; autograd keeps both types."""
    forward = kernels(STEPS, "F")
    steps = [name for name in forward if re.fullmatch(r"attn\.(scale|mask|upcast|softmax|cast)", name)]
    assert steps == ["attn.scale", "attn.mask", "attn.upcast", "attn.softmax", "attn.cast"]
    softmax = forward["attn.softmax"]
    assert (softmax.op, softmax.width) == ("softmax_fp32", SEQ)
    assert softmax.write_bytes == 2 * SCORES
    names = kept(STEPS)
    assert (names["attn.probs fp32"], names["attn.probs"]) == (2 * SCORES, SCORES)


def test_heads_are_copied_element_by_element() -> None:
    """``repeat_kv`` expands and copies: elements bound it, so that each counts as read. So does the copy that puts a
    token's heads side by side."""
    forward = kernels(STEPS, "F")
    for name in ("attn.repeat k", "attn.repeat v", "attn.context transpose"):
        assert forward[name].op == "rope"
        assert forward[name].read_bytes == forward[name].write_bytes


def test_caps_are_three_kernels_of_attention_in_steps_and_none_of_a_fused_one() -> None:
    """``scaled_dot_product_attention`` is not told of them."""
    eager = kernels(GEMMA_2 | {"attention": "unfused"}, "F")
    assert [name for name in eager if "cap" in name] == ["attn.cap divide", "attn.cap tangent", "attn.cap times"]
    assert kept(GEMMA_2 | {"attention": "unfused"})["attn.capped"] == SCORES
    (fused,) = (kernel for kernel in kernels(GEMMA_2, "F").values() if isinstance(kernel, Attention))
    assert not fused.softcap


def test_logits_are_capped_by_three_kernels_each_way() -> None:
    """Divided, their tangent, multiplied; back in the other order."""
    part = head(load(GEMMA_2))
    capped = [op.name for kind in "FB" for op in part.ops(kind) if isinstance(op, Compute) and "softcap" in op.name]
    assert [name.removeprefix("head.softcap") for name in capped] == [
        " divide",
        "",
        " times",
        " times bwd",
        " bwd",
        " divide bwd",
    ]


def test_sinks_lengthen_rows_by_one() -> None:
    """Products of such rows, forward and of the values' gradient, start rows at odd places. Their weight is a number
    for each head."""
    forward, backward = kernels(GPT_OSS, "F"), kernels(GPT_OSS, "B")
    assert [forward[f"attn.{name}"].op for name in ("sinks join", "softmax")] == ["join_odd", "softmax_odd"]
    assert forward["attn.softmax"].width == SEQ + 1
    context, values = forward["attn.context"], backward["attn.context dgrad v"]
    assert isinstance(context, Matmul)
    assert (context.k, values.m) == (SEQ + 1, SEQ + 1)
    part = models.layer(load(GPT_OSS), turn=FIRST)
    assert {weight.name: weight.shape for weight in part.weights}["attention.sinks"] == (HEADS,)
    assert kept(GPT_OSS)["attn.probs"] == SCORES


def test_biases_of_experts_are_taken_by_an_index() -> None:
    """Rows of biases are gathered and added to what either product gives. Gradients add up the rows of each expert one
    after another, so that those of the busiest one count: tokens x 2 choices over 4 experts, all alike."""
    forward, backward = kernels(GPT_OSS, "F"), kernels(GPT_OSS, "B")
    assert [name for name in forward if "bias" in name] == [
        "moe.fc1 bias rows",
        "moe.fc1 bias",
        "moe.fc2 bias rows",
        "moe.fc2 bias",
    ]
    for name in ("moe.fc1 bias grad", "moe.fc2 bias grad"):
        assert isinstance(backward[name], Memory)
        assert (backward[name].op, backward[name].elements) == ("index_rows", TOKENS * 2 / 4)


def test_gpt_oss_has_a_gate_of_its_own() -> None:
    """Gate and up are clamped, and alternate in a row; what Mixtral's experts have is another."""
    assert "moe.swiglu gate clamp" in kernels(GPT_OSS, "F")
    assert "moe.swiglu gate clamp" not in kernels(MIXTRAL, "F")
    assert len(hugging_face_gpt_oss.GATED.backward) == 20


def test_masks_of_attention_in_steps_are_made_for_all_layers() -> None:
    """Two kernels for all tokens before. A window has two comparisons more, and its mask is another."""
    plain, window = (
        [op.name for op in embedding(load(model)).forward if isinstance(op, Compute) and op.name.startswith("mask.")]
        for model in (STEPS, STEPS | {"sliding_window": 4})
    )
    assert (len(plain), len(window)) == (2, 6)


def test_norms_in_fp32_cast_nothing() -> None:
    """Square, mean, division and weight forward. In bf16 two casts more."""
    wide = [name for name in kernels(LLAMA, "F", training={"precision": "fp32"}) if name.startswith("attn.norm.")]
    assert wide == [f"attn.norm.{name}" for name in ("square", "mean", "divide", "weight")]
    narrow = [name for name in kernels(LLAMA, "F") if name.startswith("attn.norm.")]
    assert {*narrow} - {*wide} == {"attn.norm.float", "attn.norm.cast"}


def test_grouped_queries_in_fp32_fall_back_to_steps() -> None:
    """PyTorch's fused kernel of fp32 has none. The mask is made in each layer, and one tensor of scores is kept."""
    steps = kernels(LLAMA, "F", training={"precision": "fp32"})
    assert not any(isinstance(kernel, Attention) for kernel in steps.values())
    assert "attn.mask triangle" in steps
    assert kept(LLAMA, training={"precision": "fp32"})["attn.probs"] == 2 * SCORES
    plain = kernels(LLAMA | {"kv_heads": HEADS}, "F", training={"precision": "fp32"})
    assert any(isinstance(kernel, Attention) for kernel in plain.values())


@pytest.mark.parametrize(
    ("model", "job", "key"),
    [
        (GPT_OSS | {"attention": "flash"}, {}, "model.attention"),
        (LLAMA | {"attention_softcap": 50.0}, {}, "model.attention_softcap"),
        (LLAMA | {"sliding_window": 4}, {"training": {"precision": "fp32"}}, "model.sliding_window"),
        (MIXTRAL, {"training": {"precision": "fp32"}}, "model.moe"),
        (STEPS, {"training": {"precision": "fp32"}}, "model.attention"),
    ],
)
def test_what_transformers_does_otherwise_is_refused(model: dict[str, Any], job: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"{key}: ")):
        load(model, **job)


def test_a_profile_without_these_kernels_is_refused(tmp_path: Path) -> None:
    """Fused attention does without them."""
    profile = Path(__file__).parents[2] / "calibration" / "profiles" / "h200-sxm-141gb.yaml"
    data = yaml.safe_load(profile.read_text(encoding="utf-8"))
    del data["kernels"]["memory"]["transformers"]
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(data | {"name": "own"}), encoding="utf-8")
    load(LLAMA, calibration=str(own))
    with pytest.raises(
        InputError, match=r"calibration: profile own has no kernels of transformers' attention in steps"
    ):
        load(STEPS, calibration=str(own))


#: Kernels of a layer that stand outside of attention in steps, or of its experts.
AROUND = re.compile(r"attn\.(norm|post_norm|residual|rope|proj|[qkv]( |$))|moe\.(router|input)")


def measured(case: str) -> dict[str, float]:
    """Return seconds of a module's forward and backward pass on an H200, without copies that the timing itself made."""
    seconds: dict[str, float] = defaultdict(float)
    with MEASURED.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["case"] == case and not row["kernel"].startswith(("Memcpy", "Memset")):
                seconds[row["pass"]] += 1e-6 * float(row["us"])
    return seconds


@pytest.mark.parametrize(
    ("case", "preset", "training", "part"),
    [
        ("gptoss attention b2 s2048 h64 kv8 d64", "gpt-oss-20b", {"seq": 2048, "micro_batch": 2}, "attn"),
        ("gptoss attention b1 s4096 h64 kv8 d64", "gpt-oss-20b", {"seq": 4096, "micro_batch": 1}, "attn"),
        ("gptoss experts rows4096 h2880 f2880 e32 k4", "gpt-oss-20b", {"seq": 2048, "micro_batch": 2}, "moe"),
        ("gemma2 attention b1 s4096 h8 kv4 d256", "gemma2-2b", {"seq": 4096, "micro_batch": 1}, "attn"),
    ],
)
def test_kernels_of_a_module_take_what_was_measured(
    case: str, preset: str, training: dict[str, Any], part: str
) -> None:
    """Within an eighth of all kernels of the module, both passes together; single ones differ more."""
    job = {
        "model": {"preset": preset, "layers": 2, "vocab_multiple": 1, "attention": "unfused"},
        "framework": "hugging_face",
        "training": training | {"global_batch": training["micro_batch"]},
        "cluster": "hgx_h200_8gpu",
    }
    workload = load_workload(job)
    costs = Costs.from_profile(load_profile("h200-sxm-141gb"), workload.software)
    layer = models.layer(workload, turn=FIRST, number=1)
    ops = (op for kind in "FB" for op in layer.ops(kind) if isinstance(op, Compute))
    inside = (op for op in ops if op.name.startswith(f"{part}.") and not AROUND.match(op.name))
    priced = sum(costs.kernel_s(op.kernel, costs.gpu) for op in inside)
    assert priced == pytest.approx(measured(case)["both"], rel=0.125)


@pytest.mark.parametrize("kv_heads", [HEADS, HEADS // 2])
def test_fp32_needs_kernels_of_steps_where_queries_are_grouped_alone(kv_heads: int) -> None:
    """PyTorch's fused kernels take fp32, but no grouped queries in it."""
    profile = load_profile("h200-sxm-141gb")
    memory = replace(profile.kernels.memory, transformers={})
    without = replace(profile, kernels=replace(profile.kernels, memory=memory))
    work = load(LLAMA | {"kv_heads": kv_heads}, training={"precision": "fp32"})
    if kv_heads == HEADS:
        check_products(without, work, lambda key: (None, key))
    else:
        with pytest.raises(InputError, match=r"kernels\.memory\.transformers"):
            check_products(without, work, lambda key: (None, key))
