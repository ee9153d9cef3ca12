"""Attention over whole sequences: from queries, keys and values to the context."""

from __future__ import annotations

from dataclasses import replace

from simulator.models.linear import add_gradient
from simulator.models.shapes import FrameworkShapes
from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.weights import Weight
from simulator.program import Attention, Compute, Matmul, StepPhase

#: Bytes of an element of statistics.
FP32 = 4


def split_qkv(z: FrameworkShapes) -> Node:
    """Return the split of one product's output into queries, keys and values, which are views of it.

    Their gradients are joined by a copy, as far as they are not written side by side.
    """
    # Values that are the keys have no gradient of their own to join.
    joined = max(z.framework.joined_qkv_width(z) - (z.v_width - z.projected_v_width), 0)
    if not joined:
        return Node()
    copied = z.element * z.tokens * joined
    width = z.q_width + z.kv_width + z.projected_v_width
    kernel = z.framework.joined_qkv_kernel(z)
    return Node(
        input_grad=(memory("B", "attn.qkv join", kernel, copied, copied, z.dtype),),
        grad_bytes=2.0 * z.element * z.tokens * width,
    )


def attention_inputs(z: FrameworkShapes) -> tuple[Tensor, ...]:
    """Return queries, keys and values as tensors that attention keeps.

    Where operations rotate queries and keys, values stay a view of the product that made all three. They then keep the
    whole of its output, unless norms of queries and keys keep the rest of it already.
    """
    k_width, v_width = (z.q_width, z.context_width) if z.framework.masks_by_bias else (z.kv_width, z.v_width)
    q, k, v = (float(z.element * z.tokens * width) for width in (z.q_width, k_width, v_width))
    if z.framework.repeats_keys and z.kv_heads < z.heads:
        return (Tensor("attn.q", q), Tensor("attn.k expanded", q), Tensor("attn.v expanded", q))
    turned = z.framework.rotates_by_operations and z.position == "rope"
    is_view = z.framework.joins_projections(z.position) and z.v_head_dim == z.head_dim
    kept_by_norms = z.qk_norm and not z.norm_by_operations
    if turned and is_view and not kept_by_norms:
        v += q + k
    return (Tensor("attn.q", q), Tensor("attn.k", k), Tensor("attn.v", v))


def whole_attention(z: FrameworkShapes, *, context: str) -> tuple[Node, ...]:
    """Return the attention of ranks that have whole sequences; ``context`` names its result."""
    if z.attention != "flash":
        return _unfused(z)
    return (*repeated_keys(z), _flash(z, context)) if z.framework.repeats_keys else (_flash(z, context),)


def flash_saved(z: FrameworkShapes, context: str) -> tuple[Tensor, ...]:
    """Return the tensors that flash attention keeps (arXiv 2205.14135).

    They are its inputs, its output, and a log-sum-exp in fp32 per head and query.
    """
    output = float(z.element * z.tokens * z.context_width)
    return (*attention_inputs(z), Tensor(context, output), Tensor("attn.lse", 4.0 * z.tokens * z.heads))


def flash_kernel(z: FrameworkShapes, length: int, *, window: int = 0) -> Attention:
    """Return the forward kernel over ``length`` queries and keys."""
    value_width = z.v_head_dim if z.v_head_dim != z.head_dim else 0
    biased = z.framework.masks_by_bias
    kv_heads = z.heads if biased or z.framework.repeats_keys else z.kv_heads
    sizes = (z.batch, z.heads, kv_heads, length, length, z.head_dim)
    kernel = Attention(
        *sizes,
        dtype=z.dtype,
        window=window,
        v_head_dim=value_width,
        dropout=z.dropout > 0,
        sinks=z.sinks,
        softcap=z.softcap,
    )
    return replace(kernel, causal=False, window=0, bias=True) if biased else kernel


def _flash(z: FrameworkShapes, context: str) -> Node:
    """Return flash attention: one kernel each way.

    Gradients of sinks follow from the log-sum-exp and the products of outputs with their gradients, a number each for
    every head and query (TransformerEngine 2.8, ``softmax_offset``).
    """
    forward = replace(flash_kernel(z, z.seq, window=z.window), chunk=z.chunk)
    saved = flash_saved(z, context)
    statistics = 2 * FP32 * z.tokens * z.heads
    sinks = Weight("attention.sinks", (z.heads,), (z.heads * z.tp,), z.dtype, sharded_over=("tp",))
    return Node(
        forward=(Compute("attn.flash", forward, StepPhase.FORWARD),),
        input_grad=(Compute("attn.flash bwd", replace(forward, backward=True), StepPhase.BACKWARD),),
        weight_grad=(
            memory("W", "attn.sinks wgrad", "reduce", statistics, FP32 * z.heads, "fp32", z.heads),
            *add_gradient(z, "attn.sinks", z.heads),
        )
        if z.sinks
        else (),
        weights=(sinks,) if z.sinks else (),
        saved=saved,
        # Gradients of the context, and of queries, keys and values.
        grad_bytes=float(z.element * z.tokens * (z.context_width + z.q_width + z.kv_width + z.v_width)),
    )


def _unfused(z: FrameworkShapes) -> tuple[Node, ...]:
    """Return attention in steps: Q K^T, scale-mask-softmax, dropout, P V.

    Keys and values are expanded first where heads share them.
    """
    batch = z.batch * z.heads
    elements = batch * z.seq * z.seq
    square = float(z.element * elements)
    query_bytes = float(z.element * z.tokens * z.q_width)
    value_bytes = float(z.element * z.tokens * z.context_width)
    repeat, keys, values = repeated_keys(z), "attn.k", "attn.v"
    if repeat:
        keys, values = "attn.k expanded", "attn.v expanded"

    def product(phase: str, name: str, m: int, n: int, k: int, role: str) -> Compute:
        return Compute(f"attn.{name}", Matmul(m, n, k, batch=batch, dtype=z.dtype, role=role), StepPhase(phase))

    s, d, v = z.seq, z.head_dim, z.v_head_dim
    scores = Node(
        forward=(product("F", "scores", s, s, d, "fwd"),),
        input_grad=(product("B", "scores dgrad q", s, d, s, "dgrad"), product("B", "scores dgrad k", s, d, s, "wgrad")),
        saved=(Tensor("attn.q", query_bytes), Tensor(keys, query_bytes)),
        grad_bytes=square + 2 * query_bytes,
    )
    softmax, drop = z.framework.softmax(z, elements)
    attended = "attn.dropped" if z.dropout else "attn.probs"
    context = Node(
        # The product leaves heads outermost; the copy puts a token's heads side by side again.
        forward=(
            product("F", "context", s, v, s, "fwd"),
            memory("F", "attn.context transpose", "copy", value_bytes, value_bytes, z.dtype),
        ),
        input_grad=(
            product("B", "context dgrad probs", s, s, v, "dgrad"),
            product("B", "context dgrad v", s, v, s, "wgrad"),
        ),
        saved=(Tensor(attended, square), Tensor(values, value_bytes)),
        grad_bytes=square + 2 * value_bytes,
    )
    return (*repeat, scores, softmax, drop, context)


def repeated_keys(z: FrameworkShapes) -> tuple[Node, ...]:
    """Return the copies of keys and values to all query heads that share them; none where each has its own."""
    if z.kv_heads == z.heads:
        return ()
    narrow, wide = (float(z.element * z.tokens * width) for width in (z.kv_width, z.q_width))
    copies = Node(
        forward=tuple(memory("F", f"attn.repeat {x}", "copy", narrow, wide, z.dtype) for x in "kv"),
        input_grad=tuple(memory("B", f"attn.repeat {x} bwd", "reduce", wide, narrow, z.dtype) for x in "kv"),
        grad_bytes=2 * (narrow + wide),
    )
    return (copies,)
