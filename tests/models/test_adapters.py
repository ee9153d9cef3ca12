"""Adapters and frozen weights: parameters, kernels, what is kept for the backward pass, and quantized bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from simulator import models
from simulator.config import Workload
from simulator.models import Part, state_bytes, trained_parameters
from simulator.operations.weights import Weight, trained
from simulator.program import Matmul, kernels_of
from tests.support.small_llama import (
    ALL,
    FFN,
    HEADS,
    HIDDEN,
    LAYERS,
    MATRICES,
    OTHERS,
    SEQ,
    SIZES,
    VOCAB,
    adapted,
    load,
)


def layer(work: Workload, number: int = 1) -> Part:
    """A layer in the middle, into which gradients flow and out of which they do."""
    return models.layer(work, number=number)


def saved(part: Part) -> dict[str, float]:
    return {tensor.name: tensor.nbytes for tensor in part.saved}


def products(ops: Any) -> Counter[str]:
    return Counter(one.name for op in ops for one in kernels_of(op) if isinstance(one.kernel, Matmul))


# ---- Parameters


@pytest.mark.parametrize("targets", [["q"], ["q", "v"], ["o", "down"], ALL])
@pytest.mark.parametrize("tp", [1, 2])
def test_trained_parameters_are_rank_times_the_sides(targets: list[str], tp: int) -> None:
    """A is r x k and B is n x r: r (n + k) beside each matrix; all else is there as before, however it is split."""
    work = load(adapters=adapted(*targets), parallelism={"tp": tp})
    of_adapters = LAYERS * sum(4 * sum(SIZES[target]) for target in targets)
    assert trained_parameters(work) == of_adapters
    assert models.parameters(work) == MATRICES + OTHERS + of_adapters


def test_one_adapter_of_products_side_by_side() -> None:
    """One adapter of queries, keys and values has one A: r (k + n_q + n_k + n_v)."""
    work = load("megatron_core", adapters=adapted("qkv", "gate_up"))
    qkv, fc1 = (sum(SIZES[name][0] for name in names) for names in (("q", "k", "v"), ("gate", "up")))
    assert trained_parameters(work) == LAYERS * 4 * (2 * HIDDEN + qkv + fc1)


def test_dora_adds_a_magnitude_per_column() -> None:
    work = load(adapters=adapted("q", "down", method="dora"))
    sides, columns = (sum(rule(*SIZES[name]) for name in ("q", "down")) for rule in (int.__add__, lambda n, k: n))
    assert trained_parameters(work) == LAYERS * (4 * sides + columns)


def test_without_adapters_all_but_the_frozen_is_trained() -> None:
    frozen = load(freeze=["embedding", "norms"])
    assert models.parameters(frozen) == MATRICES + OTHERS
    assert trained_parameters(frozen) == MATRICES + VOCAB * HIDDEN
    assert trained_parameters(load(freeze=["embedding", "layers 0-1"])) == (
        MATRICES // LAYERS + 2 * HIDDEN + HIDDEN + VOCAB * HIDDEN
    )


def test_frozen_weights_have_no_gradients_and_no_states() -> None:
    """Weights of all, bf16; gradients of the adapters, fp32; of these fp32 masters and two fp32 moments."""
    work = load("megatron_core", adapters=adapted("q"))
    of_adapters = LAYERS * 4 * sum(SIZES["q"])
    state = state_bytes(work, 0)
    assert state.weights == 2 * (MATRICES + OTHERS + of_adapters)
    assert state.gradients == 4 * of_adapters
    assert state.optimizer == 12 * of_adapters


def test_adapters_in_fp32_have_no_masters() -> None:
    state = state_bytes(load("megatron_core", adapters=adapted("q", dtype="fp32")), 0)
    of_adapters = LAYERS * 4 * sum(SIZES["q"])
    assert state.weights == 2 * (MATRICES + OTHERS) + 4 * of_adapters
    assert state.optimizer == 8 * of_adapters


# ---- Quantized weights


def test_bytes_of_nf4_by_hand() -> None:
    """A block of 64 weights takes 32 bytes and a scale of one; 256 scales share 4 bytes: 0.127 bit a weight."""
    weight = Weight("w", (256, 64), (256, 64), "bf16", storage="nf4")
    assert weight.nbytes == 256 * 32 + 256 + 4
    assert 8 * (weight.nbytes / (256 * 64) - 0.5) == pytest.approx(0.127, abs=5e-4)


def test_products_of_layers_are_quantized_and_nothing_else() -> None:
    work = load(adapters=adapted("q"), base="nf4")
    of_adapters = LAYERS * 4 * sum(SIZES["q"])
    matrices = MATRICES * (0.5 + 1 / 64 + 4 / (64 * 256))
    assert state_bytes(work, 0).weights == pytest.approx(2 * (OTHERS + of_adapters) + matrices, rel=1e-12)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_weights_are_made_whole_before_each_product(recompute: str) -> None:
    """A layer has four matrices: queries, keys and values are one product, and so are gate and up. They are made whole
    forward, once more where that runs again, and for the gradients of inputs."""
    part = layer(load(adapters=adapted(*ALL), base="nf4", recompute=recompute))
    names = [f"{name} dequantize" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    for ops in (part.forward, part.input_grad, *([part.recompute] if recompute == "full" else [])):
        assert Counter(op.name for op in ops if op.name in names) == Counter(names)


# ---- Kernels


def test_products_of_a_layer_with_adapters() -> None:
    """Forward each product, A and B; backward the gradients of their inputs, and of weights those of A and B alone."""
    part = layer(load(adapters=adapted("q", "v", "down")))
    base = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    thin = [f"{name}.{side}" for name in ("attn.q", "attn.v", "mlp.down") for side in ("lora_A", "lora_B")]
    assert products(part.forward) == Counter([*base, *thin])
    assert products(part.input_grad) == Counter(f"{name} dgrad" for name in (*base, *thin))
    assert products(part.weight_grad) == Counter(f"{name} wgrad" for name in thin)


def test_sizes_of_thin_products() -> None:
    """y (32 x n) = (x (32 x k) A^T (k x 4)) B^T (4 x n), and the gradients of x A^T, x, B and A."""
    part = layer(load(adapters=adapted("down")))
    ops = {
        op.name: op.kernel for op in (*part.forward, *part.backward) if ".lora_" in op.name and "wgrad" not in op.name
    }
    sizes = {name: (kernel.m, kernel.n, kernel.k) for name, kernel in ops.items() if isinstance(kernel, Matmul)}
    assert sizes == {
        "mlp.down.lora_A": (SEQ, 4, FFN),
        "mlp.down.lora_B": (SEQ, HIDDEN, 4),
        "mlp.down.lora_B dgrad": (SEQ, 4, HIDDEN),
        "mlp.down.lora_A dgrad": (SEQ, FFN, 4),
    }


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("full", 1)])
def test_kernels_beside_thin_products(recompute: str, again: int) -> None:
    """PEFT's module multiplies by the scale and adds; backward it multiplies, and autograd adds two gradients of the
    input. Where a layer runs again, it ends before the last B. Llama 3 8B's 224 adapters have 448 products by the scale
    in a step, measured with PyTorch 2.11. With checkpoints they have 640, which is 224 - 32 more."""
    part = layer(load(adapters=adapted(*ALL), recompute=recompute))
    ops = (*part.forward, *part.recompute, *part.backward)
    assert sum(op.name.endswith((" scale", " scale bwd")) for op in ops) == 2 * len(ALL) + again * (len(ALL) - 1)
    assert sum(op.name.endswith(" input grad bwd") for op in ops) == len(ALL)
    assert ("mlp.fc2" in products(part.recompute)) == bool(again)
    assert "mlp.down.lora_B" not in products(part.recompute)


@pytest.mark.parametrize("targets", [["q"], ["down"]])
def test_gradients_end_at_the_first_trained_weight(targets: list[str]) -> None:
    """Nothing before the first adapter of the first layer has a gradient, nor keeps anything; in the second layer all
    has one."""
    work = load(adapters=adapted(*targets))
    first, second = layer(work, 0), layer(work, 1)
    before = {"q": (), "down": ("attn.qkv dgrad", "attn.proj dgrad", "mlp.fc1 dgrad")}[targets[0]]
    ends = {"q": ("attn.qkv dgrad", "attn.q.lora_A dgrad"), "down": ("mlp.fc2 dgrad", "mlp.down.lora_A dgrad")}[
        targets[0]
    ]
    gone = products(second.input_grad) - products(first.input_grad)
    assert gone == Counter((*before, *ends))
    assert "input" not in saved(first)
    assert "input" in saved(second)
    assert not models.embedding(work).backward
    assert not models.embedding(work).saved


def test_behind_the_first_stage_inputs_have_gradients() -> None:
    """A pipeline marks what it receives as needing a gradient."""
    work = load(freeze=["embedding", "layers 0-2"], parallelism={"pp": 3})
    assert not layer(work, 0).backward
    assert products(layer(work, 1).backward) == products(layer(work, 2).backward) != Counter()


def test_compiled_code_adds_as_it_goes() -> None:
    """Inductor adds an adapter's output where it reads the product's, in place of two kernels: one tensor more is read,
    one more written."""
    plain, compiled = (
        layer(load(stack, adapters=adapted("o"))) for stack in ("pytorch", {"name": "pytorch", "compile": True})
    )
    tensor = 2.0 * SEQ * HIDDEN
    assert [op.kernel.bytes for op in plain.forward if op.name.startswith("attn.o ")] == [2 * tensor, 3 * tensor]
    assert [op.kernel.bytes for op in compiled.forward if op.name.startswith("attn.o ")] == [2 * tensor]


# ---- What is kept


def test_what_one_layer_keeps_by_hand() -> None:
    """There are 32 tokens in bf16, 64 wide. Norms keep their inputs (2 x 64). Attention keeps its inputs and its output
    (64), with 4 bytes per head. Values stay a view of the one product of 64 + 2 x 32 columns. The activation
    keeps gate and up (256), and the activated gate (128). Products keep nothing. The adapter of queries keeps its
    input (64) and its 4 columns, that of the down projection its input (128) and its 4 columns."""
    kept = saved(layer(load(adapters=adapted("q", "down"), fused_rms_norm=True)))
    columns = {
        "input": 64,
        "attn.output": 64,
        "attn.q": 64,
        "attn.k": 32,
        "attn.v": 128,
        "attn.context": 64,
        "mlp.pre": 256,
        "mlp.gate": 128,
        "attn.normed": 64,
        "attn.q lora": 4,
        "mlp.act": 128,
        "mlp.down lora": 4,
    }
    assert kept == {name: 2.0 * SEQ * width for name, width in columns.items()} | {"attn.lse": 4.0 * SEQ * HEADS}


def test_dropout_keeps_a_copy_and_a_mask_for_each_adapter() -> None:
    without, with_dropout = (
        saved(layer(load(adapters=adapted("q", "k", dropout=rate), fused_rms_norm=True))) for rate in (0.0, 0.1)
    )
    added = {name: nbytes for name, nbytes in with_dropout.items() if name not in without}
    elements = float(SEQ * HIDDEN)
    assert added == {
        f"attn.{one} {what}": size * elements for one in "qk" for what, size in (("dropped", 2), ("mask", 1))
    }
    assert "attn.normed" in without
    assert "attn.normed" not in with_dropout


def test_a_pass_of_weight_gradients_needs_what_adapters_need() -> None:
    """The second half of a split backward pass needs the adapters' inputs, and the gradients of A's and B's results.
    It needs nothing of frozen products and norms."""
    part = layer(load("megatron_core", adapters=adapted("down"), parallelism={"pp": 3, "schedule": "zb_h1"}))
    held = {tensor.name: tensor.nbytes for tensor in part.held_for_weights}
    assert held == {
        "mlp.act": 2.0 * SEQ * FFN,
        "mlp.down lora": 2.0 * SEQ * 4,
        "output gradient 0": 2.0 * SEQ * 4,
        "output gradient 1": 2.0 * SEQ * HIDDEN,
    }


# ---- Over tensor-parallel ranks


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_split_as_the_products_beside_which_they_stand(sequence_parallel: bool) -> None:
    """B is split beside queries, A beside the output projection. Between A and B ranks exchange 4 columns. Where they
    have rows of their own these are gathered before B, or summed as they are spread; so are their gradients."""
    work = load(
        "megatron_core",
        adapters=adapted("q", "o"),
        parallelism={"tp": 2, "sequence_parallel": sequence_parallel},
    )
    part, rows = layer(work), sequence_parallel
    small = [(op.op.value, op.nbytes) for ops in (part.forward, part.input_grad) for op in ops if _thin(op)]
    gathered, summed = ("all_gather", 2.0 * SEQ * 4), ("reduce_scatter" if rows else "all_reduce", 2.0 * SEQ * 4)
    forward = [gathered, summed] if rows else [summed]
    assert small == [*forward, *forward]


def _thin(op: Any) -> bool:
    return getattr(op, "nbytes", 0.0) == 2.0 * SEQ * 4


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_each_rank_has_its_part_of_adapters(tp: int, sequence_parallel: bool) -> None:
    """Adapters have rank 4. Beside a product that is split by columns B has n / tp rows, and every rank has all of A.
    Beside one split by rows A has k / tp columns, and every rank has all of B. Keys and values of 2 heads give a rank
    one head of 16, which with tp=4 two ranks hold. With sequence parallelism what all ranks hold has seen a part of the
    rows on each. Name -> shape, shape in the model, whether split, rows of which a rank has a part of the gradient."""
    work = load(adapters=adapted(*ALL), parallelism={"tp": tp, "sequence_parallel": sequence_parallel})
    expected, rows = {}, sequence_parallel
    for target, (n, k) in SIZES.items():
        block = "attention" if target in ("q", "k", "v", "o") else "mlp"
        a, b = (f"{block}.{target}.lora_{side}.weight" for side in "AB")
        if target in ("o", "down"):
            expected[a] = (4, k // tp), (4, k), ("tp",), 0
            expected[b] = (n, 4), (n, 4), (), rows * n
        else:
            shared = target in ("k", "v") and tp == 4
            expected[a] = (4, k), (4, k), (), rows * 4
            expected[b] = (16 if shared else n // tp, 4), (n, 4), ("tp",), 16 if shared else 0
    found = {
        one.name: (one.shape, one.whole, one.sharded_over, one.partial_rows) for one in trained(layer(work).weights)
    }
    assert found == expected
