"""Weights: each tensor once, as a rank and as the model has it, and the product that makes its gradient."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from simulator import models
from simulator.config import Workload, load_workload
from simulator.models import Part
from simulator.operations.weights import Weight, by_axis, elements, elements_by_axis, prefixed, tie, weight_bytes
from simulator.program import kernels_of
from tests.support import experts, jobs

GPT: dict[str, Any] = {}
LLAMA: dict[str, Any] = {
    "model__activation": "swiglu",
    "model__norm": "rmsnorm",
    "model__position": "rope",
    "model__bias": False,
    "model__tied_embeddings": False,
    "model__kv_heads": 2,
}


def dense(parallelism: dict[str, Any] | None = None, **changes: Any) -> Workload:
    return load_workload(jobs.job(**changes) | {"parallelism": parallelism or {}})


def mixed(parallelism: dict[str, Any] | None = None, **changes: Any) -> Workload:
    return load_workload(experts.job(parallelism=parallelism or {}, **changes))


WORKLOADS = [
    pytest.param(dense(), id="gpt"),
    pytest.param(dense({"tp": 4}, **LLAMA), id="kv heads on several ranks"),
    pytest.param(dense({"tp": 2, "sequence_parallel": True, "overlap": {"tp": True}}), id="tp in rings"),
    pytest.param(dense({"pp": 4, "schedule": "zb_h1"}), id="split passes"),
    pytest.param(dense({"pp": 2}, framework="pytorch"), id="torch"),
    pytest.param(mixed({"dp": 4, "ep": 2, "tp": 2}, moe={"shared_experts": 1}), id="experts"),
    pytest.param(mixed({"dp": 4, "ep": 4, "etp": 1}, framework="pytorch"), id="plain experts"),
    pytest.param(mixed(model__mla=experts.MLA, model__mtp_layers=1), id="latent"),
]


def every_part(work: Workload) -> Iterator[Part]:
    for stage in range(work.parallelism.n_stages):
        yield from models.stage_parts(work, stage)


@pytest.mark.parametrize("work", WORKLOADS)
def test_each_product_that_a_weight_names_runs_once_in_each_backward_pass(work: Workload) -> None:
    """Whole or split in two, a backward pass computes the gradient of a weight by one product."""
    for part in every_part(work):
        products = Counter(weight.gradient_product for weight in part.weights if weight.gradient_product)
        for ops in (part.backward, part.weight_grad):
            names = Counter(kernel.name for op in ops for kernel in kernels_of(op) if kernel.name in products)
            assert names == products == Counter(set(products))


@pytest.mark.parametrize("work", WORKLOADS)
def test_weight_gradients_are_only_of_weights(work: Workload) -> None:
    """Every product of the weight phase is one that a weight names."""
    for part in every_part(work):
        kernels = [kernel for op in part.weight_grad for kernel in kernels_of(op)]
        made = {kernel.name for kernel in kernels if kernel.kernel.kind in ("matmul", "grouped_matmul")}
        assert made == {weight.gradient_product for weight in part.weights} - {""}


@pytest.mark.parametrize("work", WORKLOADS)
def test_names_are_unique(work: Workload) -> None:
    names = [weight.name for weight in models.model_weights(work)]
    assert len(names) == len(set(names))


def test_names_of_a_small_gpt() -> None:
    """Megatron-LM and Hugging Face name them so, from the module down; a tied projection is no tensor of its own."""
    layer = [f"{name}.{tensor}" for name in ("attention.norm", "attention.qkv", "attention.proj") for tensor in PAIR]
    layer += [f"{name}.{tensor}" for name in ("mlp.norm", "mlp.fc1", "mlp.fc2") for tensor in PAIR]
    assert [weight.name for weight in models.model_weights(dense(model__layers=2))] == [
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        *(f"layers.{number}.{name}" for number in (0, 1) for name in layer),
        "final_norm.weight",
        "final_norm.bias",
    ]


PAIR = ("weight", "bias")


def test_names_of_experts() -> None:
    names = {weight.name for weight in models.layer(mixed(moe={"shared_experts": 1})).weights if "mlp" in weight.name}
    assert names == {
        "mlp.norm.weight",
        "mlp.router.weight",
        *(f"mlp.{kind}.{which}.weight" for kind in ("experts", "shared_experts") for which in ("fc1", "fc2")),
    }


@pytest.mark.parametrize("keys", [GPT, LLAMA])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_whole_tensor_does_not_depend_on_tp(keys: dict[str, Any], tp: int) -> None:
    """However many ranks split a tensor, and however many of them hold the same KV heads or rows of padding."""
    one, split = (list(models.model_weights(dense({"tp": t}, **keys))) for t in (1, tp))
    assert [(weight.name, weight.whole) for weight in split] == [(weight.name, weight.whole) for weight in one]


@pytest.mark.parametrize(("ep", "etp"), [*itertools.product((1, 2, 4), (1, 2))])
def test_the_whole_experts_do_not_depend_on_their_layout(ep: int, etp: int) -> None:
    """Redundant experts are copies, and no part of the model."""
    moe = {"redundant_experts": 8} if ep > 1 else {}
    one, split = mixed(), mixed({"dp": 8, "ep": ep, "etp": etp}, moe=moe)
    whole = [[(w.name, w.whole) for w in models.layer(work).weights] for work in (one, split)]
    assert whole[0] == whole[1]
    # Of 8 or 16 experts a rank has 1 / ep, of each of their tensors 1 / etp.
    share = elements_by_axis(models.layer(split).weights)["edp"] / elements_by_axis(models.layer(one).weights)["edp"]
    assert share == (2 if moe else 1) / (ep * etp)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_share_what_is_split_and_hold_the_rest(tp: int) -> None:
    """Without padding, the shapes of all ranks add up to the whole along one dimension, or each rank has the whole."""
    for weight in models.model_weights(dense({"tp": tp})):
        ratio = weight.whole_elements / weight.elements
        assert ratio == (tp if weight.sharded_over == ("tp",) else 1)


def test_tied_weights_are_held_once() -> None:
    """The projection is the embedding's tensor on one rank; the last stage of two has a copy."""
    (alone,) = (w for w in models.head(dense()).weights if w.name == "output_layer.weight")
    (copy,) = (w for w in models.head(dense({"pp": 2})).weights if w.name == "output_layer.weight")
    assert alone.tied_to == copy.tied_to == "embedding.word_embeddings.weight"
    assert (elements([alone]), elements([copy])) == (0, 1024 * 256)


def test_sums_over_weights() -> None:
    """A matrix of 6 and a vector of 3 outside experts, 40 elements of experts; what is tied counts for nothing."""
    matrix, vector = Weight("a", (2, 3), (4, 3), "bf16"), Weight("b", (3,), (3,), "fp32")
    expert = Weight("c", (2, 4, 5), (8, 4, 5), "bf16", sharded_over=("ep", "etp"), partial_rows=1)
    every = (matrix, expert, vector, tie(matrix, "b"))
    assert by_axis(every) == {"dp": (matrix, vector), "edp": (expert,)}
    assert elements_by_axis(every) == {"dp": 9, "edp": 40}
    assert elements(every) == 49
    assert weight_bytes(every) == 2 * 6 + 4 * 3 + 2 * 40
    assert elements([tie(matrix, "b", copied=True)]) == 6
    assert (expert.partial_elements, expert.whole_elements) == (20, 160)
    assert [weight.name for weight in prefixed(every[:2], "layers.0")] == ["layers.0.a", "layers.0.c"]
