"""Differentiable operations, as autograd sees them: what each launches, and what it keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from simulator.models.shapes import Shapes
from simulator.program import Beside, Comm, Compute, Matmul, Memory
from simulator.units import DTYPE_BYTES

Op = Compute | Comm | Beside
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
    ``together`` is the unsplit backward pass where it is not these three in a row.
    ``saved`` is kept from forward to backward, ``forward_bytes`` is alive while the forward runs, ``grad_bytes`` while
    the backward runs: the gradients of output and input, gathered copies, and a weight gradient that is not accumulated
    in place. Where the weight gradient is a pass of its own it needs ``saved`` and ``output_grad_bytes`` until then,
    and ``weight_grad_bytes`` while it runs. ``placeholders``, one per shape, are kept for good once the first backward
    has run (see `linear`).
    ``params`` are this rank's, those of experts apart in ``expert_params``; of ``params`` ``tp_reduced_params`` have
    gradients of which every tensor-parallel rank computes a part.
    """

    forward: Ops = ()
    input_grad: Ops = ()
    weight_grad: Ops = ()
    gather: Ops = ()
    together: Ops = ()
    saved: tuple[Tensor, ...] = ()
    forward_bytes: float = 0.0
    grad_bytes: float = 0.0
    output_grad_bytes: float = 0.0
    weight_grad_bytes: float = 0.0
    placeholders: tuple[Tensor, ...] = ()
    params: int = 0
    expert_params: int = 0
    tp_reduced_params: int = 0

    @property
    def backward(self) -> Ops:
        """The unsplit backward pass."""
        return self.together or (*self.gather, *self.input_grad, *self.weight_grad)


def unique(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Each tensor once, in order of first mention."""
    return tuple({tensor.name: tensor for tensor in tensors}.values())


def memory(
    phase: str, name: str, op: str, read: float, write: float, dtype: str, width: int = 0, *, parts: int = 0
) -> Compute:
    """A memory-bound kernel; ``read`` and ``write`` in bytes, ``width`` in elements of a row, ``parts`` as `Memory`."""
    return Compute(name, Memory(op, float(read), float(write), dtype=dtype, width=width, parts=parts), phase)


def comm(op: str, block: str, nbytes: float) -> Comm:
    """A tensor-parallel collective that belongs to ``block``."""
    return Comm(f"tp.{op} {block}", op, float(nbytes), axis="tp", purpose="tp")


def fuse(phase: str, first: Op, second: Op, shared_bytes: float, *, keep: bool) -> Compute:
    """One memory-bound kernel for two: the tensor between them is not read again, nor written unless it is kept."""
    assert isinstance(first, Compute)
    assert isinstance(second, Compute)
    a, b = _memory_kernel(first), _memory_kernel(second)
    return memory(
        phase,
        f"{first.name} + {second.name}",
        b.op,
        a.read_bytes + b.read_bytes - shared_bytes,
        a.write_bytes + b.write_bytes - (0 if keep else shared_bytes),
        b.dtype,
        b.width,
    )


def _memory_kernel(op: Compute) -> Memory:
    assert isinstance(op.kernel, Memory)
    return op.kernel


def add_gradient(z: Shapes, name: str, params: int) -> Ops:
    """Adding a new gradient in working precision to the buffer of ``grad_dtype``. A complete one torch's DDP multiplies
    by 1 / dp on its way to its bucket (reducer.cpp, ``mark_variable_ready_dense``)."""
    ops: Ops = ()
    buffer = float(DTYPE_BYTES[z.grad_dtype] * params)
    if z.adds_gradients:
        alike = z.element == DTYPE_BYTES[z.grad_dtype]  # added by the kernel that adds activations
        op = "residual" if alike else "accumulate"
        ops += (memory("W", f"{name} grad add", op, z.element * params + buffer, buffer, z.dtype),)
    if z.fills_buckets:
        ops += (memory("W", f"{name} grad to bucket", "copy", buffer, buffer, z.dtype),)
    return ops


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

    Where tensor-parallel communication is overlapped and there is sequence parallelism, an all-gather with the product
    after it, or a product with the reduce-scatter after it, becomes a ring of t products of 1/t of the rows beside
    t - 1 exchanges (Wang et al., ASPLOS 2023, doi 10.1145/3567955.3567959; PyTorch's async TP; TransformerEngine's
    userbuffers with ``ring_exchange``). The unsplit backward of a column-split layer hides its two collectives whole
    instead, the gathering of x beside the input gradient's product and the sum beside the weight gradient's
    (Megatron-LM's ``LinearWithGradAccumulationAndAsyncCommunication``, TransformerEngine's ``bulk``). Without sequence
    parallelism only that sum, an all-reduce, is hidden, as in Megatron-LM.
    The bias is added in the product's epilogue or in the kernel after it, at no cost of its own, but for an eager one
    that has to wait for a sum over ranks; its gradient is a sum over rows. ``shared`` of the n columns are held by more
    than one rank.

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

    def gathered(nbytes: float) -> tuple[Comm, ...]:
        return (comm("all_gather", block, nbytes),) if z.sequence_parallel else ()

    def summed(nbytes: float) -> tuple[Comm, ...]:
        op = "reduce_scatter" if z.sequence_parallel else "all_reduce"
        return (comm(op, block, nbytes),) if z.tp > 1 else ()

    dgrad, wgrad = product("B", "dgrad", z.tokens, k, n), product("W", "wgrad", n, k, z.tokens)
    forward: Ops = (product("F", "fwd", z.tokens, n, k),)
    input_grad: Ops = (dgrad,)
    weight_grad: Ops = (wgrad,)
    gather: tuple[Comm, ...] = ()
    in_ring = z.overlaps_tp and z.sequence_parallel
    chunk, dgrad_chunk = product("F", "fwd", z.rows, n, k), product("B", "dgrad", z.rows, k, n)
    match split:
        case "column":
            forward = _gather_around(z, block, x_bytes, chunk) if in_ring else (*gathered(x_bytes), *forward)
            input_grad = _sum_around(z, block, x_bytes, dgrad_chunk) if in_ring else (dgrad, *summed(x_bytes))
            gather = gathered(x_bytes)
        case "row":
            forward = _sum_around(z, block, y_bytes, chunk) if in_ring else (*forward, *summed(y_bytes))
            input_grad = _gather_around(z, block, y_bytes, dgrad_chunk) if in_ring else (*gathered(y_bytes), dgrad)
        case "none":
            forward = (*gathered(x_bytes), *forward)
    if not z.accumulates_in_product:
        weight_grad += add_gradient(z, name, n * k)
    if bias:
        if z.eager and z.tp > 1 and split == "row":
            forward += (memory("F", f"{name} bias", "bias", y_kept, y_kept, z.dtype),)
        weight_grad += (memory("W", f"{name} bias grad", "reduce", y_kept, z.element * n, z.dtype, n),)
        weight_grad += add_gradient(z, f"{name} bias", n)
    together: Ops = ()
    if z.overlaps_tp and split == "column":
        first: Ops = tuple(Beside(one, (dgrad,)) for one in gather) or (dgrad,)
        then: Ops = tuple(Beside(one, (wgrad,)) for one in summed(x_bytes))
        together = (*first, *then, *weight_grad[1:])
    placeholder = z.accumulates_in_product and cached
    weight_grad_bytes = (x_bytes if gather else 0) + (0 if placeholder else new_gradient_bytes(z, n * k))
    # A row-split layer's bias is added to the sum, by every rank to its own rows.
    partial_bias = n if bias and split == "row" and z.sequence_parallel else 0
    return Node(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        gather=gather,
        together=together,
        saved=(Tensor(saved, x_kept),),
        # Gradients of y and x whole; x or y once more as this rank's rows beside the gathered copy.
        grad_bytes=x_bytes + y_bytes + weight_grad_bytes,
        output_grad_bytes=y_bytes,
        weight_grad_bytes=weight_grad_bytes,
        placeholders=(Tensor(f"weight gradient {n} x {k}", w_bytes),) if placeholder else (),
        params=n * k + (n if bias else 0),
        tp_reduced_params=partial_bias + shared * (k + (1 if bias else 0)),
    )


def _gather_around(z: Shapes, block: str, nbytes: float, chunk: Compute) -> Ops:
    """``chunk`` on the rows of every rank, own ones first, while the next ones (of ``nbytes`` in all) come round."""
    around = Beside(comm("send_recv", block, nbytes / z.tp), (chunk,))
    return (*(around,) * (z.tp - 1), chunk)


def _sum_around(z: Shapes, block: str, nbytes: float, chunk: Compute) -> Ops:
    """``chunk`` for the rows of every rank, own ones last, while the sum of the rows before them goes round: every rank
    adds its part to the sum that comes in and hands it on."""
    part = nbytes / z.tp
    add = memory(chunk.phase, f"{chunk.name} partial sum", "residual", 2 * part, part, z.dtype)
    around = (Beside(comm("send_recv", block, part), (chunk,)), add)
    return (chunk, *around * (z.tp - 1))


def dropout(z: Shapes, name: str, elements: int, *, mask: str, fused_with: Compute | None = None) -> Node:
    """Dropout that keeps a mask of one byte per element; ``fused_with``: the kernel that does it on the way."""
    nbytes = z.element * elements
    return Node(
        forward=(fused_with or drop_kernel(z, name, elements),),
        input_grad=(memory("B", f"{name} bwd", "dropout_bwd", nbytes + elements, nbytes, z.dtype),),
        saved=(Tensor(mask, float(elements)),),
        grad_bytes=2.0 * nbytes,
    )


def drop_kernel(z: Shapes, name: str, elements: int) -> Compute:
    """Dropout as a kernel of its own."""
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
    kernel = replace(fuse("F", drop_kernel(z, name, elements), add, z.row_bytes, keep=False), name=add.name)
    return dropout(z, name, elements, mask=f"{name} mask", fused_with=kernel)


#: (label, tensors read, tensors written) of each kernel, and of what class it is where they differ.
Traffic = tuple[tuple[str, float, float], ...]
Kernels = tuple[tuple[str, str, float, float], ...]
# In tensors of tokens x ffn. Gated activations read gate and up from the first product's output; eager ones take a
# kernel for the activation and one for the gate, and join the two gradients for the backward product. Gate and up are
# halves of the rows of one tensor: what reads them, and no other, is strided.
EAGER_GATED_FORWARD: Kernels = (("", "strided", 1, 1), (" gate", "strided", 2, 1))
EAGER_GATED_BACKWARD: Kernels = (
    (" gate", "strided", 2, 1),
    (" up", "residual", 2, 1),
    ("", "strided", 2, 1),
    (" join", "copy", 2, 2),
)


def activation(z: Shapes, block: str, elements: int) -> Node:
    """GELU, ReLU (which keeps its output, that is the next product's input), SwiGLU or GeGLU, with ``elements`` of
    output, between the two products of ``block``."""
    nbytes = float(z.element * elements)
    name = f"{block}.{z.activation}"
    forward: Kernels
    backward: Kernels
    if not z.gated:
        kind = "gelu" if z.activation == "gelu" and z.eager else "activation"
        forward, backward = (("", kind, 1, 1),), (("", f"{kind}_bwd", 2, 1),)
        saved: tuple[Tensor, ...] = (Tensor(f"{block}.act" if z.activation == "relu" else f"{block}.pre", nbytes),)
    elif z.eager:
        forward, backward = EAGER_GATED_FORWARD, EAGER_GATED_BACKWARD
        saved = (Tensor(f"{block}.pre", 2 * nbytes), Tensor(f"{block}.gate", nbytes))
    else:
        forward, backward = (("", "activation", 2, 1),), (("", "activation_bwd", 3, 2),)
        saved = (Tensor(f"{block}.pre", 2 * nbytes),)
    return Node(
        forward=tuple(memory("F", name + x, op, r * nbytes, w * nbytes, z.dtype) for x, op, r, w in forward),
        input_grad=tuple(
            memory("B", f"{name}{x} bwd", op, r * nbytes, w * nbytes, z.dtype) for x, op, r, w in backward
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
