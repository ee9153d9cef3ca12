"""Models for small devices, as Gemma 4's E2B and E4B: a second embedding for each layer, keys of other layers."""

from __future__ import annotations

from typing import Any

import pytest

from simulator import models
from simulator.api import run
from simulator.config import Workload, load_workload
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.models import Part
from tests.support.jobs import job
from tests.support.pattern_models import EDGE, SEQ
from tests.support.unadvised import without_advice  # noqa: F401


def workload(**more: Any) -> Workload:
    return load_workload(job(**{"model": EDGE, **more}))


def layer(number: int, model: dict[str, Any] = EDGE) -> Part:
    return models.layer(load_workload(job(model=model)), number=number)


def shapes(part: Part) -> dict[str, tuple[int, ...]]:
    return {weight.name: weight.shape for weight in part.weights}


def test_layers_that_reuse_keys_have_queries_alone_and_wider_mlps() -> None:
    """8 heads of queries 32 wide, 4 of keys. The norm of keys is the other layer's too."""
    lender, reuser = shapes(layer(1)), shapes(layer(3))
    assert lender["attention.qkv.weight"] == (2 * 4 * 32 + 8 * 32, 256)
    assert reuser["attention.q.weight"] == (8 * 32, 256)
    assert set(lender) - set(reuser) == {"attention.qkv.weight", "attention.k_norm.weight"}
    assert (lender["mlp.fc1.weight"], reuser["mlp.fc1.weight"]) == ((2 * 512, 256), (2 * 1024, 256))


def test_keys_are_kept_once_by_the_layer_that_lends_them() -> None:
    """MLPs are alike here, so that layers differ in keys and values alone: 4 heads of 32 in bf16. Keys are kept as they
    leave their product, and with positions. Gradients of lent keys are summed layer by layer."""
    same = EDGE | {"reused_keys": {"layers": 2}}
    kept = [{tensor.name: tensor.nbytes for tensor in layer(number, same).saved} for number in (1, 3)]
    one = 2 * SEQ * 4 * 32
    assert {name: nbytes for name, nbytes in kept[0].items() if name not in kept[1]} == {
        "attn.k raw": one,
        "attn.k": one,
        "attn.v": one,
    }
    summed = [op.name for op in layer(3).input_grad if "of layers" in getattr(op, "name", "")]
    assert summed == ["attn.k grad of layers", "attn.v grad of layers"]


def test_lent_keys_stay_where_layers_run_again() -> None:
    """A layer that runs again keeps its input, and keys and values for the layers behind."""
    full = {"seq": SEQ, "global_batch": 16, "recompute": "full"}
    kept = [{tensor.name for tensor in models.layer(workload(training=full), number=number).saved} for number in (0, 2)]
    assert kept == [{"input", "attn.k", "attn.v"}, {"input"}]


def test_every_layer_gets_a_part_of_a_second_embedding() -> None:
    """The table has 512 rows with 16 numbers for each of 4 layers. The product of the first embedding is as wide, its
    norm has 16. A layer has two products between 256 and 16, and a norm of 256."""
    first = shapes(models.embedding(workload()))
    assert {name: shape for name, shape in first.items() if name.startswith("layer_inputs")} == {
        "layer_inputs.table.weight": (512, 64),
        "layer_inputs.product.weight": (64, 256),
        "layer_inputs.norm.weight": (16,),
    }
    assert {name: shape for name, shape in shapes(layer(0)).items() if name.startswith("layer_input.")} == {
        "layer_input.gate.weight": (16, 256),
        "layer_input.projection.weight": (256, 16),
        "layer_input.norm.weight": (256,),
    }


def test_flops_count_products_around_the_second_embedding() -> None:
    """Two per weight and token, and twice that backward, of 16 sequences: of the product of the embedding, and of two
    in each layer. Tables are looked up."""
    plain = load_workload(job(model={key: value for key, value in EDGE.items() if key != "layer_inputs"}))
    added = models.model_flops_per_step(workload()) - models.model_flops_per_step(plain)
    assert added == 3 * 2 * 16 * SEQ * (64 * 256 + 4 * 2 * 16 * 256)


@pytest.mark.usefixtures("without_advice")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_such_a_model_plays(recompute: str) -> None:
    played = run(workload(training={"seq": SEQ, "global_batch": 16, "recompute": recompute}, parallelism={"dp": 2}))
    check(played.program, played.played)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallelism": {"pp": 2}}, "parallelism.pp: model.layer_inputs is simulated on one rank"),
        ({"model": EDGE | {"reused_keys": {"layers": 3}}}, "no layer of kind attention before lends its keys"),
        ({"framework": "torchtitan"}, "mixers: .*layer_inputs: a section"),
    ],
)
def test_what_such_a_model_cannot_be_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        workload(**change)
