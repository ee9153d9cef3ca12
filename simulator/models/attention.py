"""Attention over whole sequences: from queries, keys and values to the context."""

from __future__ import annotations

from dataclasses import replace

from simulator.models.linear import add_gradient
from simulator.models.shapes import FrameworkShapes
from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.weights import Weight
from simulator.program import Attention, Compute, Matmul, StepPhase
from simulator.units import FP32_BYTES


def projected_widths(shapes: FrameworkShapes) -> dict[str, int]:
    """Return the columns of the products for queries, keys and values on this rank; a gate comes with the queries.

    Where keys serve as values too, there is no product for these.
    """
    gate = shapes.context_width if shapes.gate else 0
    widths = {"q": shapes.q_width + gate, "k": shapes.kv_width, "v": shapes.projected_v_width}
    return {name: width for name, width in widths.items() if width}


def split_qkv(shapes: FrameworkShapes) -> Node:
    """Return the split of one product's output into queries, keys and values, which are views of it.

    Their gradients are joined by a copy, as far as they are not written side by side.
    """
    # Values that are the keys have no gradient of their own to join.
    joined = max(shapes.framework.joined_qkv_width(shapes) - (shapes.v_width - shapes.projected_v_width), 0)
    if not joined:
        return Node()
    copied = shapes.element * shapes.tokens * joined
    width = shapes.q_width + shapes.kv_width + shapes.projected_v_width
    kernel = shapes.framework.joined_qkv_kernel(shapes)
    return Node(
        input_grad=(memory("B", "attn.qkv join", kernel, copied, copied, shapes.dtype),),
        grad_bytes=2.0 * shapes.element * shapes.tokens * width,
    )


def attention_inputs(shapes: FrameworkShapes) -> tuple[Tensor, ...]:
    """Return queries, keys and values as tensors that attention keeps.

    Where operations rotate queries and keys, values stay a view of the product that made all three. They then keep the
    whole of its output, unless norms of queries and keys keep the rest of it already.
    """
    if shapes.reuses_keys:
        return (Tensor("attn.q", float(shapes.element * shapes.tokens * shapes.q_width)),)
    k_width, v_width = (
        (shapes.q_width, shapes.context_width)
        if shapes.framework.masks_by_bias(shapes)
        else (shapes.kv_width, shapes.v_width)
    )
    q, k, v = (float(shapes.element * shapes.tokens * width) for width in (shapes.q_width, k_width, v_width))
    if shapes.framework.repeats_keys and shapes.kv_heads < shapes.heads:
        return (Tensor("attn.q", q), Tensor("attn.k expanded", q), Tensor("attn.v expanded", q))
    turned = shapes.framework.rotates_by_operations and shapes.position == "rope"
    is_view = shapes.joins_products and shapes.v_head_dim == shapes.head_dim
    kept_by_norms = shapes.qk_norm and not shapes.norm_by_operations
    if turned and is_view and not kept_by_norms:
        v += q + k
    return (Tensor("attn.q", q), Tensor("attn.k", k), Tensor("attn.v", v))


def whole_attention(shapes: FrameworkShapes, *, context: str) -> tuple[Node, ...]:
    """Return the attention of ranks that have whole sequences; ``context`` names its result."""
    if shapes.attention != "flash" or shapes.framework.falls_back_to_steps(shapes):
        return _unfused(shapes)
    repeated = repeated_keys(shapes) if shapes.framework.repeats_keys else ()
    return (*repeated, shapes.framework.before_attention(shapes), _flash(shapes, context))


def flash_saved(shapes: FrameworkShapes, context: str) -> tuple[Tensor, ...]:
    """Return the tensors that flash attention keeps (arXiv 2205.14135).

    They are its inputs, its output, and a log-sum-exp in fp32 per head and query.
    """
    output = float(shapes.element * shapes.tokens * shapes.context_width)
    return (
        *attention_inputs(shapes),
        Tensor(context, output),
        Tensor("attn.lse", float(FP32_BYTES) * shapes.tokens * shapes.heads),
    )


def flash_kernel(shapes: FrameworkShapes, length: int, *, window: int = 0) -> Attention:
    """Return the forward kernel over ``length`` queries and keys."""
    value_width = shapes.v_head_dim if shapes.v_head_dim != shapes.head_dim else 0
    biased = shapes.framework.masks_by_bias(shapes)
    kv_heads = shapes.heads if biased or shapes.framework.repeats_keys else shapes.kv_heads
    sizes = (shapes.batch, shapes.heads, kv_heads, length, length, shapes.head_dim)
    kernel = Attention(
        *sizes,
        dtype=shapes.dtype,
        window=window,
        v_head_dim=value_width,
        dropout=shapes.dropout > 0,
        sinks=shapes.sinks,
        softcap=shapes.softcap and shapes.framework.caps_in_fused_kernel,
        causal=not shapes.bidirectional,
    )
    return replace(kernel, causal=False, window=0, bias=True) if biased else kernel


def _flash(shapes: FrameworkShapes, context: str) -> Node:
    """Return flash attention: one kernel each way.

    Gradients of sinks follow from the log-sum-exp and the products of outputs with their gradients, a number each for
    every head and query (TransformerEngine 2.8, ``softmax_offset``).
    """
    forward = replace(flash_kernel(shapes, shapes.seq, window=shapes.window), chunk=shapes.chunk)
    saved = flash_saved(shapes, context)
    statistics = 2 * FP32_BYTES * shapes.tokens * shapes.heads
    return Node(
        forward=(Compute("attn.flash", forward, StepPhase.FORWARD),),
        input_grad=(Compute("attn.flash bwd", replace(forward, backward=True), StepPhase.BACKWARD),),
        weight_grad=(
            memory("W", "attn.sinks wgrad", "reduce", statistics, FP32_BYTES * shapes.heads, "fp32", shapes.heads),
            *add_gradient(shapes, "attn.sinks", shapes.heads),
        )
        if shapes.sinks
        else (),
        weights=_sinks(shapes),
        saved=saved,
        # Gradients of the context, and of queries, keys and values.
        grad_bytes=float(
            shapes.element * shapes.tokens * (shapes.context_width + shapes.q_width + shapes.kv_width + shapes.v_width)
        ),
    )


def _sinks(shapes: FrameworkShapes) -> tuple[Weight, ...]:
    """Return the weight of sinks, a number for each head; none where there are no sinks."""
    name, whole = "attention.sinks", (shapes.heads * shapes.tp,)
    weight = Weight(name, (shapes.heads,), whole, shapes.dtype, sharded_over=("tp",))
    return (weight,) if shapes.sinks else ()


def _unfused(shapes: FrameworkShapes) -> tuple[Node, ...]:
    """Return attention in steps: Q K^T, scale-mask-softmax, dropout, P V.

    Keys and values are expanded first where heads share them. A sink is one more number in each row of probabilities.
    Products leave it out, and read the s others in place (transformers' models/gpt_oss/modeling_gpt_oss.py,
    ``eager_attention_forward``). Their rows are then s + 1 numbers apart. Sizes of a product tell how its rows are
    aligned (`simulator.costs.matmul.is_aligned`), so that these are priced over s + 1.
    """
    batch = shapes.batch * shapes.heads
    elements = batch * shapes.seq * shapes.seq
    square = float(shapes.element * elements)
    query_bytes = float(shapes.element * shapes.tokens * shapes.q_width)
    value_bytes = float(shapes.element * shapes.tokens * shapes.context_width)
    repeat, keys, values = repeated_keys(shapes), "attn.k", "attn.v"
    if repeat:
        keys, values = "attn.k expanded", "attn.v expanded"

    def product(phase: str, name: str, m: int, n: int, k: int, role: str) -> Compute:
        return Compute(f"attn.{name}", Matmul(m, n, k, batch=batch, dtype=shapes.dtype, role=role), StepPhase(phase))

    s, d, v = shapes.seq, shapes.head_dim, shapes.v_head_dim
    scores = Node(
        forward=(product("F", "scores", s, s, d, "fwd"),),
        input_grad=(product("B", "scores dgrad q", s, d, s, "dgrad"), product("B", "scores dgrad k", s, d, s, "wgrad")),
        saved=(Tensor("attn.q", query_bytes), Tensor(keys, query_bytes)),
        grad_bytes=square + 2 * query_bytes,
    )
    softmax, drop = shapes.framework.softmax(shapes, elements)
    if shapes.sinks:
        gradients = (*softmax.weight_grad, *add_gradient(shapes, "attn.sinks", shapes.heads))
        softmax = replace(softmax, weights=_sinks(shapes), weight_grad=gradients)
    apart = s + int(shapes.sinks)
    attended = "attn.dropped" if shapes.dropout else "attn.probs"
    context = Node(
        # The product leaves heads outermost; the copy puts a token's heads side by side again.
        forward=(
            product("F", "context", s, v, apart, "fwd"),
            memory("F", "attn.context transpose", _head_copy(shapes), value_bytes, value_bytes, shapes.dtype),
        ),
        input_grad=(
            product("B", "context dgrad probs", s, s, v, "dgrad"),
            product("B", "context dgrad v", apart, v, s, "wgrad"),
        ),
        saved=(Tensor(attended, square), Tensor(values, value_bytes)),
        grad_bytes=square + 2 * value_bytes,
    )
    return (*repeat, scores, softmax, drop, context)


def _head_copy(shapes: FrameworkShapes) -> str:
    """Return the class of kernels that copy heads; without vector loads they take as long as those of RoPE."""
    return "rope" if shapes.framework.copies_heads_by_element else "copy"


def repeated_keys(shapes: FrameworkShapes) -> tuple[Node, ...]:
    """Return the copies of keys and values to all query heads that share them; none where each has its own."""
    if shapes.kv_heads == shapes.heads:
        return ()
    narrow, wide = (float(shapes.element * shapes.tokens * width) for width in (shapes.kv_width, shapes.q_width))
    read = wide if shapes.framework.copies_heads_by_element else narrow
    copies = Node(
        forward=tuple(memory("F", f"attn.repeat {x}", _head_copy(shapes), read, wide, shapes.dtype) for x in "kv"),
        input_grad=tuple(memory("B", f"attn.repeat {x} bwd", "reduce", wide, narrow, shapes.dtype) for x in "kv"),
        grad_bytes=2 * (narrow + wide),
    )
    return (copies,)
