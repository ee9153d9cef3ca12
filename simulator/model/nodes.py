"""Differentiable operations, as autograd sees them: what each launches, and what it keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from simulator.model.shapes import Shapes
from simulator.program import Attention, Comm, Compute, Matmul, Memory
from simulator.units import DTYPE_BYTES

Op = Compute | Comm
Ops = tuple[Op, ...]


@dataclass(frozen=True)
class Tensor:
    """An activation that is kept; two operations that keep the same one name it alike, and it is held once."""

    name: str
    nbytes: float


@dataclass(frozen=True)
class Node:
    """One operation with its gradients.

    ``gather`` fetches what only the weight gradient needs (the other ranks' shards of the saved input); the unsplit
    backward pass issues it first, as Megatron does to overlap it, the split one with the weight gradient.
    ``saved`` is kept from forward to backward, ``grad_bytes`` is alive while the backward runs: the gradients of output
    and input, gathered copies, and a weight gradient that is not accumulated in place. Where the weight gradient is a
    pass of its own it needs ``saved`` and ``output_grad_bytes`` until then, and ``weight_grad_bytes`` while it runs.
    ``forward_bytes`` is alive only while the forward runs, beside ``saved``. ``placeholders``, one per shape, are kept
    for good once the first backward has run (see `linear`).
    ``params`` are this rank's; of them ``tp_reduced_params`` have gradients of which every tensor-parallel rank
    computes a part.
    """

    forward: Ops = ()
    input_grad: Ops = ()
    weight_grad: Ops = ()
    gather: Ops = ()
    saved: tuple[Tensor, ...] = ()
    grad_bytes: float = 0.0
    output_grad_bytes: float = 0.0
    weight_grad_bytes: float = 0.0
    forward_bytes: float = 0.0
    placeholders: tuple[Tensor, ...] = ()
    params: int = 0
    tp_reduced_params: int = 0


def unique(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Each tensor once, in order of first mention."""
    return tuple({tensor.name: tensor for tensor in tensors}.values())


def memory(phase: str, name: str, op: str, read: float, write: float, dtype: str) -> Compute:
    """A memory-bound kernel; ``read`` and ``write`` in bytes."""
    return Compute(name, Memory(op, float(read), float(write), dtype=dtype), phase)


def comm(op: str, block: str, nbytes: float) -> Comm:
    """A tensor-parallel collective that belongs to ``block``."""
    return Comm(f"tp.{op} {block}", op, float(nbytes), axis="tp", purpose="tp")


def fuse(phase: str, first: Op, second: Op, shared_bytes: float, *, keep: bool) -> Compute:
    """One memory-bound kernel for two: the tensor between them is not read again, nor written unless it is kept."""
    a, b = _memory_kernel(first), _memory_kernel(second)
    return memory(
        phase,
        f"{first.name} + {second.name}",
        b.op,
        a.read_bytes + b.read_bytes - shared_bytes,
        a.write_bytes + b.write_bytes - (0 if keep else shared_bytes),
        b.dtype,
    )


def _memory_kernel(op: Op) -> Memory:
    assert isinstance(op, Compute)
    assert isinstance(op.kernel, Memory)
    return op.kernel


def add_gradient(z: Shapes, name: str, params: int) -> Ops:
    """Adding a new gradient in working precision to the buffer of ``grad_dtype``."""
    if not z.adds_gradients:
        return ()
    buffer = DTYPE_BYTES[z.grad_dtype] * params
    return (memory("W", f"{name} grad add", "reduce", z.element * params + buffer, buffer, z.dtype),)


def new_gradient_bytes(z: Shapes, params: int) -> float:
    """What is alive while the new gradient of a weight is added to the buffer: that gradient or, where it stays and is
    counted with the others, its copy in the buffer's type."""
    return float((DTYPE_BYTES[z.grad_dtype] if z.keeps_gradients else z.element) * params)


def linear(
    z: Shapes,
    block: str,
    name: str,
    n: int,
    k: int,
    *,
    split: str,
    saved: str,
    bias: bool = False,
    shared: int = 0,
    cached: bool = True,
) -> Node:
    """y (tokens x n) = x (tokens x k) W, n and k as this rank has them.

    ``split`` says along what W is split over the tensor-parallel ranks (arXiv 1909.08053, section 3): ``column`` starts
    from a replicated x and sums its gradient, ``row`` ends with a sum of y; with sequence parallelism x is all-gathered
    and the sums are reduce-scatters (arXiv 2205.05198, section 4.2.2), and x is kept as the rank's own shard, to be
    gathered once more for the weight gradient. ``none``: every rank holds W and does all of it.
    The bias is added in the product's epilogue or in the kernel after it, at no cost of its own; its gradient is a sum
    over rows. ``shared`` of the n columns are held by more than one rank.

    Autograd must be handed a gradient of the weight's size even where the product has added it to the buffer already.
    TransformerEngine keeps an empty tensor per shape for that (``get_dummy_wgrad`` in pytorch/module/base.py, 2.0 and
    later); Megatron-LM's own linear layer (``cached`` false) makes a new one each time.
    """
    x_bytes, y_bytes, w_bytes = (float(z.element * size) for size in (z.tokens * k, z.tokens * n, n * k))
    x_kept = x_bytes * z.rows / z.tokens if split == "column" else x_bytes
    y_kept = y_bytes * z.rows / z.tokens if split == "row" else y_bytes
    name = f"{block}.{name}"

    def product(phase: str, role: str, m: int, n: int, k: int) -> Compute:
        accumulate = role == "wgrad" and z.accumulates_in_product
        out_dtype = z.grad_dtype if accumulate else ""
        kernel = Matmul(m, n, k, dtype=z.dtype, role=role, out_dtype=out_dtype, accumulate=accumulate)
        return Compute(name if role == "fwd" else f"{name} {role}", kernel, phase)

    def gathered(nbytes: float) -> Ops:
        return (comm("all_gather", block, nbytes),) if z.sequence_parallel else ()

    def summed(nbytes: float) -> Ops:
        op = "reduce_scatter" if z.sequence_parallel else "all_reduce"
        return (comm(op, block, nbytes),) if z.tp > 1 else ()

    forward: Ops = (product("F", "fwd", z.tokens, n, k),)
    input_grad: Ops = (product("B", "dgrad", z.tokens, k, n),)
    weight_grad: Ops = (product("W", "wgrad", n, k, z.tokens),)
    gather: Ops = ()
    match split:
        case "column":
            forward = (*gathered(x_bytes), *forward)
            input_grad = (*input_grad, *summed(x_bytes))
            gather = gathered(x_bytes)
        case "row":
            forward = (*forward, *summed(y_bytes))
            input_grad = (*gathered(y_bytes), *input_grad)
        case "none":
            forward = (*gathered(x_bytes), *forward)
    if not z.accumulates_in_product:
        weight_grad += add_gradient(z, name, n * k)
    if bias:
        weight_grad += (memory("W", f"{name} bias grad", "reduce", y_kept, z.element * n, z.dtype),)
        weight_grad += add_gradient(z, f"{name} bias", n)
    placeholder = z.accumulates_in_product and cached
    weight_grad_bytes = (x_bytes if gather else 0) + (0 if placeholder else new_gradient_bytes(z, n * k))
    # A row-split layer's bias is added to the sum, by every rank to its own rows.
    partial_bias = n if bias and split == "row" and z.sequence_parallel else 0
    return Node(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        gather=gather,
        saved=(Tensor(saved, x_kept),),
        # Gradients of y and x whole; x or y once more as this rank's rows beside the gathered copy.
        grad_bytes=x_bytes + y_bytes + weight_grad_bytes,
        output_grad_bytes=y_bytes,
        weight_grad_bytes=weight_grad_bytes,
        placeholders=(Tensor(f"weight gradient {n} x {k}", w_bytes),) if placeholder else (),
        params=n * k + (n if bias else 0),
        tp_reduced_params=partial_bias + shared * (k + (1 if bias else 0)),
    )


def norm(z: Shapes, name: str, *, saved: str, residual: bool) -> Node:
    """LayerNorm or RMSNorm over this rank's rows: one kernel forward; backward one for the input's gradient and one for
    the parameters'. The statistics it keeps (8 bytes per row) are neglected, as in arXiv 2205.05198.

    ``residual``: its input also goes round the block, so that autograd adds the two gradients.
    """
    params = z.hidden * (2 if z.norm == "layernorm" else 1)
    small = z.element * params
    backward = memory("B", f"{name} bwd", "norm", 2 * z.row_bytes, z.row_bytes, z.dtype)
    input_grad: Ops = (backward,)
    if residual:
        add = memory("B", f"{name} residual grad", "residual", 2 * z.row_bytes, z.row_bytes, z.dtype)
        input_grad = (fuse("B", backward, add, z.row_bytes, keep=False),) if z.compiled else (backward, add)
    return Node(
        forward=(memory("F", name, "norm", z.row_bytes, z.row_bytes, z.dtype),),
        input_grad=input_grad,
        weight_grad=(
            memory("W", f"{name} wgrad", "norm", 2 * z.row_bytes, small, z.dtype),
            *add_gradient(z, name, params),
        ),
        saved=(Tensor(saved, z.row_bytes),),
        grad_bytes=2 * z.row_bytes,
        output_grad_bytes=z.row_bytes,
        params=params,
        tp_reduced_params=params if z.sequence_parallel else 0,
    )


def dropout(z: Shapes, name: str, elements: int, *, mask: str, fused_with: Compute | None = None) -> Node:
    """Dropout that keeps a mask of one byte per element; ``fused_with``: the kernel that does it on the way."""
    nbytes = z.element * elements
    return Node(
        forward=(fused_with or _drop(z, name, elements),),
        input_grad=(memory("B", f"{name} bwd", "dropout", nbytes + elements, nbytes, z.dtype),),
        saved=(Tensor(mask, float(elements)),),
        grad_bytes=2.0 * nbytes,
    )


def _drop(z: Shapes, name: str, elements: int) -> Compute:
    nbytes = z.element * elements
    return memory("F", name, "dropout", nbytes, nbytes + elements, z.dtype)


def residual(z: Shapes, block: str) -> Node:
    """Dropout of a block's output, and the sum with its input; bias, dropout and sum are one kernel unless eager.

    The sum's gradient passes through, so that without dropout nothing runs in the backward pass.
    """
    add = memory("F", f"{block}.residual", "residual", 2 * z.row_bytes, z.row_bytes, z.dtype)
    if not z.dropout:
        return Node(forward=(add,), grad_bytes=z.row_bytes)
    name, elements = f"{block}.dropout", z.rows * z.hidden
    if z.eager:
        drop = dropout(z, name, elements, mask=f"{name} mask")
        return replace(drop, forward=(*drop.forward, add))
    kernel = replace(fuse("F", _drop(z, name, elements), add, z.row_bytes, keep=False), name=add.name)
    return dropout(z, name, elements, mask=f"{name} mask", fused_with=kernel)


#: (label, tensors read, tensors written) of each kernel.
Traffic = tuple[tuple[str, float, float], ...]
# In tensors of tokens x ffn. Gated activations read gate and up from the first product's output; eager ones take a
# kernel for the activation and one for the gate, and join the two gradients for the backward product.
PLAIN_FORWARD: Traffic = (("", 1, 1),)
PLAIN_BACKWARD: Traffic = (("", 2, 1),)
GATED_FORWARD: Traffic = (("", 2, 1),)
GATED_BACKWARD: Traffic = (("", 3, 2),)
EAGER_GATED_FORWARD: Traffic = (("", 1, 1), (" gate", 2, 1))
EAGER_GATED_BACKWARD: Traffic = ((" gate", 2, 1), (" up", 2, 1), ("", 2, 1), (" join", 2, 2))


def activation(z: Shapes) -> Node:
    """GELU, ReLU (which keeps its output, that is the next product's input), SwiGLU or GeGLU."""
    nbytes = float(z.element * z.tokens * z.ffn)
    name = f"mlp.{z.activation}"
    if not z.gated:
        forward, backward = PLAIN_FORWARD, PLAIN_BACKWARD
        saved: tuple[Tensor, ...] = (Tensor("mlp.act" if z.activation == "relu" else "mlp.pre", nbytes),)
    elif z.eager:
        forward, backward = EAGER_GATED_FORWARD, EAGER_GATED_BACKWARD
        saved = (Tensor("mlp.pre", 2 * nbytes), Tensor("mlp.gate", nbytes))
    else:
        forward, backward = GATED_FORWARD, GATED_BACKWARD
        saved = (Tensor("mlp.pre", 2 * nbytes),)
    return Node(
        forward=tuple(memory("F", name + x, "activation", r * nbytes, w * nbytes, z.dtype) for x, r, w in forward),
        input_grad=tuple(
            memory("B", f"{name}{x} bwd", "activation", r * nbytes, w * nbytes, z.dtype) for x, r, w in backward
        ),
        saved=saved,
        grad_bytes=(3 if z.gated else 2) * nbytes,
    )


FUSED_ROPE: Traffic = (("", 1, 1),)
EAGER_ROPE: Traffic = ((" cos", 1, 1), (" negate", 0.5, 0.5), (" join", 1, 1), (" sin", 1, 1), (" add", 2, 1))


def rope(z: Shapes) -> Node:
    """Rotary position embedding of queries and keys: one kernel each, or eager's five (x cos, -x of one half, the join
    of both halves, x sin, and the sum). Its gradient is the inverse rotation and needs no activation."""
    q, k = (z.element * z.tokens * width for width in (z.q_width, z.kv_width))

    def rotate(phase: str, suffix: str) -> Ops:
        return tuple(
            memory(phase, f"attn.rope {name}{step}{suffix}", "rope", read * nbytes, written * nbytes, z.dtype)
            for name, nbytes in (("q", q), ("k", k))
            for step, read, written in (EAGER_ROPE if z.eager else FUSED_ROPE)
        )

    return Node(forward=rotate("F", ""), input_grad=rotate("B", " bwd"), grad_bytes=2.0 * (q + k))


def split_qkv(z: Shapes) -> Node:
    """Queries, keys and values are views of one product's output; their gradients are joined by a copy, unless a fused
    attention kernel writes them side by side (TransformerEngine). A compiler lets those that a rotation computes be
    written in place, which leaves the values' to copy."""
    if z.fused and z.attention == "flash":
        return Node()
    width = z.q_width + 2 * z.kv_width
    copied = z.element * z.tokens * (z.kv_width if z.compiled and z.position == "rope" else width)
    return Node(
        input_grad=(memory("B", "attn.qkv join", "copy", copied, copied, z.dtype),),
        grad_bytes=2.0 * z.element * z.tokens * width,
    )


def attention_inputs(z: Shapes) -> tuple[Tensor, ...]:
    """Queries, keys and values."""
    q, kv = (float(z.element * z.tokens * width) for width in (z.q_width, z.kv_width))
    return (Tensor("attn.q", q), Tensor("attn.k", kv), Tensor("attn.v", kv))


def core_attention(z: Shapes) -> tuple[Node, ...]:
    """From queries, keys and values to the context: what selective recomputation runs again (2205.05198, section 5)."""
    return (_flash(z),) if z.attention == "flash" else _unfused(z)


def _flash(z: Shapes) -> Node:
    """One kernel (arXiv 2205.14135), which keeps its inputs, its output and a fp32 log-sum-exp per head and query."""
    forward = Attention(z.batch, z.heads, z.kv_heads, z.seq, z.seq, z.head_dim, dtype=z.dtype)
    context = float(z.element * z.tokens * z.q_width)
    inputs = attention_inputs(z)
    return Node(
        forward=(Compute("attn.flash", forward, "F"),),
        input_grad=(Compute("attn.flash bwd", replace(forward, backward=True), "B"),),
        saved=(*inputs, Tensor("attn.context", context), Tensor("attn.lse", 4.0 * z.tokens * z.heads)),
        grad_bytes=context + sum(tensor.nbytes for tensor in inputs),
    )


def _unfused(z: Shapes) -> tuple[Node, ...]:
    """Q K^T, scale-mask-softmax, dropout, P V; keys and values are expanded first where heads share them."""
    batch = z.batch * z.heads
    elements = batch * z.seq * z.seq
    square = float(z.element * elements)
    per_head = float(z.element * z.tokens * z.q_width)
    grouped = z.kv_heads < z.heads
    repeat, keys, values = Node(), "attn.k", "attn.v"
    if grouped:
        narrow = float(z.element * z.tokens * z.kv_width)
        keys, values = "attn.k expanded", "attn.v expanded"
        repeat = Node(
            forward=tuple(memory("F", f"attn.repeat {x}", "copy", narrow, per_head, z.dtype) for x in "kv"),
            input_grad=tuple(memory("B", f"attn.repeat {x} bwd", "reduce", per_head, narrow, z.dtype) for x in "kv"),
            grad_bytes=2 * (narrow + per_head),
        )

    def product(phase: str, name: str, m: int, n: int, k: int, role: str) -> Compute:
        return Compute(f"attn.{name}", Matmul(m, n, k, batch=batch, dtype=z.dtype, role=role), phase)

    s, d = z.seq, z.head_dim
    scores = Node(
        forward=(product("F", "scores", s, s, d, "fwd"),),
        input_grad=(product("B", "scores dgrad q", s, d, s, "dgrad"), product("B", "scores dgrad k", s, d, s, "wgrad")),
        saved=(Tensor("attn.q", per_head), Tensor(keys, per_head)),
        grad_bytes=square + 2 * per_head,
    )
    softmax, attended = _softmax(z, elements), "attn.probs"
    drop = Node()
    if z.dropout:
        attended = "attn.dropped"
        drop = dropout(z, "attn.probs dropout", elements, mask="attn.probs mask")
        if z.compiled:
            drop = replace(drop, forward=())
    context = Node(
        # The product leaves heads outermost; the copy puts a token's heads side by side again.
        forward=(
            product("F", "context", s, d, s, "fwd"),
            memory("F", "attn.context transpose", "copy", per_head, per_head, z.dtype),
        ),
        input_grad=(
            product("B", "context dgrad probs", s, s, d, "dgrad"),
            product("B", "context dgrad v", s, d, s, "wgrad"),
        ),
        saved=(Tensor(attended, square), Tensor(values, per_head)),
        grad_bytes=square + 2 * per_head,
    )
    return (repeat, scores, softmax, drop, context)


def _softmax(z: Shapes, elements: int) -> Node:
    """Scale, causal mask and softmax, which keeps its output.

    Megatron's fused kernel (scaled_upper_triang_masked_softmax) reads the lower triangle only and writes the whole
    square. Eager runs three kernels; compiled one, which reads all and does the dropout as well.
    """
    square = float(z.element * elements)

    def kernel(phase: str, name: str, read: float) -> Compute:
        return memory(phase, f"attn.{name}", "softmax", read, square, z.dtype)

    forward: Ops
    backward: Ops
    if z.eager:
        forward = tuple(kernel("F", name, square) for name in ("scale", "mask", "softmax"))
        backward = (
            kernel("B", "softmax bwd", 2 * square),
            kernel("B", "mask bwd", square),
            kernel("B", "scale bwd", square),
        )
    else:
        read = square / 2 if z.fused else square
        softmax = kernel("F", "softmax", read)
        if z.compiled and z.dropout:
            softmax = fuse("F", softmax, _drop(z, "attn.probs dropout", elements), square, keep=True)
        forward, backward = (softmax,), (kernel("B", "softmax bwd", 2 * read),)
    return Node(forward=forward, input_grad=backward, saved=(Tensor("attn.probs", square),), grad_bytes=2 * square)
