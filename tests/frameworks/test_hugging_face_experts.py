"""Experts of Hugging Face's modules: kernels counted by hand from transformers' source, and what they keep."""

from __future__ import annotations

from simulator import models
from simulator.config import Workload
from simulator.program import Compute, GroupedMatmul, Memory
from tests.support.exact import compare
from tests.support.hugging_face import FIRST, HEAD_DIM, HEADS, HIDDEN, HUGGING_FACE, KV_HEADS, MIXTRAL, TOKENS, load

EXPERTS, TOP_K, FFN = 4, 2, 64
SENT = TOKENS * TOP_K


def memory_kernels(work: Workload, kind: str) -> dict[str, Memory]:
    """Memory-bound kernels of a layer's pass by name."""
    part = models.layer(work, turn=FIRST)
    return {op.name: op.kernel for op in part.ops(kind) if isinstance(op, Compute) and isinstance(op.kernel, Memory)}


def test_products_are_grouped() -> None:
    """One kernel each way for gate and up of all experts, and one for down; a weight gradient each."""
    part = models.layer(load(MIXTRAL), turn=FIRST)
    grouped = [op for kind in "FB" for op in part.ops(kind) if isinstance(op, Compute)]
    sizes = [(op.kernel.n, op.kernel.k) for op in grouped if isinstance(op.kernel, GroupedMatmul)]
    fc1, fc2 = (2 * FFN, HIDDEN), (HIDDEN, FFN)
    assert sorted(sizes) == sorted([fc1, fc2, fc1[::-1], fc2[::-1], fc1, fc2])


def test_the_host_waits_for_no_count() -> None:
    """Grouped products read the sizes of their groups on the GPU."""
    part = models.layer(load(MIXTRAL), turn=FIRST)
    assert not any(op.host_waits for kind in "FB" for op in part.ops(kind) if isinstance(op, Compute))


def test_rows_are_masked_around_each_product() -> None:
    """Gathered rows in place, what either product gives out of place, and so are the three gradients: a mask each, and
    a copy for five of them."""
    forward, backward = (memory_kernels(load(MIXTRAL), kind) for kind in "FB")
    assert [name for name in forward if name.endswith("mask")] == [
        "moe.permute mask",
        "moe.swiglu mask",
        "moe.unpermute mask",
    ]
    assert [name for name in backward if "mask" in name] == [
        "moe.unpermute bwd mask",
        "moe.swiglu mask bwd",
        "moe.permute bwd mask",
    ]
    whole = forward["moe.swiglu mask"], backward["moe.swiglu mask bwd"]
    assert [kernel.write_bytes for kernel in whole] == [2 * SENT * 2 * FFN] * 2


def test_gate_and_up_of_experts_are_halves_of_rows() -> None:
    """Unlike those of a dense MLP, they come from one product, and their gradients are joined for it."""
    forward, backward = (memory_kernels(load(MIXTRAL), kind) for kind in "FB")
    assert (forward["moe.swiglu"].op, forward["moe.swiglu gate"].op) == ("strided", "strided")
    assert backward["moe.swiglu join bwd"].write_bytes == 2 * SENT * 2 * FFN


def test_weights_of_mixtral_stay_in_fp32_and_those_of_qwen3_are_cast() -> None:
    """Rows times fp32 are fp32. They are gathered and summed so, and the sum is cast."""
    mixtral, qwen3 = (memory_kernels(load(MIXTRAL | {"qk_norm": norm}), "F") for norm in (False, True))
    rows = SENT * HIDDEN
    assert (mixtral["moe.weigh"].write_bytes, qwen3["moe.weigh"].write_bytes) == (4 * rows, 2 * rows)
    assert (mixtral["moe.unpermute"].write_bytes, qwen3["moe.unpermute"].write_bytes) == (4 * rows, 2 * rows)
    assert "moe.sum cast" in mixtral
    assert "moe.sum cast" not in qwen3


def test_bytes_that_a_layer_keeps() -> None:
    """Two norms keep 6 bytes of each element of a row, and what they give has 2 more: 16. Attention keeps queries,
    keys, values and its output, and a number in fp32 per head and token; the router a probability for each expert.
    Of each copy of a token experts keep its row, gate and up, SiLU's result, their product, and what they give. Its
    order and the way back are 8 bytes each, its weight is there twice in fp32, and a byte says whether it is masked."""
    part = models.layer(load(MIXTRAL))
    token = 16 * HIDDEN + 2 * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM + 4 * HEADS + 4 * EXPERTS
    copy = 2 * HIDDEN + 2 * 2 * FFN + 2 * FFN + 2 * FFN + 2 * HIDDEN + 2 * 8 + 2 * 4 + 1
    assert part.saved_bytes == TOKENS * token + SENT * copy


def test_the_routers_product_is_in_the_working_precision() -> None:
    work = load(MIXTRAL)
    assert work.model.moe is not None
    assert work.model.moe.router_dtype == "bf16"


def test_shortcuts_change_nothing() -> None:
    compare({"dp": 2}, framework=HUGGING_FACE, model=MIXTRAL, cluster="hgx_h200_8gpu")
