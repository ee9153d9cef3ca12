"""Layers by pattern: what a query sees, and what surrounds attention."""

from __future__ import annotations

from typing import Any

import pytest

from simulator import models
from simulator.config import load_workload
from simulator.errors import InputError
from simulator.models import Part
from simulator.program import Attention, Compute, kernels_of
from tests.support.jobs import job
from tests.support.pattern_models import LLAMA, SEQ


def layer(number: int = 0, *, parallelism: dict[str, Any] | None = None, **model: Any) -> Part:
    return models.layer(load_workload(job(model=LLAMA | model, parallelism=parallelism or {})), number=number)


def attention(part: Part) -> Attention:
    """The forward kernel of attention."""
    (kernel,) = (one.kernel for op in part.forward for one in kernels_of(op) if isinstance(one.kernel, Attention))
    return kernel


def qkv_shape(part: Part) -> tuple[int, ...]:
    """The shape of the product of queries, keys and values."""
    (weight,) = (weight for weight in part.weights if "qkv" in weight.name)
    return weight.shape


def names(part: Part) -> list[str]:
    return [op.name for op in part.forward if isinstance(op, Compute)]


PATTERN = {"mixers": ["window", "chunked", "no_rope", "attention"], "sliding_window": 32, "attention_chunk": 48}


def test_each_layer_sees_the_keys_of_its_kind() -> None:
    """128 tokens. In a window of 32 the first 32 queries see 32^2 / 2 pairs, the other 96 see 32 keys each. Pieces of
    48, 48 and 32: half of their squares. All: half of 128^2."""
    pairs = [attention(layer(number, **PATTERN)).pairs for number in range(4)]
    assert pairs == [32 * 32 / 2 + 96 * 32, (48 * 48 + 48 * 48 + 32 * 32) / 2, 128 * 128 / 2, 128 * 128 / 2]


def test_layers_without_positions_turn_nothing() -> None:
    rotated = [any(name.startswith("attn.rope") for name in names(layer(number, **PATTERN))) for number in range(4)]
    assert rotated == [True, True, False, True]


def test_flops_of_a_model_count_every_layer_as_it_is() -> None:
    """A step of 16 sequences takes, beside weights, 4 per pair and element of 8 heads of 32, backward twice that. Not
    causal, a window counts in full, and a piece its square."""
    plain, mixed = (load_workload(job(model=LLAMA | model)) for model in ({}, PATTERN))
    per_pair = 3 * 16 * 4 * 8 * 32
    causal = models.model_flops_per_step_causal(mixed) - models.model_flops_per_step_causal(plain)
    whole = models.model_flops_per_step(mixed) - models.model_flops_per_step(plain)
    half = SEQ * SEQ / 2
    assert causal == pytest.approx(per_pair * (32 * 32 / 2 + 96 * 32 - half + (2 * 48 * 48 + 32 * 32) / 2 - half))
    assert whole == pytest.approx(per_pair * (SEQ * 32 - SEQ * SEQ + 2 * 48 * 48 + 32 * 32 - SEQ * SEQ))


def test_norms_stand_before_behind_or_on_both_sides_of_blocks() -> None:
    """Each has the width of the stream. The one behind keeps its input, a row of 256 in bf16 for each token. Without
    the one before, the block keeps the stream itself."""
    before, after, both = (layer(norm_place=place) for place in ("before", "after", "both"))

    def norms(part: Part) -> list[str]:
        return [weight.name for weight in part.weights if "norm" in weight.name]

    assert norms(before) == ["attention.norm.weight", "mlp.norm.weight"]
    assert norms(after) == ["attention.post_norm.weight", "mlp.post_norm.weight"]
    assert len(norms(both)) == 4
    rows = 2 * SEQ * 256
    assert both.saved_bytes - before.saved_bytes == 2 * rows
    assert after.saved_bytes == before.saved_bytes


def test_a_gate_doubles_the_product_of_queries_and_is_kept() -> None:
    """8 heads of 32 more columns. Kept beside the gate are the context before it and after it. The gate's kernel reads
    the context and the gate; backward it reads them and the gradient, and leaves the gradients of both."""
    plain, gated = layer(), layer(attention_gate=True)
    shapes = [
        next(weight.shape for weight in part.weights if weight.name == "attention.qkv.weight")
        for part in (plain, gated)
    ]
    assert shapes == [(512, 256), (768, 256)]
    rows = 2 * SEQ * 256
    assert gated.saved_bytes - plain.saved_bytes == 2 * rows
    kernels = {op.name: op.kernel for op in (*gated.forward, *gated.backward) if isinstance(op, Compute)}
    moved = {name: kernels[name] for name in ("attn.gate", "attn.gate bwd")}
    assert [(one.read_bytes, one.write_bytes) for one in moved.values()] == [(2 * rows, rows), (3 * rows, 2 * rows)]


def test_sinks_are_a_number_for_each_head_of_the_rank() -> None:
    for tp in (1, 2):
        part = layer(attention_sinks=True, parallelism={"tp": tp})
        (sinks,) = (weight for weight in part.weights if weight.name == "attention.sinks")
        assert (sinks.shape, sinks.whole) == ((8 // tp,), (8,))
        assert attention(part).sinks


def test_a_norm_over_all_heads_has_their_width_and_one_without_weights_none() -> None:
    """8 heads of 32 of queries, 4 of keys."""
    wide, bare = (layer(qk_norm=True, qk_norm_kind=kind) for kind in ("width", "unweighted"))
    assert [weight.shape for weight in wide.weights if "_norm" in weight.name] == [(256,), (128,)]
    assert not [weight for weight in bare.weights if "_norm" in weight.name]
    assert [name for name in names(bare) if "_norm" in name] == ["attn.q_norm", "attn.k_norm"]


def test_biases_are_of_the_layers_that_are_named() -> None:
    """A router of 8 experts has 8; an expert's two products have 2 x 64 and 256 columns."""
    moe = {"experts": 8, "top_k": 2, "ffn_hidden": 64}
    model = {key: value for key, value in LLAMA.items() if key != "bias"}
    workload = load_workload(job(model=model | {"biases": ["qkv", "experts", "router"], "moe": moe}))
    biases = {weight.name: weight.shape for weight in models.layer(workload).weights if weight.name.endswith("bias")}
    assert biases == {
        "attention.qkv.bias": (512,),
        "mlp.experts.fc1.bias": (8, 128),
        "mlp.experts.fc2.bias": (8, 256),
        "mlp.router.bias": (8,),
    }


def test_heads_of_windows_are_their_own() -> None:
    """8 heads of 32 and 4 of keys elsewhere; with windows 8 of keys, and values 16 wide."""
    model = {"mixers": ["window", "attention"], "sliding_window": 32, "window_heads": {"kv_heads": 8, "v_head_dim": 16}}
    shapes = [
        {weight.name: weight.shape for weight in layer(number, **model).weights if weight.name.startswith("attention.")}
        for number in (0, 1)
    ]
    assert [shape["attention.qkv.weight"] for shape in shapes] == [(256 + 256 + 128, 256), (256 + 128 + 128, 256)]
    assert [shape["attention.proj.weight"] for shape in shapes] == [(256, 128), (256, 256)]


def test_a_layer_may_be_a_mixer_or_an_mlp_alone() -> None:
    """The MLP's norm reads the input then, and a layer ends with the sum of its last block."""
    model = {"mixers": ["attention", "none"], "mlps": ["none", "dense"]}
    first, second = (layer(number, **model) for number in (0, 1))
    assert {weight.name.partition(".")[0] for weight in first.weights} == {"attention"}
    assert {weight.name.partition(".")[0] for weight in second.weights} == {"mlp"}
    assert names(second)[0] == "mlp.norm"
    assert second.saved[0].name == "input"


@pytest.mark.parametrize(
    ("model", "parallelism", "key", "words"),
    [
        ({"mixers": ["window"]}, {}, "model.sliding_window", "need it"),
        ({"mixers": ["attention"], "sliding_window": 8}, {}, "model.sliding_window", "no layer of the model reads it"),
        ({"mixers": ["attention"] * 5}, {}, "model.mixers", "more than the model's 4 layers"),
        ({"mixers": ["hyena"]}, {}, "model.mixers", "window"),
        ({"mixers": []}, {}, "model.mixers", ""),
        ({"mixers": ["none"]}, {}, "model.mixers", "in no layer do tokens act"),
        ({"mixers": ["attention", "none"], "mlps": ["none"]}, {}, "model.mlps", "layer 1 has neither"),
        ({"mlps": ["moe", "dense"]}, {}, "model.mlps", "has no experts"),
        ({"mixers": ["sparse"], "indexer": {"heads": 2, "head_dim": 8, "top_k": 8}}, {}, "model.indexer", "latent"),
        ({"qk_norm_kind": "width"}, {}, "model.qk_norm_kind", "no meaning without"),
        ({"qk_norm": True, "qk_norm_kind": "width"}, {"tp": 2}, "parallelism.tp", "needs them on one rank"),
        ({"attention_sinks": True}, {"cp": 2}, "parallelism.cp", "whole sequences"),
        ({"attention_softcap": 30.0, "attention": "unfused"}, {}, "model.attention", "fused kernels"),
        ({"biases": ["qkv"], "bias": True}, {}, "model.bias", "model.biases says"),
        ({"biases": ["norm"]}, {}, "model.biases", "qkv"),
        (PATTERN, {"cp": 2}, "parallelism|model", "a ring does not know"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(
    model: dict[str, Any], parallelism: dict[str, Any], key: str, words: str
) -> None:
    fields = {name: value for name, value in LLAMA.items() if not (name == "bias" and "biases" in model)}
    with pytest.raises(InputError) as caught:
        load_workload(job(model=fields | model, parallelism=parallelism))
    message = str(caught.value)
    assert any(one in message for one in key.split("|"))
    assert words in message


@pytest.mark.parametrize(
    ("framework", "model"),
    [
        ("hugging_face", {"attention_gate": True}),
        ("torchtitan", {"norm_place": "both"}),
        ("torchtitan", {"mixers": ["window", "attention"], "sliding_window": 8}),
    ],
)
def test_frameworks_whose_layers_were_not_looked_at_refuse_them(framework: str, model: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"all of one kind|attention and norms of Llama"):
        load_workload(job(model=LLAMA | model, framework=framework))


def test_values_that_are_keys_have_no_product_and_a_norm_without_weights() -> None:
    """8 heads of 32, 4 of keys: of 256 + 4 x 32 columns, values had 128 more. Both norms keep the keys as they
    come, one tensor. The gradients of both are summed, two tensors read and one written."""
    form = {"qk_norm": True, "value_norm": True}
    plain, joined = layer(**form), layer(**form, keys_as_values=True)
    assert qkv_shape(plain) == (256 + 2 * 128, 256)
    assert qkv_shape(joined) == (256 + 128, 256)
    kept = {tensor.name: tensor.nbytes for tensor in plain.saved}
    assert kept["attn.v raw"] == kept["attn.k raw"] == 2 * SEQ * 128
    assert plain.saved_bytes - joined.saved_bytes == 2 * SEQ * 128
    (added,) = [op.kernel for op in joined.input_grad if getattr(op, "name", "") == "attn.k and v grad"]
    assert (added.read_bytes, added.write_bytes) == (2 * 2 * SEQ * 128, 2 * SEQ * 128)
    assert not any("v_norm" in weight.name for weight in joined.weights)


def test_sinks_of_windows_alone() -> None:
    """A number a head, in layers that have a window."""
    pattern = {"mixers": ["attention", "window"], "sliding_window": 32, "attention_sinks": "window"}
    workload = load_workload(job(model=LLAMA | pattern))
    counts = [sum("sinks" in weight.name for weight in part.weights) for part in models.rank_parts(workload, 0)]
    assert sorted(counts) == [0, 0, 0, 0, 1, 1]  # embedding, two layers of each kind, head
