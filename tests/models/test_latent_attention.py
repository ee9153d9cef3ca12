"""Latent attention: sizes of its products, bytes of its positions, and what its ranks hold and exchange.

A layer works on 128 tokens, 256 wide, in bf16. Each of 8 heads has queries and keys of 32 elements without a position
and 16 with one, and values of 32. Queries are compressed to 96 elements, keys and values to 64.
"""

from __future__ import annotations

from typing import Any

import pytest

from simulator.config import load_workload
from simulator.models.latent_attention import latent, latent_projections, up_inputs
from simulator.models.shapes import shapes
from simulator.operations.nodes import Node, Ops
from simulator.program import Collective, Compute, Matmul
from tests.support.experts import MLA, job
from tests.support.frameworks import MEGATRON
from tests.support.layers import products, traffic

TOKENS, HIDDEN, Q, KV = 128, 256, 96, 64


def halves(mla: dict[str, Any] = MLA, **changes: Any) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Return the operations before compressed forms are normed, and those from there on."""
    work = load_workload(job(model__mla=mla, **changes))
    sizes = latent(work)
    assert sizes is not None
    return latent_projections(shapes(work), sizes)


def streams(ops: Ops) -> list[tuple[str, float, float]]:
    """Name, elements read and elements written of each kernel that memory bounds; elements have 2 bytes."""
    return [(name, read / 2, written / 2) for name, read, written in traffic(ops)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_compressing_products_have_a_ranks_rows_and_expanding_ones_its_heads(tp: int) -> None:
    """A rank has 8 / tp heads, each 48 wide in queries, and 32 + 32 in keys and values. Compressed keys and values
    have the 16 elements with a position beside them. Input gradients have the sizes of y and x exchanged; weight
    gradients are n x k over the rows."""
    rows, heads = TOKENS // tp, 8 // tp
    down, up = halves(parallelism={"tp": tp})
    sizes = {"q_down": (rows, Q, HIDDEN), "kv_down": (rows, KV + 16, HIDDEN)}
    sizes |= {"q_up": (TOKENS, heads * 48, Q), "kv_up": (TOKENS, heads * 64, KV)}
    for name, (m, n, k) in sizes.items():
        (node,) = [node for node in (*down, *up) if f"attn.{name}" in products(node.forward)]
        assert products(node.forward) == {f"attn.{name}": (m, n, k)}
        assert products(node.input_grad) == {f"attn.{name} dgrad": (m, k, n)}
        assert products(node.weight_grad) == {f"attn.{name} wgrad": (n, k, m)}
        (weight,) = node.weights
        whole = (n, k) if name.endswith("down") else (n * tp, k)
        assert (weight.shape, weight.whole) == ((n, k), whole)
        # Each rank has a part of the sum for what all of them hold, as each has seen its own rows.
        assert weight.partial_rows == (n if name.endswith("down") and tp > 1 else 0)


def test_queries_that_are_not_compressed_are_one_product() -> None:
    down, up = halves({**MLA, "q_lora_rank": None})
    assert [name for node in down for name in products(node.forward)] == ["attn.kv_down"]
    assert [products(node.forward) for node in up if products(node.forward)] == [
        {"attn.q": (TOKENS, 8 * 48, HIDDEN)},
        {"attn.kv_up": (TOKENS, 8 * 64, KV)},
    ]
    assert [tensor.name for tensor in up_inputs(up)] == ["attn.normed", "attn.kv_compressed"]


def test_the_input_has_two_gradients_to_add_up() -> None:
    """Both products read the normed rows: two tensors of 128 x 256 are read, one is written."""
    (add, *_), up = halves()
    assert streams(add.input_grad) == [("attn.input grad", 2 * TOKENS * HIDDEN, TOKENS * HIDDEN)]
    assert add.grad_bytes == 2 * (2 * TOKENS * HIDDEN)
    assert [tensor.name for tensor in up_inputs(up)] == ["attn.q_compressed", "attn.kv_compressed"]
    assert [tensor.nbytes for tensor in up_inputs(up)] == [2 * TOKENS * Q, 2 * TOKENS * KV]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fused_positions_make_heads_of_keys_from_one_shared_part(tp: int) -> None:
    """The 16 elements of each head of queries are turned in place. One kernel for keys and values reads what was
    expanded, 32 + 32 a head, and the 16 elements that all heads share. It writes 48 + 32 a head. Backward it reads
    these and writes those. With tp > 1 each rank has a part of the rows of the shared 16, which are gathered, and whose
    gradients are summed."""
    heads = 8 // tp
    rope = halves(parallelism={"tp": tp}, framework=MEGATRON)[1][-1]
    q, expanded, made = heads * 16 * TOKENS, (heads * 64 + 16) * TOKENS, heads * (48 + 32) * TOKENS
    assert streams(rope.forward) == [("attn.rope q", q, q), ("attn.rope kv", expanded, made)]
    assert streams(rope.input_grad) == [("attn.rope q bwd", q, q), ("attn.rope kv bwd", made, expanded)]
    exchanged = [
        [(op.op, op.nbytes) for op in ops if isinstance(op, Collective)] for ops in (rope.forward, rope.input_grad)
    ]
    shared = 2 * 16 * TOKENS
    assert exchanged == ([[("all_gather", shared)], [("reduce_scatter", shared)]] if tp > 1 else [[], []])
    # Queries, keys and values beside what was expanded to keys and values.
    assert rope.grad_bytes == 2 * TOKENS * heads * (48 + 48 + 32 + 64)


def test_positions_by_operations_turn_both_parts_and_join_them() -> None:
    """torchtitan turns queries' 8 x 16 elements and the 16 of the keys as complex numbers in fp32. A cast reads 2 bytes
    and writes 4 for each, the product reads and writes 4, and a cast goes back. Then heads of 48 of queries and of keys
    are joined, and values of 32 copied."""
    rope = halves(framework="torchtitan", training__optimizer={"master_weights": False})[1][-1]
    turned = [
        (f"attn.rope {name} {step}{{}}", read * width * TOKENS, written * width * TOKENS)
        for name, width in (("q", 8 * 16), ("k", 16))
        for step, read, written in (("float", 1, 2), ("complex", 2, 2), ("cast", 2, 1))
    ]
    joined = [("attn.q join{}", 8 * 48), ("attn.k join{}", 8 * 48), ("attn.v copy{}", 8 * 32)]
    every = [*turned, *((name, width * TOKENS, width * TOKENS) for name, width in joined)]
    for ops, suffix in ((rope.forward, ""), (rope.input_grad, " bwd")):
        assert streams(ops) == [(name.format(suffix), read, written) for name, read, written in every]


@pytest.mark.parametrize("fused", [True, False])
def test_compressing_products_hold_gradients_of_both_ends(fused: bool) -> None:
    """Backward x and y have gradients, of 128 x 256 and 128 x n elements. A weight gradient that is not added up in its
    product is there too, in the 2 bytes of the weight. Kept are the normed rows."""
    down = halves(training__gradient_accumulation_fusion=fused)[0]
    for node, n in zip(down[1:], (Q, KV + 16), strict=True):
        new = 0 if fused else 2 * n * HIDDEN
        assert node.output_grad_bytes == 2 * TOKENS * n
        assert node.weight_grad_bytes == new
        assert node.grad_bytes == 2 * TOKENS * (HIDDEN + n) + new
        assert [(tensor.name, tensor.nbytes) for tensor in node.saved] == [("attn.normed", 2 * TOKENS * HIDDEN)]
        # Two gradients are read, of 2 bytes and of fp32, and one of fp32 is written.
        added = [] if fused else [(n * HIDDEN * (1 + 2), n * HIDDEN * 2)]
        assert [sizes for _, *sizes in streams(node.weight_grad)] == [list(one) for one in added]


def test_compressing_products_are_in_8_bits_and_each_casts_and_keeps_the_rows_for_itself() -> None:
    """A copy of the normed rows has a byte for each of its 128 x 256 elements, or of a rank's 64 rows. Transformer
    Engine's layers know nothing of each other, so that there are two."""
    for tp in (1, 2):
        down, up = halves(parallelism={"tp": tp}, framework=MEGATRON, training__fp8="te_delayed", cluster="dgx_h100")
        made = [node for node in (*down, *up) if products(node.forward)]
        kernels = [
            op.kernel
            for node in made
            for op in (*node.forward, *node.input_grad, *node.weight_grad)
            if isinstance(op, Compute) and isinstance(op.kernel, Matmul)
        ]
        assert [kernel.dtype for kernel in kernels] == ["fp8"] * 12
        casts = [name for node in down for name, *_ in streams(node.forward) if "input" in name]
        assert casts == ["attn.q_down input cast both ways", "attn.kv_down input cast both ways"]
        kept = {tensor.name: tensor.nbytes for node in down for tensor in node.saved}
        copy = TOKENS / tp * HIDDEN
        assert kept == {"attn.q_down input in 8 bits": copy, "attn.kv_down input in 8 bits": copy}
