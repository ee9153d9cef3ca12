"""Experts beside a dense MLP in one layer, as in Gemma 4."""

from __future__ import annotations

from simulator import models
from simulator.config import load_workload
from simulator.models import Part
from simulator.program import Compute, GroupedMatmul, Matmul, kernels_of
from tests.support.jobs import job
from tests.support.pattern_models import LLAMA, SEQ

MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 64}


def layer(**moe: object) -> Part:
    model = LLAMA | {"norm_place": "both"} | ({"moe": MOE | moe} if moe else {})
    return models.layer(load_workload(job(model=model)))


def test_a_layer_has_both_their_norms_and_a_routers_scales() -> None:
    """Experts alone lack the dense MLP of 3 x 512 x 256 and three norms of 256. The router has 256 scales of its input,
    and one for each of 8 experts."""
    alone, both = ({weight.name: weight.elements for weight in layer(beside_dense=on).weights} for on in (False, True))
    added = {name: elements for name, elements in both.items() if name not in alone}
    assert added == {
        "mlp.fc1.weight": 2 * 512 * 256,
        "mlp.fc2.weight": 512 * 256,
        "mlp.dense_norm.weight": 256,
        "mlp.experts_norm.weight": 256,
        "mlp.experts_post_norm.weight": 256,
        "mlp.router.scale": 256,
        "mlp.router.per_expert_scale": 8,
    }
    assert alone.items() <= both.items()


def test_both_compute_and_keep_what_each_keeps_alone() -> None:
    """Products are those of a dense layer and of a layer with experts, whose attention is the same. Both keep the
    inputs of their products. To these come rows of 256 for the norm on each output and for the router's input, and 2
    probabilities in fp32. The norms before experts and router read rows that the one before the MLP keeps."""

    def products(part: Part) -> set[tuple[str, float]]:
        kernels = ((op.name, op.kernel) for one in part.forward for op in kernels_of(one))
        return {(name, kernel.flops) for name, kernel in kernels if isinstance(kernel, Matmul | GroupedMatmul)}

    dense, routed, both = layer(), layer(beside_dense=False), layer(beside_dense=True)
    assert products(both) == products(dense) | products(routed)
    attention = {tensor.name for tensor in dense.saved if not tensor.name.startswith("mlp.")}
    shared = sum(tensor.nbytes for tensor in dense.saved if tensor.name in attention)
    once = sum(tensor.nbytes for tensor in routed.saved if tensor.name == "mlp.unnormed")
    row = 2 * SEQ * 256
    assert both.saved_bytes == dense.saved_bytes + routed.saved_bytes - shared - once + 3 * row + 4 * SEQ * 2


def test_the_outputs_are_summed_before_the_last_norm() -> None:
    names = [op.name for op in layer(beside_dense=True).forward if isinstance(op, Compute)]
    assert (
        names.index("mlp.fc2") < names.index("moe.router") < names.index("moe.dense add") < names.index("mlp.post_norm")
    )
