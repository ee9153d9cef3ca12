"""Hugging Face's modules: their kernels counted by hand from transformers' source, what they keep, and real traces."""

from __future__ import annotations

import csv
from typing import Any

import pytest

from simulator import models
from simulator.api import run
from simulator.errors import InputError
from simulator.models.vocabulary import embedding
from simulator.program import Compute
from simulator.validation.rows import loaded, read_rows
from simulator.validation.suites import SUITES
from tests.support.exact import compare
from tests.support.hugging_face import (
    FFN,
    FIRST,
    GPT2,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    HUGGING_FACE,
    KERNELS,
    KV_HEADS,
    LLAMA,
    MIXTRAL,
    MOE,
    TOKENS,
    kinds,
    load,
)

# --- kernels of a layer ---


def test_kernels_of_a_llama_layer() -> None:
    """Seven products (q, k, v, o, gate, up, down). Forward, of the others: two norms of 6 (to fp32, square, mean,
    quotient, to bf16, weight), 5 for each of q and k to turn (cos, negated half, join, sin, sum), SiLU, the product
    with up, and two residual sums: 12 + 10 + 2 + 2 = 26.

    Backward each product twice. A norm has 11 for its input and 2 for its weight, and the sum with the gradient round
    the block: 14. To turn back takes 10: two products, a negated half, two zeroed tensors and the copies of two halves
    into them, two sums, and a copy to rows of tokens. The MLP has 3. Gradients of one input are added: of q, k and v
    twice, of gate and up once. 28 + 20 + 3 + 3 = 54.
    """
    part = models.layer(load(LLAMA), turn=FIRST)
    assert kinds(part.forward) == {"product": 7, "attention": 1, "memory": 26}
    assert kinds(part.backward) == {"product": 14, "attention": 1, "memory": 54}


def test_norms_of_heads_are_norms_by_operations() -> None:
    """Two norms more: 6 kernels each forward, 13 backward, as nothing goes round them."""
    plain, normed = (models.layer(load(LLAMA | {"qk_norm": norm}), turn=FIRST) for norm in (False, True))
    assert kinds(normed.forward) - kinds(plain.forward) == {"memory": 2 * 6}
    assert kinds(normed.backward) - kinds(plain.backward) == {"memory": 2 * 13}


def test_kernels_of_a_gpt2_layer() -> None:
    """Four products. Forward, of the others: two LayerNorms, the eight of gelu_new, and of each block dropout and sum:
    2 + 8 + 4 = 14. Backward: a LayerNorm's input, its parameters, and the sum round the block (3 each); the eleven of
    gelu_new; two of dropout; the join of the gradients of q, k and v; and the sums of four biases: 6 + 11 + 2 + 1 + 4.
    """
    part = models.layer(load(GPT2), turn=FIRST)
    assert kinds(part.forward) == {"product": 4, "attention": 1, "memory": 14}
    assert kinds(part.backward) == {"product": 8, "attention": 1, "memory": 24}


@pytest.mark.parametrize("case", ["llama-1b_b4_s2048", "qwen3-1.7b_b2_s4096", "gpt2_b8_s1024"])
def test_products_are_as_many_as_in_the_trace(case: str) -> None:
    """All products of a trace take one per cent of it or more, but for those of narrow keys and values (llama-1b: 32
    of 339) and of GPT-2's output (12 of 147)."""
    with KERNELS.open(encoding="utf-8", newline="") as file:
        counted = [row for row in csv.DictReader(file) if row["case"] == case]
    traced = sum(int(row["launches"]) for row in counted if row["kernel"].startswith(("nvjet", "cutlass")))
    row = next(row for row in read_rows(SUITES["hugging-face"].table) if row["id"] == case)
    timeline = run(loaded(row, SUITES["hugging-face"].settings_of(row))).timeline
    small = {"llama-1b_b4_s2048": 32, "qwen3-1.7b_b2_s4096": 56, "gpt2_b8_s1024": 12}[case]
    assert (timeline["kind"] == "matmul").sum() == traced + small


# --- what is kept ---


def test_bytes_that_a_llama_layer_keeps() -> None:
    """Two norms keep 4 bytes (x in fp32) + 2 (what the weight multiplies) of each element of a row. The products after
    them keep 2: 16 in all. Attention keeps queries, keys, values and its output, and a number in fp32 per head
    and token. Values have a product of their own, and keep no more than themselves. The MLP keeps gate and up,
    SiLU's result and the product: 4 x 2 bytes."""
    part = models.layer(load(LLAMA))
    attention = 2 * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM + 4 * HEADS
    assert part.saved_bytes == TOKENS * (16 * HIDDEN + attention + 4 * 2 * FFN)


def test_bytes_that_gelu_new_keeps() -> None:
    """Its input, and three results on the way: half of x, the tangent, and one more than that; then its output."""
    saved = {tensor.name: tensor.nbytes for tensor in models.layer(load(GPT2)).saved}
    wide = 2 * TOKENS * 4 * HIDDEN
    assert {name: saved[f"mlp.{name}"] for name in ("pre", "half", "tanh", "plus", "act")} == dict.fromkeys(
        ("pre", "half", "tanh", "plus", "act"), wide
    )


# --- around the layers ---


def test_the_host_waits_once_before_the_layers() -> None:
    """The answer to whether sequences are packed is read before the tables of rotary positions are made."""
    ops = [op for op in embedding(load(LLAMA)).forward if isinstance(op, Compute)]
    assert [op.name for op in ops if op.host_waits] == ["positions.all"]
    assert [op.name for op in ops[-2:]] == ["rotary.cos cast", "rotary.sin cast"]
    assert [op.name for op in embedding(load(GPT2)).forward[-2:]] == ["positions.all", "embedding.dropout"]


def test_nothing_is_issued_while_the_host_waits() -> None:
    """The kernel behind the one that is waited for starts when the host has issued it, which it begins to do at the
    end of that: so much later as the host takes for one."""
    result = run(load(LLAMA | {"hidden": 4096, "heads": 64}))
    rows = result.timeline
    waited = rows[rows["name"] == "positions.all"].index[0]
    launch_s = rows["start_s"][waited + 1] - rows["end_s"][waited]
    assert launch_s == pytest.approx(22.72e-6, rel=1e-6)  # forward_s.other of the profile, hugging_face


def test_shortcuts_change_nothing_where_the_host_waits() -> None:
    compare({"dp": 2}, framework=HUGGING_FACE, model=LLAMA, cluster="hgx_h200_8gpu")


# --- defaults and limits ---


def test_defaults_are_those_of_weights_in_bf16() -> None:
    """Gradients and states have the type of the weights, of which there is no copy; nothing is padded."""
    work = load(LLAMA)
    training = work.training
    optimizer = training.optimizer
    assert (training.grad_dtype, optimizer.state_dtype, optimizer.master_weights) == ("bf16", "bf16", False)
    assert (optimizer.implementation, training.fused_rms_norm, work.model.vocab_multiple) == ("fused", False, 1)
    assert load(GPT2).training.fused_rms_norm  # LayerNorm has a kernel of its own
    mixed = load(
        LLAMA, parallelism={"dp": 2, "zero": 3}, training={"global_batch": 4, "optimizer": {"master_weights": True}}
    )
    assert mixed.training.optimizer.state_dtype == "fp32"


@pytest.mark.parametrize(
    ("model", "sections", "key", "words"),
    [
        (LLAMA, {"parallelism": {"tp": 2}}, "parallelism.tp", "DTensor"),
        (
            LLAMA,
            {"parallelism": {"dp": 2, "zero": 1}, "training": {"global_batch": 4}},
            "parallelism.zero",
            "fully_shard",
        ),
        (MIXTRAL, {"training": {"optimizer": {"master_weights": True}}}, "model.moe", "products in fp32"),
        (MIXTRAL, {"framework": {"name": HUGGING_FACE, "compile": True}}, "model.moe", "compiled"),
        (
            LLAMA,
            {
                "framework": {"name": HUGGING_FACE, "compile": True},
                "training": {"adapters": {"rank": 4, "targets": ["q"]}},
            },
            "training.adapters",
            "compiled",
        ),
        (MIXTRAL | {"moe": MOE | {"shared_experts": 1}}, {}, "model.moe.shared_ffn_hidden", "none of which"),
        (MIXTRAL | {"moe": MOE | {"router_dtype": "fp32"}}, {}, "model.moe.router_dtype", "working precision"),
        (GPT2 | {"moe": MOE}, {}, "model.moe", "GPT-2"),
        (GPT2 | {"attention": "unfused"}, {}, "model.attention", "GPT-2's attention in steps"),
        (LLAMA | {"dropout": 0.1}, {}, "model.dropout", "Llama's kind"),
        (LLAMA | {"norm": "layernorm"}, {}, "model.norm", "RMSNorm"),
        (GPT2 | {"activation": "relu"}, {}, "model.activation", "gelu_new"),
        (GPT2 | {"qk_norm": True}, {}, "model.qk_norm", "norms of heads"),
        (LLAMA, {"training": {"recompute": "selective"}}, "training.recompute.granularity", "whole layers"),
        (GPT2, {"training": {"precision": "fp32"}}, "model.position", "in fp32"),
        (
            LLAMA,
            {"training": {"optimizer": {"master_weights": True}, "adapters": {"rank": 4, "targets": ["q"]}}},
            "training.adapters",
            "autocast",
        ),
        (
            LLAMA,
            {"training": {"optimizer": {"master_weights": True}, "freeze": ["norms"]}},
            "training.freeze",
            "autocast",
        ),
        (
            LLAMA,
            {"training": {"optimizer": {"master_weights": True}, "loss": "fused_linear"}},
            "training.loss.name",
            "its own loss",
        ),
        (LLAMA, {"training": {"adapters": {"rank": 4, "targets": ["qkv"]}}}, "training.adapters.targets", "no such"),
    ],
)
def test_what_it_is_not_simulated_with_is_refused(
    model: dict[str, Any], sections: dict[str, Any], key: str, words: str
) -> None:
    with pytest.raises(InputError) as caught:
        load(model, **sections)
    assert caught.value.key == key
    assert words in str(caught.value)


def test_adapters_stand_beside_products_of_their_own() -> None:
    """Each of the five targets has A and B, beside a product that is its own."""
    targets = ["q", "k", "v", "gate", "up"]
    part = models.layer(load(LLAMA, training={"adapters": {"rank": 4, "targets": targets}}), number=1)
    trained = [weight.name for weight in part.weights if weight.trainable]
    assert sorted(trained) == sorted(
        f"{'mlp' if target in ('gate', 'up') else 'attention'}.{target}.lora_{matrix}.weight"
        for target in targets
        for matrix in "AB"
    )
