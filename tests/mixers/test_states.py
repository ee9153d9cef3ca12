"""Mixers that carry a state, and the indexer of sparse attention: weights, FLOPs, bytes that are kept, splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simulator import models
from simulator.config import load_workload
from simulator.costs.costs import Costs
from simulator.errors import InputError
from simulator.models import Part
from simulator.program import AllToAll, Memory, Tiled, kernels_of
from tests.support.jobs import job
from tests.support.pattern_models import DELTA, KIMI, LLAMA, MAMBA, SEQ, SPARSE


def layer(model: dict[str, Any], **parallelism: Any) -> Part:
    return models.layer(load_workload(job(model=LLAMA | model, parallelism=parallelism)))


def shapes(part: Part) -> dict[str, tuple[int, ...]]:
    return {weight.name: weight.shape for weight in part.weights if weight.name.startswith("mixer.")}


def tiled(part: Part) -> dict[str, Tiled]:
    """The kernels of tiles of a layer, forward and backward."""
    ops = (*part.forward, *part.input_grad)
    return {one.name: one.kernel for op in ops for one in kernels_of(op) if isinstance(one.kernel, Tiled)}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("model", "names"),
    [(DELTA, ["ba"]), (KIMI, ["g_a", "b", "f_a"]), (MAMBA, []), (LLAMA, [])],
    ids=["delta", "kimi", "mamba", "none"],
)
def test_gradients_of_products_of_one_input_are_summed(model: dict[str, Any], names: list[str], tp: int) -> None:
    """All products but the first hand on their sum with the gradient before. Two tensors of a rank's rows, 256 wide in
    bf16, are read, and one is written."""
    sums = [
        (one.name, one.kernel.read_bytes, one.kernel.write_bytes)
        for op in layer(model, tp=tp).input_grad
        for one in kernels_of(op)
        if one.name.startswith("mixer.") and one.name.endswith(" input grad") and isinstance(one.kernel, Memory)
    ]
    row = 2 * SEQ // tp * 256
    assert sums == [(f"mixer.{name} input grad", 2 * row, row) for name in names]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_gated_delta_layer_has_the_weights_of_qwen3_next(tp: int) -> None:
    """Queries, keys, values and gate come from one product, the two numbers of each head from another; the convolution
    runs over queries, keys and values. A rank has 1 / tp of the heads, and all of the norm of one head."""
    assert shapes(layer(DELTA, tp=tp)) == {
        "mixer.qkvz.weight": (2 * (4 * 16 + 8 * 32) // tp, 256),
        "mixer.ba.weight": (2 * 8 // tp, 256),
        "mixer.conv.weight": ((2 * 4 * 16 + 8 * 32) // tp, 1, 4),
        "mixer.A_log": (8 // tp,),
        "mixer.dt_bias": (8 // tp,),
        "mixer.norm.weight": (32,),
        "mixer.out.weight": (256, 8 * 32 // tp),
    }


@pytest.mark.parametrize("tp", [1, 2])
def test_a_kimi_delta_layer_has_the_weights_of_its_class(tp: int) -> None:
    """Queries, keys and values of 8 x 16, both gates through 16 columns that every rank holds, a strength a head.

    Decays have a rate a head and a bias a channel."""
    assert shapes(layer(KIMI, tp=tp)) == {
        "mixer.qkv.weight": (3 * 128 // tp, 256),
        "mixer.conv.weight": (3 * 128 // tp, 1, 4),
        "mixer.f_a.weight": (16, 256),
        "mixer.f_b.weight": (128 // tp, 16),
        "mixer.b.weight": (8 // tp, 256),
        "mixer.A_log": (8 // tp,),
        "mixer.dt_bias": (128 // tp,),
        "mixer.g_a.weight": (16, 256),
        "mixer.g_b.weight": (128 // tp, 16),
        "mixer.norm.weight": (16,),
        "mixer.out.weight": (256, 128 // tp),
    }


@pytest.mark.parametrize("tp", [1, 2])
def test_a_mamba_2_layer_has_the_weights_of_its_class(tp: int) -> None:
    """Gate and input of 8 x 32, B and C of 2 groups of 16, and a step a head; the convolution leaves out gate and
    steps."""
    assert shapes(layer(MAMBA, tp=tp)) == {
        "mixer.in.weight": ((2 * 256 + 2 * 2 * 16 + 8) // tp, 256),
        "mixer.conv.weight": ((256 + 2 * 2 * 16) // tp, 1, 4),
        "mixer.conv.bias": ((256 + 2 * 2 * 16) // tp,),
        "mixer.A_log": (8 // tp,),
        "mixer.D": (8 // tp,),
        "mixer.dt_bias": (8 // tp,),
        "mixer.norm.weight": (256 // tp,),
        "mixer.out.weight": (256, 256 // tp),
    }


#: Sizes of products, m x n x k.
Sizes = tuple[tuple[int, int, int], ...]


def flops(sizes: Sizes) -> int:
    return sum(2 * m * n * k for m, n, k in sizes)


def test_the_rule_takes_the_products_of_its_kernels() -> None:
    """Products of a piece and head in the kernels of flash-linear-attention, tokens c, keys k and values v wide. A
    triangle is inverted in a third of a product of its size."""
    c, k, v, pieces = 64, 16, 32, 8 * SEQ // 64
    # The inverse by keys and by values.
    vectors: Sizes = ((c, k, c), (c, v, c))
    # What a state gives to a piece, and what that adds to it.
    states: Sizes = ((c, v, k), (k, v, c))
    # From the state. Scores inside the piece, and these by values.
    output: Sizes = ((c, v, k), (c, c, k), (c, v, c))
    ahead = flops(((c, c, k), *vectors, *states, *output)) + 2 * c**3 / 3
    # Scores, and the gradients of values by them.
    inside: Sizes = ((c, c, k), (c, v, c))
    # Gradients of values, and of the state from queries and keys.
    passed: Sizes = ((c, v, k), (k, v, c), (k, v, c))
    # Gradients of scores, then of queries, keys and their vectors by states. Scores again, and both gradients by them.
    inputs: Sizes = ((c, c, v), (c, k, v), (c, k, v), (c, k, v), (c, c, k), (c, k, c), (c, k, c))
    # Gradients of the inverse from both vectors, and through it. Of the triangle, keys' products again, and of keys.
    triangles: Sizes = (
        *((c, c, k), (c, c, v), (c, k, c), (c, v, c)),
        *((c, c, c), (c, c, c), (c, c, k), (c, k, c)),
    )
    kernels = tiled(layer(DELTA))
    assert kernels["mixer.rule"].flops == pytest.approx(pieces * ahead)
    back = flops((*vectors, *states, *inside, *passed, *inputs, *triangles))
    assert kernels["mixer.rule bwd"].flops == pytest.approx(pieces * back)


def test_kimis_rule_takes_the_products_of_its_kernels() -> None:
    """Products of a piece of c tokens and a head k wide in the kernels of flash-linear-attention."""
    c, k, pieces = 64, 16, 8 * SEQ // 64
    one, state, inside = flops(((c, c, k),)), flops(((c, k, k),)), flops(((c, c, c),))
    # Two kinds of scores, the inverse of a triangle, vectors of keys and of values. What a state gives to a piece and
    # gets from it, and the output from the state and by scores.
    ahead = 2 * one + 2 * c**3 / 3 + 2 * one + 2 * state + (state + one)
    # Vectors and states again, then gradients of scores and of values by them. Those of values and of the state from
    # queries and keys follow. By states those of queries, keys and vectors are found, by vectors the inverse's both
    # ways, and two go through it. In the piece both kinds of scores give gradients to queries and to keys.
    back = 2 * one + 2 * state + 2 * one + 3 * state + (3 * state + 4 * one + 2 * inside) + 4 * one
    kernels = tiled(layer(KIMI))
    assert kernels["mixer.rule"].flops == pytest.approx(pieces * ahead)
    assert kernels["mixer.rule bwd"].flops == pytest.approx(pieces * back)


def test_kimis_rule_keeps_raw_decays_and_two_triangles() -> None:
    """A token and head keeps 16 columns of queries, keys, values and decays, 2 x 64 of triangles, and a strength."""
    kept = {tensor.name: tensor.nbytes for tensor in layer(KIMI).saved if tensor.name.startswith("mixer.")}
    rows = 2 * SEQ * 8
    assert {name: nbytes / rows for name, nbytes in kept.items() if name != "mixer.conv input"} == {
        **{"mixer.q": 16, "mixer.k": 16, "mixer.v": 16, "mixer.decays": 16, "mixer.strengths": 1, "mixer.beta": 1},
        **{"mixer.triangles": 128, "mixer.raw": 16, "mixer.gate": 16, "mixer.normed": 16},
        **{"mixer.f inside": 2, "mixer.g inside": 2},  # 16 columns of a token, which has 8 heads
    }


def test_a_scan_takes_the_products_of_its_kernels() -> None:
    """Products of a piece in the kernels of mamba_ssm: c tokens, heads p and states n wide. What comes before a token
    inside its piece is half of a product."""
    c, p, n, heads, groups, pieces = 64, 32, 16, 8, 2, SEQ // 64
    state, before, shared = flops(((p, n, c),)), flops(((c, p, c),)) / 2, flops(((c, c, n),))
    kernels = tiled(layer(MAMBA))
    assert kernels["mixer.scan"].flops == pieces * (heads * (state + before + state) + groups * shared)
    # States and products of B and C again. A head: of states, of x by both, of B, of C, of products of B and C, of
    # decays. A group: of B and of C.
    again = heads * state + groups * shared
    gradients = heads * (state + (before + state) + state + state + before + before) + groups * 2 * shared
    assert kernels["mixer.scan bwd"].flops == pieces * (again + gradients)


@pytest.mark.parametrize(
    ("model", "name", "inputs", "outputs"),
    [
        # Queries and keys of 8 heads of 16, values of 32, two numbers a head of at least 2 bytes each.
        (DELTA, "mixer.rule", 2 * 8 * (16 + 16 + 32) + 2 * 2 * 8, 2 * 8 * 32),
        # Queries, keys, values and raw decays of 8 heads of 16, a strength a head.
        (KIMI, "mixer.rule", 2 * 8 * 4 * 16 + 2 * 8, 2 * 8 * 16),
        # x of 8 heads of 32, B and C of 2 groups of 16, a decay a head.
        (MAMBA, "mixer.scan", 2 * (8 * 32 + 2 * 2 * 16) + 2 * 8, 2 * 8 * 32),
        # Queries of 4 heads of 16, one key, a weight a head; scores of half of the sequence in 4 bytes.
        (SPARSE, "mixer.scores", 2 * (4 * 16 + 16 + 4), 4 * SEQ // 2),
    ],
)
def test_every_input_is_read_and_every_output_and_gradient_written(
    model: dict[str, Any], name: str, inputs: int, outputs: int
) -> None:
    """Bytes of a token, at the least: forward inputs to outputs, backward both and the other way round."""
    kernels = tiled(layer(model))
    forward, backward = kernels[name], kernels[f"{name} bwd"]
    assert forward.read_bytes >= SEQ * inputs
    assert forward.write_bytes >= SEQ * outputs
    assert backward.read_bytes >= SEQ * inputs
    assert backward.write_bytes >= SEQ * inputs


def test_linear_layers_grow_with_the_sequence_and_attention_with_its_square() -> None:
    """A step takes, beside weights, 8 k v a head of the rule, 7 a number of a state, 3 times for both passes."""
    for model, one in ((DELTA, 8 * 8 * 16 * 32), (KIMI, 8 * 8 * 16 * 16), (MAMBA, 7 * 8 * 32 * 16)):
        jobs = [
            load_workload(job(model=LLAMA | model, training={"seq": seq, "global_batch": 16})) for seq in (SEQ, 2 * SEQ)
        ]
        short, long = map(models.model_flops_per_step, jobs)
        assert long == pytest.approx(2 * short)
        without = load_workload(job(model=LLAMA | model | {"layers": 2}))
        weights = models.parameters(jobs[0]) - models.parameters(without)
        small = 2 * sum(weight.whole_elements for weight in layer(model).weights if not weight.gradient_product)
        two_layers = short - models.model_flops_per_step(without)
        assert two_layers == pytest.approx(3 * 16 * SEQ * (2 * (weights - small) + 2 * one))


def test_mamba_2_keeps_its_first_product_and_makes_the_rest_again() -> None:
    """Two bytes each. Kept are the normed row of 256 and the row itself, 584 columns of the product, the scan's output
    and what the second product reads."""
    part = models.layer(load_workload(job(model=LLAMA | MAMBA | {"mlps": ["none"]})))
    assert part.saved_bytes == 2 * SEQ * (256 + 256 + 584 + 256 + 256)


def test_the_rule_keeps_inverted_triangles_and_no_states() -> None:
    """A token and head keeps a row of its piece's triangle, 64 wide."""
    kept = {tensor.name: tensor.nbytes for tensor in layer(DELTA).saved}
    assert kept["mixer.triangles"] == 2 * SEQ * 8 * 64
    assert not any("state" in name for name in kept)


def test_an_indexer_scores_all_tokens_and_attention_sees_the_chosen() -> None:
    """4 heads of 16 score half of 128^2 pairs, 2 FLOPs each. Attention takes 32 keys a query, as in a window. The score
    hands no gradient to the layers below, and every tensor-parallel rank does all of it."""
    for tp in (1, 2):
        part = layer(SPARSE, tp=tp)
        assert tiled(part)["mixer.scores"].flops == 2 * 4 * 16 * SEQ * SEQ / 2
        assert shapes(part)["mixer.index_q.weight"] == (64, 64)
        assert not any(getattr(op, "name", "") == "mixer.index_q dgrad" for op in part.input_grad)
    workload = load_workload(job(model=LLAMA | SPARSE))
    assert workload.model.keys_seen(0, SEQ).window == 32


@pytest.mark.parametrize("model", [DELTA, KIMI, MAMBA, SPARSE])
def test_prices_of_such_kernels_are_assumed(model: dict[str, Any]) -> None:
    """Nothing of the sort was measured, on whatever GPU. More products or more bytes take longer."""
    from simulator.config.profile import load_profile

    costs = Costs.from_profile(load_profile("h100-sxm-80gb"))
    for kernel in tiled(layer(model)).values():
        assert costs.origin(kernel).kind == "assumed"
        assert costs.origin(kernel).extrapolated
        seconds = costs.kernel_s(kernel, costs.gpu)
        assert costs.kernel_s(replace(kernel, flops=1000 * kernel.flops), costs.gpu) > seconds
        assert costs.kernel_s(replace(kernel, read_bytes=1000 * kernel.bytes), costs.gpu) > seconds


@pytest.mark.parametrize(
    ("model", "parallelism", "key"),
    [
        (DELTA, {"cp": 8}, "parallelism.cp: does not divide model.gated_delta.key_heads 4"),
        (MAMBA, {"cp": 16}, "parallelism.cp: does not divide model.mamba2.heads 8"),
        (KIMI, {"cp": 2}, "parallelism.cp: the state of kimi_delta passes through whole sequences"),
        (SPARSE, {"cp": 2}, "parallelism.cp"),
        (MAMBA, {"tp": 4}, "parallelism.tp"),  # two groups do not go to four ranks
        (DELTA | {"gated_delta": {"key_heads": 3, "value_heads": 8, "key_dim": 16, "value_dim": 32}}, {}, "key_heads"),
        (MAMBA | {"mamba2": {"heads": 8, "head_dim": 32, "state": 16, "groups": 3}}, {}, "model.mamba2.groups"),
    ],
)
def test_what_a_state_cannot_be_split_over_is_refused(
    model: dict[str, Any], parallelism: dict[str, Any], key: str
) -> None:
    with pytest.raises(InputError, match=key):
        load_workload(job(model=LLAMA | model, parallelism=parallelism))


def sent(part: Part) -> dict[str, float]:
    """The bytes that a rank sends and keeps in each all-to-all of a layer's forward pass."""
    return {op.name: op.nbytes for op in part.forward if isinstance(op, AllToAll)}


def test_ranks_of_a_sequence_trade_it_for_heads_of_a_state_space_layer() -> None:
    """A rank of 4 has 32 of 128 tokens. In bf16 it sends gate and x, 8 heads of 32 each, and a step of each head; B and
    C, 2 groups with states of 16, are there twice, for 4 ranks. Outputs come back. Weights are whole on each rank."""
    whole, spread = layer(MAMBA), layer(MAMBA, cp=4)
    assert {name.split()[1]: nbytes for name, nbytes in sent(spread).items()} == {
        "z": 2 * 32 * 256,
        "x": 2 * 32 * 256,
        "B": 2 * 32 * 4 * 16,
        "C": 2 * 32 * 4 * 16,
        "dt": 2 * 32 * 8,
        "y": 2 * 32 * 256,
    }
    assert shapes(whole) == shapes(spread)
    assert not sent(whole)


@pytest.mark.parametrize(("model", "cp"), [(DELTA, 4), (MAMBA, 2)])
def test_a_rank_of_a_sequence_does_its_share_of_a_state(model: dict[str, Any], cp: int) -> None:
    """A rank works on 1 / cp of the heads, of whole sequences: kernels have 1 / cp of the FLOPs, and keep 1 / cp. Where
    groups divide, no work is done twice. Gradients travel as far."""
    whole, spread = layer(model), layer(model, cp=cp)
    for name, kernel in tiled(spread).items():
        assert kernel.flops == pytest.approx(tiled(whole)[name].flops / cp)
    kept = [sum(one.nbytes for one in part.saved if one.name.startswith("mixer.")) for part in (whole, spread)]
    assert kept[1] == pytest.approx(kept[0] / cp)
    backward = [op.nbytes for op in spread.input_grad if isinstance(op, AllToAll)]
    assert sorted(backward) == sorted(sent(spread).values())
    assert shapes(whole) == shapes(spread)


def test_the_gated_delta_rule_sends_six_parts_and_gets_one_back() -> None:
    """A rank of 4 has 32 tokens: queries and keys of 4 heads of 16, values and gates of 8 of 32, two numbers a head."""
    assert {name.split()[1]: nbytes for name, nbytes in sent(layer(DELTA, cp=4)).items()} == {
        **dict.fromkeys(("q", "k"), 2 * 32 * 64),
        **dict.fromkeys(("v", "gate", "output"), 2 * 32 * 256),
        **dict.fromkeys(("beta", "decay"), 2 * 32 * 8),
    }
