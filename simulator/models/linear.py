"""Linear layers, split over tensor-parallel ranks, and the gradients of their weights."""

from __future__ import annotations

from simulator.operations.nodes import Node, Ops, Tensor, comm, memory
from simulator.operations.shapes import Shapes
from simulator.program import Beside, Comm, Compute, Matmul
from simulator.units import DTYPE_BYTES


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
