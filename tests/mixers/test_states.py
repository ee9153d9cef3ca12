"""Mixers that carry a state, and the indexer of sparse attention: weights, FLOPs, bytes that are kept, splits."""

from __future__ import annotations

from typing import Any

import pytest

from simulator import models
from simulator.config import load_workload
from simulator.costs.costs import Costs
from simulator.errors import InputError
from simulator.models import Part
from simulator.program import Tiled, kernels_of
from tests.support.jobs import job
from tests.support.pattern_models import LLAMA, SEQ

#: 4 heads of queries and keys 16 wide, 8 of values 32 wide.
DELTA = {"mixers": ["gated_delta"], "gated_delta": {"key_heads": 4, "value_heads": 8, "key_dim": 16, "value_dim": 32}}
#: 8 heads of 32 with states of 16, in 2 groups; pieces of 64 tokens.
MAMBA = {"mixers": ["mamba2"], "mamba2": {"heads": 8, "head_dim": 32, "state": 16, "groups": 2, "chunk": 64}}
SPARSE = {
    "kv_heads": 8,
    "mla": {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "indexer": {"heads": 4, "head_dim": 16, "top_k": 32},
}


def layer(model: dict[str, Any], **parallelism: Any) -> Part:
    return models.layer(load_workload(job(model=LLAMA | model, parallelism=parallelism)))


def shapes(part: Part) -> dict[str, tuple[int, ...]]:
    return {weight.name: weight.shape for weight in part.weights if weight.name.startswith("mixer.")}


def tiled(part: Part) -> dict[str, Tiled]:
    """The kernels of tiles of a layer, forward and backward."""
    ops = (*part.forward, *part.input_grad)
    return {one.name: one.kernel for op in ops for one in kernels_of(op) if isinstance(one.kernel, Tiled)}


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


def test_the_rule_takes_products_inside_pieces_and_with_states() -> None:
    """Multiply-adds of a token and head, pieces of 64, keys of 16 and values of 32. There are 64 x 16 between keys,
    64 x 64 / 3 for the inverse, 64 x 48 for two vectors. States take 2 x 512, the output 512 + 64 x 48."""
    kernel = tiled(layer(DELTA))["mixer.rule"]
    one = 64 * 16 + 64 * 64 / 3 + 64 * 48 + 2 * 512 + 512 + 64 * 48
    assert kernel.flops == pytest.approx(2 * SEQ * 8 * one)


def test_a_scan_takes_states_products_of_groups_and_outputs() -> None:
    """A token has a state of 32 x 16 a head, and 64 x 16 products a group. A head's output comes from half of a piece,
    64 x 32 / 2, and from the state."""
    kernel = tiled(layer(MAMBA))["mixer.scan"]
    assert kernel.flops == 2 * SEQ * (8 * 512 + 2 * 64 * 16 + 8 * (64 * 32 / 2 + 512))


def test_linear_layers_grow_with_the_sequence_and_attention_with_its_square() -> None:
    """A step takes, beside weights, 8 k v a head of the rule, 7 a number of a state, 3 times for both passes."""
    for model, one in ((DELTA, 8 * 8 * 16 * 32), (MAMBA, 7 * 8 * 32 * 16)):
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


@pytest.mark.parametrize("model", [DELTA, MAMBA, SPARSE])
def test_prices_of_such_kernels_are_assumed(model: dict[str, Any]) -> None:
    """Nothing of the sort was measured, on whatever GPU; a longer kernel takes longer."""
    from simulator.config.profile import load_profile

    costs = Costs.from_profile(load_profile("h100-sxm-80gb"))
    for kernel in tiled(layer(model)).values():
        assert costs.origin(kernel).kind == "assumed"
        assert costs.origin(kernel).extrapolated
        assert 0 < costs.kernel_s(kernel, costs.gpu) < 1e-2


@pytest.mark.parametrize(
    ("model", "parallelism", "key"),
    [
        (DELTA, {"cp": 2}, "parallelism.cp"),
        (MAMBA, {"cp": 2, "cp_method": "ulysses"}, "parallelism.cp"),
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
