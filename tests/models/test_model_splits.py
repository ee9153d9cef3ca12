"""Communication, kernels and traffic of a rank's share of a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from simulator import models
from simulator.models import Turn
from simulator.operations.weights import elements
from simulator.program import Attention, Comm, Compute, Matmul, Memory
from tests.support.frameworks import COMPILED, MEGATRON, PYTORCH, STACKS
from tests.support.grids import every_pair
from tests.support.layers import GELU, LLAMA, SIZES, make, vector


def comms(ops: Iterable[object]) -> list[tuple[str, float]]:
    return [(op.op, op.nbytes) for op in ops if isinstance(op, Comm)]


def matmuls(ops: Iterable[object], role: str, *, batched: bool) -> list[Matmul]:
    kernels = [op.kernel for op in ops if isinstance(op, Compute)]
    return [k for k in kernels if isinstance(k, Matmul) and k.role == role and (k.batch > 1) == batched]


def traffic(ops: Iterable[object], name: str) -> tuple[float, float]:
    """Bytes read and written by the one memory kernel called ``name``."""
    (kernel,) = (op.kernel for op in ops if isinstance(op, Compute) and op.name == name)
    assert isinstance(kernel, Memory)
    return kernel.read_bytes, kernel.write_bytes


# --- communication ---


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
@pytest.mark.parametrize("t", [2, 4, 8])
@pytest.mark.parametrize("model_keys", [GELU, LLAMA])
def test_tensor_parallel_volumes(s: int, b: int, h: int, a: int, t: int, model_keys: dict[str, Any]) -> None:
    """Two all-reduces of b s h elements forward and two backward; a ring all-reduce of n bytes sends 2 n (t-1)/t, so 8
    b s h elements move for large t; two more all-reduces under full recomputation."""
    message = 2.0 * b * s * h
    settings = {"tp": t, "sequence_parallel": False, "recompute": "full", **model_keys}
    part = models.layer(make(s, b, h, a, **settings))
    for ops in (part.forward, part.recompute, part.backward, part.input_grad):
        assert comms(ops) == [("all_reduce", message)] * 2
    assert comms(part.weight_grad) == []
    sent = sum(2 * nbytes for _, nbytes in comms((*part.forward, *part.backward)))
    assert sent == 8 * b * s * h * 2


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
@pytest.mark.parametrize("t", [2, 4, 8])
def test_sequence_parallel_volumes(s: int, b: int, h: int, a: int, t: int) -> None:
    """Each all-reduce becomes an all-gather and a reduce-scatter of the same message (together as many bytes); the
    shards of the two column products' inputs are gathered once more for their weight gradients."""
    part = models.layer(make(s, b, h, a, tp=t, recompute="full", **GELU))
    message = 2.0 * b * s * h
    pair = [("all_gather", message), ("reduce_scatter", message)]
    assert comms(part.forward) == comms(part.recompute) == pair * 2
    assert comms(part.input_grad) == pair * 2
    assert comms(part.weight_grad) == [("all_gather", message)] * 2
    assert Counter(comms(part.backward)) == Counter(pair * 2 + [("all_gather", message)] * 2)


@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_vocabulary_parallel_communication(position: str, sequence_parallel: bool) -> None:
    """Lookup results are summed (scattered where no positions have to be added first), their gradients gathered where
    they were scattered. The loss all-reduces three fp32 numbers per token."""
    s, b, h, a = SIZES[0]
    work = make(s, b, h, a, tp=4, sequence_parallel=sequence_parallel, position=position)
    embedding, head = models.embedding(work), models.head(work)
    message, numbers = 2.0 * b * s * h, [("all_reduce", 4.0 * b * s)] * 3
    scattered = sequence_parallel and position == "rope"
    assert comms(embedding.forward) == [("reduce_scatter" if scattered else "all_reduce", message)]
    assert comms(embedding.backward) == ([("all_gather", message)] if sequence_parallel else [])
    if sequence_parallel:
        assert comms(head.forward) == [("all_gather", message), *numbers]
        assert comms(head.backward) == [("all_gather", message), ("reduce_scatter", message)]
    else:
        assert comms(head.forward) == numbers
        assert comms(head.backward) == [("all_reduce", message)]


@pytest.mark.parametrize("framework", [PYTORCH, MEGATRON])
def test_a_split_vocabulary_as_pytorch_launches_it(framework: Any) -> None:
    """Eager: rows of foreign words are filled under a mask, forward and backward, in all of the result; what takes from
    logits a number per row, divides by one, or scales all has no vector loads. Megatron zeroes the foreign rows."""
    s, b, h, a = SIZES[0]
    work = make(s, b, h, a, tp=4, sequence_parallel=False, framework=framework)
    embedding, head = models.embedding(work), models.head(work)
    found = {
        op.name: op.kernel
        for op in (*embedding.forward, *embedding.backward, *head.forward, *head.backward)
        if isinstance(op, Compute) and isinstance(op.kernel, Memory)
    }
    whole = 2.0 * b * s * h
    masks = {name: (k.op, k.read_bytes, k.write_bytes) for name, k in found.items() if "embedding.mask" in name}
    by_row = [found[f"loss.{name}"].op for name in ("subtract", "normalise", "bwd")]
    if framework == PYTORCH:
        assert masks == dict.fromkeys(("embedding.mask", "embedding.mask bwd"), ("mask", whole, whole))
        assert by_row == ["strided"] * 3
    else:
        assert masks == {"embedding.mask": ("embedding", 0, whole * 3 / 4)}
        assert by_row == ["residual"] * 3


def test_whole_vocabulary_on_every_rank_needs_no_sums() -> None:
    s, b, h, a = SIZES[0]
    work = make(s, b, h, a, tp=4, sequence_parallel=False, vocab_parallel=False)
    for part in (models.embedding(work), models.head(work)):
        assert comms((*part.forward, *part.backward)) == []
    split = make(s, b, h, a, tp=4, sequence_parallel=False)
    assert elements(models.embedding(work).weights) - s * h == 4 * (elements(models.embedding(split).weights) - s * h)


@pytest.mark.parametrize("model_keys", [GELU, LLAMA])
def test_one_rank_does_not_communicate(model_keys: dict[str, Any]) -> None:
    work = make(*SIZES[0], recompute="full", grad_clip=1.0, **model_keys)
    for part in models.stage_parts(work, 0):
        assert comms((*part.forward, *part.recompute, *part.backward)) == []
    assert comms(models.optimizer_ops(work, vector(1000))) == []
    assert models.replicated_gradient_ops(work, models.weights_of(models.stage_parts(work, 0))) == ()


# --- kernels ---


@every_pair(
    {
        "framework": STACKS,
        "t": [1, 2],
        "sequence_parallel": [False, True],
        "model_keys": [GELU, {}, LLAMA, {**LLAMA, "attention": "unfused", "kv_heads": 2}, {"activation": "relu"}],
    }
)
def test_unsplit_backward_is_input_and_weight_gradients(
    framework: Any, t: int, sequence_parallel: bool, model_keys: dict[str, Any]
) -> None:
    """The same kernels in another order, each with its phase; and the recomputation is the forward pass again, in plain
    PyTorch up to what the backward pass needs: not the last sum, nor the product before it unless it is split."""
    work = make(
        *SIZES[0],
        framework=framework,
        tp=t,
        sequence_parallel=sequence_parallel,
        recompute="full",
        **model_keys,
    )
    for part in models.stage_parts(work, 0):
        assert Counter(part.backward) == Counter((*part.input_grad, *part.weight_grad))
        for ops, phase in ((part.forward, "F"), (part.input_grad, "B"), (part.weight_grad, "W"), (part.recompute, "R")):
            assert {op.phase for op in ops if isinstance(op, Compute)} <= {phase}
    layer = models.layer(work)
    again, whole = ([op.name for op in ops] for ops in (layer.recompute, layer.forward))
    assert again == whole[: len(again)]
    stops = framework == PYTORCH and not work.model.dropout
    left = {name for name in whole[len(again) :] if name.startswith("mlp")}
    assert left == ({"mlp.residual"} | ({"mlp.fc2"} if t == 1 else {"mlp.fc2 bias"} & set(whole)) if stops else set())
    names = [op.name for op in layer.forward if isinstance(op, Compute)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("model_keys", [GELU, {**LLAMA, "attention": "unfused"}])
@pytest.mark.parametrize("t", [1, 4])
def test_gradients_of_products_cost_what_the_products_do(model_keys: dict[str, Any], t: int) -> None:
    """dX = dY W and dW = dY^T X are permutations of Y = X W^T: the same m n k. So are both gradients of a batched
    product in attention. dgrad of a linear layer follows its forward with n and k exchanged."""
    for part in models.stage_parts(make(*SIZES[1], tp=t, **model_keys), 0):
        for batched in (False, True):
            forward = matmuls(part.forward, "fwd", batched=batched)
            for role in ("dgrad", "wgrad"):
                gradients = matmuls(part.backward, role, batched=batched)
                assert sorted(k.flops for k in gradients) == sorted(k.flops for k in forward)
        linear = matmuls(part.forward, "fwd", batched=False)
        assert [(k.m, k.k, k.n) for k in linear] == [
            (k.m, k.n, k.k) for k in reversed(matmuls(part.backward, "dgrad", batched=False))
        ]


def test_backward_interleaves_gradients_layer_by_layer() -> None:
    """Megatron's order with sequence parallelism: fc2's input gradient after gathering dY, then its weight gradient;
    fc1's saved input is gathered before its input gradient, which is scattered before the weight gradient."""
    layer = models.layer(make(*SIZES[0], tp=2))
    wanted = ("tp.", "mlp.fc1 ", "mlp.fc2 ")
    names = [
        op.name for op in layer.backward if op.name.startswith(wanted) and not op.name.endswith(("bias grad", "add"))
    ]
    assert names[:7] == [
        "tp.all_gather mlp",
        "mlp.fc2 dgrad",
        "mlp.fc2 wgrad",
        "tp.all_gather mlp",
        "mlp.fc1 dgrad",
        "tp.reduce_scatter mlp",
        "mlp.fc1 wgrad",
    ]


@pytest.mark.parametrize("t", [1, 2, 8])
def test_products_of_a_rank(t: int) -> None:
    """Column products have n, row products k split over tp; tokens are never split, not even with sequence
    parallelism."""
    s, b, h, a = SIZES[1]
    work = make(s, b, h, a, tp=t, kv_heads=a // 8, ffn_hidden=3 * h, **LLAMA)
    kv = max(1, a // 8 // t) * (h // a)  # two KV heads on eight ranks are replicated, one to a rank
    products = matmuls(models.layer(work).forward, "fwd", batched=False)
    assert [(k.m, k.n, k.k) for k in products] == [
        (s * b, h // t + 2 * kv, h),
        (s * b, h, h // t),
        (s * b, 2 * 3 * h // t, h),
        (s * b, h, 3 * h // t),
    ]
    (flash,) = (op.kernel for op in models.layer(work).forward if op.name == "attn.flash" and isinstance(op, Compute))
    assert flash == Attention(b, a // t, kv // (h // a), s, s, h // a, dtype="fp16")


@pytest.mark.parametrize("framework", STACKS)
@pytest.mark.parametrize("grad_dtype", ["fp32", "fp16"])
def test_weight_gradients_are_accumulated(framework: Any, grad_dtype: str) -> None:
    """Fused: the product adds to the buffer. Otherwise it writes fp16 and a kernel reads that and the buffer, writes
    the buffer: (2 + 2 g) bytes per weight."""
    work = make(*SIZES[0], framework=framework, grad_dtype=grad_dtype)
    layer = models.layer(work)
    products = matmuls(layer.weight_grad, "wgrad", batched=False)
    adds = [op for op in layer.weight_grad if op.name.endswith("fc1 grad add")]
    if framework == MEGATRON:
        assert all(k.accumulate and k.out_dtype == grad_dtype for k in products)
        assert adds == []
    else:
        assert not any(k.accumulate or k.out_dtype for k in products)
        g, weights = (4 if grad_dtype == "fp32" else 2), products[1].m * products[1].n
        assert traffic(layer.weight_grad, "mlp.fc1 grad add") == ((2 + g) * weights, g * weights)


def test_a_single_micro_batch_needs_no_accumulation_in_autograd() -> None:
    """Autograd keeps the first gradient of a step as it is, where gradients are in working precision."""
    work = make(*SIZES[0], framework=PYTORCH, grad_dtype="fp16", global_batch=1)
    assert not [op for op in models.layer(work, turn=Turn(first=True)).weight_grad if op.name.endswith("grad add")]


def test_fusion_saves_traffic_and_kernels() -> None:
    """With SwiGLU, dropout and flash attention: fewer bytes and kernels from eager to fused, and again to compiled."""
    moved, launched = [], []
    for framework in (PYTORCH, MEGATRON, COMPILED):
        layer = models.layer(make(*SIZES[1], framework=framework, dropout=0.1, **LLAMA))
        kernels = [op.kernel for op in (*layer.forward, *layer.input_grad) if isinstance(op, Compute)]
        moved.append(sum(kernel.bytes for kernel in kernels if isinstance(kernel, Memory)))
        launched.append(len(kernels))
    assert moved == sorted(set(moved), reverse=True)
    assert launched == sorted(launched, reverse=True)


@pytest.mark.parametrize("framework", STACKS)
def test_traffic_of_the_memory_kernels(framework: Any) -> None:
    """Counted by hand for one LayerNorm, GELU, dropout layer of x = 2 s b h bytes and masks of x / 2."""
    s, b, h, a = SIZES[0]
    x, square = 2 * s * b * h, 2 * a * b * s * s
    layer = models.layer(make(s, b, h, a, framework=framework, **GELU))
    assert traffic(layer.forward, "attn.norm") == (x, x)
    assert traffic(layer.forward, "mlp.gelu") == (4 * x, 4 * x)
    assert traffic(layer.backward, "mlp.gelu bwd") == (8 * x, 4 * x)
    assert traffic(layer.backward, "mlp.dropout bwd") == (x + x / 2, x)
    assert traffic(layer.backward, "attn.probs dropout bwd") == (square * 1.5, square)
    if framework == MEGATRON:
        # Branch and residual in, sum and mask out; the causal softmax reads the lower triangle.
        assert traffic(layer.forward, "mlp.residual") == (2 * x, 1.5 * x)
        assert traffic(layer.forward, "attn.softmax") == (square / 2, square)
        assert traffic(layer.backward, "mlp.norm bwd") == (2 * x, x)
    if framework == PYTORCH:
        assert traffic(layer.forward, "mlp.dropout") == (x, 1.5 * x)
        assert traffic(layer.forward, "mlp.residual") == (2 * x, x)
    if framework == COMPILED:
        # The sum is written for the backward pass but not read again by the norm; its gradient takes in the residual's.
        assert traffic(layer.forward, "attn.residual + mlp.norm") == (2 * x, 2.5 * x)
        assert traffic(layer.backward, "mlp.norm bwd + mlp.norm residual grad") == (3 * x, x)
        assert traffic(layer.forward, "attn.softmax + attn.probs dropout") == (square, 2.5 * square)
