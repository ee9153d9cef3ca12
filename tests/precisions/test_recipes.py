"""Products in 8 and 4 bits: what each recipe launches and keeps, counted by hand, and what its workloads may say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest

from simulator.api import run
from simulator.config import Workload, load_workload
from simulator.config.profile import load_profile
from simulator.costs.memory import MemoryCost
from simulator.errors import InputError
from simulator.hardware.kernels import UNSCALED, Scaling
from simulator.models import layer, model_weights, stage_parts
from simulator.models.linear import linear
from simulator.models.shapes import shapes
from simulator.operations.nodes import Ops
from simulator.precisions import PRODUCT_RECIPES, SCALES_IN_WORDS, in_words
from simulator.precisions.recipe import OperandScales
from simulator.program import Compute, GroupedMatmul, Matmul, Memory

HIDDEN, FFN, TOKENS, LAYERS = 512, 2048, 1024, 2
#: 4 heads of 128 of queries, 2 of keys and values.
QUERIES, KEYS = 512, 256
TORCHAO, ENGINE = (
    ("torchao_tensorwise", "torchao_rowwise"),
    ("te_delayed", "te_current", "te_blockwise", "te_mxfp8", "te_nvfp4"),
)
BLACKWELL = ("te_mxfp8", "te_nvfp4")
MOE = {"experts": 4, "top_k": 2, "ffn_hidden": 256}


def workload(recipe: Any = None, **changes: Any) -> Workload:
    """A small Llama on H200s, on B200s where the recipe needs them, with the framework that has the recipe."""
    name = recipe["recipe"] if isinstance(recipe, dict) else recipe
    key = "fp8" if name is None else PRODUCT_RECIPES[name].dtype
    torch = name is None or name in TORCHAO
    data: dict[str, Any] = {
        "name": "small",
        "model": {
            **{"layers": LAYERS, "hidden": HIDDEN, "heads": 4, "kv_heads": 2, "ffn_hidden": FFN, "vocab": 1024},
            **{"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False, "tied_embeddings": False},
        },
        "training": {"seq": TOKENS, "global_batch": 1, key: recipe, "optimizer": {"master_weights": False}},
        "framework": {"name": "torchtitan", "compile": True} if torch else {"name": "megatron_core"},
        "parallelism": {"dp": 1},
        "cluster": {"name": "dgx_b200" if name in BLACKWELL else "dgx_h200", "nodes": 1},
    }
    return load_workload(data, set={key.replace("__", "."): value for key, value in changes.items()})


def products(ops: Ops) -> list[Matmul | GroupedMatmul]:
    return [op.kernel for op in ops if isinstance(op, Compute) and isinstance(op.kernel, Matmul | GroupedMatmul)]


def kernels(ops: Ops, ending: str) -> dict[str, Memory]:
    """Kernels whose names have this ending, by the rest of the name."""
    return {
        op.name.removesuffix(ending): op.kernel
        for op in ops
        if isinstance(op, Compute) and isinstance(op.kernel, Memory) and op.name.endswith(ending)
    }


@pytest.mark.parametrize("name", PRODUCT_RECIPES)
def test_all_products_of_layers_are_in_few_bits_and_no_others(name: str) -> None:
    """q, k, v or one of all, the output, gate and up or both, down: each has three. The head has its own three."""
    work = workload(name)
    (_, *layers, head) = stage_parts(work, 0)
    each = 7 if name in TORCHAO else 4
    for part in layers:
        launched = products((*part.forward, *part.backward))
        assert Counter((one.dtype, one.role) for one in launched) == {
            (PRODUCT_RECIPES[name].dtype, role): each for role in ("fwd", "dgrad", "wgrad")
        }
        assert {(one.role, one.scaling) for one in launched} == set(PRODUCT_RECIPES[name].products.items())
        assert {one.out_dtype for one in launched} <= {"bf16", "fp32"}  # and no fewer bits
    assert {one.dtype for one in products((*head.forward, *head.backward))} == {"bf16"}


def test_tensors_are_cast_once_where_the_graph_knows_them_again() -> None:
    """Queries, keys and values read one input, gate and up another: 4 inputs and 7 weights of a layer are cast."""
    part = layer(workload("torchao_tensorwise"))
    inputs, weights = kernels(part.forward, " input cast"), kernels(part.forward, " weight cast")
    assert set(inputs) == {"attn.q", "attn.proj", "mlp.gate", "mlp.fc2"}
    assert set(weights) == {"attn.q", "attn.k", "attn.v", "attn.proj", "mlp.gate", "mlp.up", "mlp.fc2"}
    # 2 bytes of each element are read, and 1 is written.
    assert (inputs["mlp.fc2"].read_bytes, inputs["mlp.fc2"].write_bytes) == (2 * TOKENS * FFN, TOKENS * FFN)
    assert (weights["attn.k"].read_bytes, weights["attn.k"].write_bytes) == (2 * HIDDEN * KEYS, HIDDEN * KEYS)


def test_gradients_of_an_activation_are_cast_where_it_makes_them() -> None:
    """The activation reads its two inputs and the gradient, and writes 5 tensors: both gradients as they are and
    turned, and its own output turned."""
    part = layer(workload("torchao_tensorwise"))
    assert set(kernels(part.backward, " grad cast both ways")) == {"mlp.fc2", "attn.proj", "attn.q", "attn.k", "attn.v"}
    written = kernels(part.backward, " bwd in 8 bits")["mlp.swiglu"]
    assert (written.read_bytes, written.write_bytes) == (3 * 2 * TOKENS * FFN, 5 * TOKENS * FFN)


def test_torchao_keeps_no_inputs_that_norms_and_activations_make() -> None:
    """Both norms' outputs, and the activation's, are made again: 2 bytes of 2 h + ffn for each token of a layer."""
    saved = layer(workload()).saved_bytes - layer(workload("torchao_tensorwise")).saved_bytes
    assert saved == 2 * TOKENS * (2 * HIDDEN + FFN)


def test_transformer_engine_keeps_inputs_in_8_bits() -> None:
    """Inputs of h, h and ffn elements a token have one byte each instead of two.

    Attention keeps its output in bf16, beside which the output projection's copy has one byte more.
    """
    plain = layer(workload("te_delayed", training__fp8=None))
    kept = plain.saved_bytes - layer(workload("te_delayed")).saved_bytes
    assert kept == TOKENS * (HIDDEN + HIDDEN + FFN - QUERIES)


def test_nvfp4_reads_and_keeps_half_a_byte_and_a_scale_for_sixteen_elements() -> None:
    """A cast reads 2 bytes of each element and writes two copies of 1/2 + 1/16 bytes; the one for dW is kept of x.

    Inputs of h, h and ffn elements a token go from 2 to 0.5625 bytes. Attention keeps its own output in bf16, beside
    which the output projection's copy is new. A product reads half a byte of each element of both operands.
    """
    part, plain = layer(workload("te_nvfp4")), layer(workload("te_nvfp4", training__fp4=None))
    cast = kernels(part.forward, " input cast both ways")["mlp.fc2"]
    assert (cast.read_bytes, cast.write_bytes) == (2 * TOKENS * FFN, 2 * 0.5625 * TOKENS * FFN)
    assert plain.saved_bytes - part.saved_bytes == TOKENS * (1.4375 * (2 * HIDDEN + FFN) - 0.5625 * QUERIES)
    down = next(one for one in products(part.forward) if one.k == FFN)
    assert down.bytes == 0.5 * (TOKENS * FFN + FFN * HIDDEN) + 2 * TOKENS * HIDDEN


def test_casts_to_4_bits_are_called_so_and_priced_by_their_bytes_as_those_to_8() -> None:
    part = layer(workload("te_nvfp4"))
    memory = [op.kernel for op in (*part.forward, *part.backward) if isinstance(getattr(op, "kernel", None), Memory)]
    names = {kernel.op for kernel in memory if kernel.op.startswith(("fp8_", "fp4_"))}
    assert names == {"fp4_amax", "fp4_cast_transpose"}
    profile = load_profile("b200-sxm-180gb")
    cost = MemoryCost.from_sections(profile.gpu_spec, profile.kernels.memory, ("fp8",))
    for name in ("amax", "cast_transpose"):
        assert cost.curves[f"fp4_{name}"] is cost.curves[f"fp8_{name}"]


@pytest.mark.parametrize(("name", "nbytes"), [("te_delayed", 1.0), ("te_mxfp8", 33 / 32), ("te_nvfp4", 9 / 16)])
def test_every_copy_has_its_scales(name: str, nbytes: float) -> None:
    """A byte for every 32 elements, or for every 16 of half a byte; a cast writes two copies."""
    recipe = PRODUCT_RECIPES[name]
    assert recipe.copy_bytes == nbytes
    (cast,) = (one for one in recipe.input_forward if one.written)
    assert cast.written * 2 == 2 * nbytes  # in tensors of 16 bits


def test_a_product_is_in_8_bits_or_in_4() -> None:
    with pytest.raises(InputError, match="a product is in 8 bits or in 4"):
        workload("te_nvfp4", training__fp8="te_mxfp8")


def test_an_h200_has_no_units_for_4_bits() -> None:
    with pytest.raises(InputError, match="no matrix units for 4 bits") as caught:
        workload("te_nvfp4", cluster__name="dgx_h200")
    assert "b200-sxm-180gb" in str(caught.value)


def test_precision_fp4_is_no_recipe() -> None:
    with pytest.raises(InputError, match="fp4: te_nvfp4"):
        workload(training__precision="fp4")


def test_transformer_engine_casts_weights_once_a_step_and_keeps_the_copies() -> None:
    """The first of four micro-batches casts the 4 weights of each of 2 layers, and 2 bytes of each element stay."""
    one, four = (run(workload("te_delayed", training__global_batch=n)) for n in (1, 4))
    casts = [sum("weight cast" in str(name) for name in result.timeline["name"]) for result in (one, four)]
    assert casts == [4 * LAYERS, 4 * LAYERS]
    plain = run(workload("te_delayed", training__global_batch=4, training__fp8=None))
    weights = [result.to_dict()["memory"]["per_stage"][0]["weights"] for result in (plain, four)]
    elements = HIDDEN * (QUERIES + 2 * KEYS) + QUERIES * HIDDEN + 3 * HIDDEN * FFN
    assert weights[1] - weights[0] == 2 * LAYERS * elements


def test_experts_are_in_8_bits_where_the_recipe_has_grouped_products() -> None:
    launched = products(layer(workload("te_current", model__moe=MOE)).forward)
    grouped = [one for one in launched if isinstance(one, GroupedMatmul)]
    router = [one for one in launched if isinstance(one, Matmul) and one.n == MOE["experts"]]
    assert [one.dtype for one in grouped] == ["fp8", "fp8"]
    assert [one.dtype for one in router] == ["fp32"]


def test_weights_gathered_in_8_bits_are_half_as_many_bytes() -> None:
    """All matrices of a layer are; norms stay in bf16. The backward pass turns matrices, and casts none again."""
    settings = {"parallelism.dp": 8, "parallelism.zero": 3, "training.global_batch": 8, "training.optimizer": {}}
    plain = workload("torchao_tensorwise", **settings)
    eight = workload({"recipe": "torchao_tensorwise", "gather": "fp8"}, **settings)
    sent = [run(one).to_dict()["communication"]["dp"]["bytes_per_gpu"] for one in (plain, eight)]
    matrices = sum(w.elements for w in model_weights(plain) if w.in_low_precision)
    # Gathered for the forward and for the backward pass, 7/8 of it from others.
    assert sent[0] - sent[1] == pytest.approx(2 * 7 / 8 * matrices)
    assert not kernels(layer(eight).forward, " weight cast")


def test_small_shapes_may_become_slower() -> None:
    """Casts of 11 tensors a layer take longer than products of 512 columns save."""
    plain, eight = (run(workload(fp8)).to_dict()["step_time_s"] for fp8 in (None, "torchao_rowwise"))
    assert eight > plain


@pytest.mark.parametrize(
    ("fp8", "changes", "words"),
    [
        ("torchao_tensorwise", {"framework.compile": False}, "its eager casts are not simulated"),
        ("torchao_tensorwise", {"framework": "megatron_core"}, "not simulated with megatron_core"),
        ("torchao_tensorwise", {"cluster": "dgx_a100"}, "a100-sxm-80gb has no matrix units for 8 bits"),
        ("torchao_tensorwise", {"training.precision": "fp16"}, "cast from bf16"),
        ("torchao_tensorwise", {"training.seq": 1023}, "multiple of 16"),
        ("te_blockwise", {"model.hidden": 576, "model.head_dim": 128}, "multiple of 128"),
        ("torchao_tensorwise", {"training.optimizer.master_weights": True}, "autocast casts weights"),
        ({"recipe": "torchao_rowwise", "gather": "fp8"}, {}, "are gathered in bf16"),
        ({"recipe": "torchao_tensorwise", "gather": "fp8"}, {}, "only weights that fully_shard splits"),
        ("te_mxfp8", {"cluster": "dgx_h200"}, "no speed of products with a scale for every 32 elements"),
        (None, {"training.precision": "fp8"}, "write precision: bf16"),
        ("te_current", {"training.freeze": ["norms"]}, "frozen weights in 8 bits are not simulated"),
    ],
)
def test_what_a_recipe_cannot_do_is_refused(fp8: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        workload(fp8, **changes)


def test_a_refused_gpu_is_not_proposed_for_the_recipe() -> None:
    """Scales for 32 elements are priced of Blackwell GPUs: the H100 has 8-bit units, and is none of them."""
    with pytest.raises(InputError) as caught:
        workload("te_mxfp8", cluster="dgx_h100")
    assert "h100-sxm-80gb has no speed" in caught.value.message
    assert caught.value.allowed == "null, or a GPU whose profile prices it: " + ", ".join(
        ("b200-sxm-180gb", "b300-sxm-288gb", "gb200-186gb", "gb300-288gb")
    )


def test_a_recipe_says_what_it_does() -> None:
    """Row scales forward alone; both backward products have their own kernel behind them."""
    lines = list(in_words(PRODUCT_RECIPES["torchao_rowwise"]))
    assert lines[0] == (
        "products of layers: forward with a scale for each row; "
        "input gradient, weight gradient with scales that another kernel applies"
    )
    assert "behind the product of the input gradient: rescale" in lines
    assert "behind the product of the weight gradient: rescale" in lines
    assert "kept: inputs in bf16; what a norm or an activation makes is made again" in lines
    assert "kept: 1.03 bytes for each element of an input" in list(in_words(PRODUCT_RECIPES["te_mxfp8"]))


def test_backward_passes_make_no_copies_that_are_kept_already() -> None:
    """Two copies of dy, a byte an element in 8 bits and its part of a scale, are made by each recipe.

    Transformer Engine has those of x and of W since the forward pass. Torchao makes one of each.
    """
    n, k = 256, 512

    def copied(name: str) -> float:
        z = shapes(workload(name))
        eight, plain = (
            linear(one, "attn", "q", n, k, split="column", saved="x") for one in (z, replace(z, product_recipe=None))
        )
        return eight.grad_bytes - plain.grad_bytes

    assert copied("te_delayed") == 2 * TOKENS * n
    assert copied("te_mxfp8") == 2 * (1 + 1 / 32) * TOKENS * n
    assert copied("te_nvfp4") == 2 * (1 / 2 + 1 / 16) * TOKENS * n
    assert copied("torchao_tensorwise") == 2 * TOKENS * n + TOKENS * k + n * k


def test_every_scale_of_a_recipe_is_one_that_profiles_know_and_has_words() -> None:
    assert {*get_args(OperandScales)} == {*UNSCALED, *get_args(Scaling)} == {*SCALES_IN_WORDS}
