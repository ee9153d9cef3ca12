"""Linear layers, split over tensor-parallel ranks, and the gradients of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.models.autocast import cast_operands
from simulator.models.low_precision import in_low_precision
from simulator.models.shapes import FrameworkShapes
from simulator.models.weight_names import weight_name
from simulator.operations.nodes import Node, Op, Ops, Tensor, comm, memory
from simulator.operations.weights import Weight
from simulator.program import Beside, Collective, Compute, Matmul, StepPhase
from simulator.units import DTYPE_BYTES

#: Bytes of which a row has a multiple in products of fast kernels.
ALIGNED = 16
#: Role of a product -> phase of the pass that runs it.
PHASES = {"fwd": StepPhase.FORWARD, "dgrad": StepPhase.BACKWARD, "wgrad": StepPhase.WEIGHT_GRADIENT}


def add_gradient(shapes: FrameworkShapes, name: str, params: int) -> Ops:
    """Return the addition of a new gradient in working precision to the buffer of ``grad_dtype``.

    A complete gradient torch's DDP multiplies by 1 / dp on its way to its bucket (reducer.cpp,
    ``mark_variable_ready_dense``).
    """
    ops: Ops = ()
    buffer = float(DTYPE_BYTES[shapes.grad_dtype] * params)
    if shapes.adds_gradients:
        alike = shapes.weight_element == DTYPE_BYTES[shapes.grad_dtype]  # added by the kernel that adds activations
        op = "residual" if alike else "accumulate"
        ops += (memory("W", f"{name} grad add", op, shapes.weight_element * params + buffer, buffer, shapes.dtype),)
    if shapes.fills_buckets:
        ops += (memory("W", f"{name} grad to bucket", "copy", buffer, buffer, shapes.dtype),)
    return ops


def new_gradient_bytes(shapes: FrameworkShapes, params: int) -> float:
    """Return the bytes that are alive while the new gradient of a weight is added to the buffer.

    They are that gradient's. Where it stays and is counted with the others, they are those of its copy in the buffer's
    type.
    """
    return float((DTYPE_BYTES[shapes.grad_dtype] if shapes.keeps_gradients else shapes.weight_element) * params)


@dataclass(frozen=True)
class LinearLayer:
    """The layer y (tokens x n) = x (tokens x k) W, with n and k as one rank has them; other fields as of `linear`."""

    block: str
    name: str
    n: int
    k: int
    split: str
    bias: bool
    shared: int
    rows: int

    def tokens(self, shapes: FrameworkShapes) -> int:
        """Return the rows of x and y on which a rank works."""
        return shapes.rows if self.split == "duplicated" else shapes.tokens

    def x_bytes(self, shapes: FrameworkShapes) -> float:
        """Return the bytes of x, whole."""
        return float(shapes.element * self.tokens(shapes) * self.k)

    def y_bytes(self, shapes: FrameworkShapes) -> float:
        """Return the bytes of y, whole."""
        return float(shapes.element * self.tokens(shapes) * self.n)

    def w_bytes(self, shapes: FrameworkShapes) -> float:
        """Return the bytes of W in working precision."""
        return float(shapes.element * self.n * self.k)

    def product(self, shapes: FrameworkShapes, role: str, rows: int) -> Compute:
        """Return the product of so many rows in its ``role``: fwd, dgrad or wgrad."""
        sizes = {"fwd": (rows, self.n, self.k), "dgrad": (rows, self.k, self.n), "wgrad": (self.n, self.k, rows)}
        return product(shapes, self.name, role, *sizes[role])


def linear(
    shapes: FrameworkShapes,
    block: str,
    name: str,
    n: int,
    k: int,
    *,
    split: str,
    saved: str,
    bias: bool = False,
    shared: int = 0,
    rows: int = 0,
    cached: bool = True,
    wide: bool = False,
    first: bool = True,
) -> Node:
    """Return y (tokens x n) = x (tokens x k) W, n and k as this rank has them.

    ``split`` says how W is split over the tensor-parallel ranks (see `_passes`). The bias is added in the product's
    epilogue or in the kernel after it, at no cost of its own. Where a framework adds it after a sum over ranks it is a
    kernel. Its gradient is a sum over rows. ``shared`` of the n columns are held by more than one rank. ``rows`` are
    those of the model's own W, where they do not follow from n. ``wide``: under autocast x is in fp32. ``first``: no
    other product before it reads the same x.

    Autograd must be handed a gradient of the weight's size even where the product has added it to the buffer already.
    TransformerEngine keeps an empty tensor per shape for that (``get_dummy_wgrad`` in pytorch/module/base.py, 2.0 and
    later); Megatron-LM's own linear layer (``cached`` false) makes a new one each time.
    """
    layer = LinearLayer(block, f"{block}.{name}", n, k, split, bias, shared, rows)
    x_bytes, y_bytes = layer.x_bytes(shapes), layer.y_bytes(shapes)
    forward, input_grad, gather = _passes(shapes, layer)
    kept, gather = _kept_input(shapes, layer, saved, gather)
    wgrad = layer.product(shapes, "wgrad", layer.tokens(shapes))
    weight_grad: Ops = (wgrad, *(() if shapes.accumulates_in_product else add_gradient(shapes, layer.name, n * k)))
    if bias:
        added, bias_grad = _bias(shapes, layer)
        forward, weight_grad = (*forward, *added), (*weight_grad, *bias_grad)
    dgrad, summed = layer.product(shapes, "dgrad", layer.tokens(shapes)), _summed(shapes, block, x_bytes)
    hidden = (*_hidden(gather, dgrad), *_hidden(summed, wgrad), *weight_grad[1:])
    placeholder = shapes.accumulates_in_product and cached
    weight_grad_bytes = (x_bytes if gather else 0) + (0 if placeholder else new_gradient_bytes(shapes, n * k))
    node = Node(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        gather=gather,
        together=hidden if shapes.overlaps_tp and split == "column" else (),
        saved=kept,
        saved_for_weights=kept,
        # Gradients of y and x whole; x or y once more as this rank's rows beside the gathered copy.
        grad_bytes=x_bytes + y_bytes + weight_grad_bytes,
        output_grad_bytes=y_bytes,
        weight_grad_bytes=weight_grad_bytes,
        placeholders=(Tensor(f"weight gradient {n} x {k}", layer.w_bytes(shapes)),) if placeholder else (),
        weights=_weights(shapes, layer),
    )
    if shapes.framework.pads_products and n * shapes.element % ALIGNED:
        node = _padded(shapes, layer, node)
    node = in_low_precision(shapes, node, layer.name, layer.tokens(shapes), n, k, first=first)
    return cast_operands(shapes, node, layer.name, n, k, wide=wide, bias=bias) if shapes.autocast else node


def _kept_input(
    shapes: FrameworkShapes, layer: LinearLayer, saved: str, gather: tuple[Collective, ...]
) -> tuple[tuple[Tensor, ...], tuple[Collective, ...]]:
    """Return what is kept of x for the weight gradient, and what is to be gathered for it once more."""
    x_bytes = layer.x_bytes(shapes)
    if gather and shapes.framework.keeps_gathered_inputs:
        whose = f" for {layer.name}" if shapes.gathers_each_product else ""
        return (Tensor(f"{saved} gathered{whose}", x_bytes),), ()
    return (Tensor(saved, x_bytes * shapes.rows / shapes.tokens if layer.split == "column" else x_bytes),), gather


def _bias(shapes: FrameworkShapes, layer: LinearLayer) -> tuple[Ops, Ops]:
    """Return the kernel that adds the bias to y, if there is one, and those of its gradient."""
    name, n, split, y_bytes = layer.name, layer.n, layer.split, layer.y_bytes(shapes)
    y_kept = y_bytes * shapes.rows / shapes.tokens if split == "row" else y_bytes
    add = memory("F", f"{name} bias", "bias", y_kept, y_kept, shapes.dtype)
    apart = shapes.framework.adds_bias_after_sums and shapes.tp > 1 and split == "row"
    gradient = memory("W", f"{name} bias grad", "reduce", y_kept, shapes.element * n, shapes.dtype, n)
    return (add,) if apart else (), (gradient, *add_gradient(shapes, f"{name} bias", n))


def _padded(shapes: FrameworkShapes, layer: LinearLayer, node: Node) -> Node:
    """Return ``node`` with copies of W, and of the gradient of y for each of its products, that have padded rows.

    What makes y reads no padding (torch/_inductor/fx_passes/pad_mm.py).
    """
    name, y_bytes, w_bytes = layer.name, layer.y_bytes(shapes), layer.w_bytes(shapes)
    return replace(
        node,
        forward=(memory("F", f"{name} pad", "copy", w_bytes, w_bytes, shapes.dtype), *node.forward),
        input_grad=(
            memory("B", f"{name} grad pad", "copy", y_bytes, 2 * y_bytes, shapes.dtype),
            memory("B", f"{name} pad again", "copy", w_bytes, w_bytes, shapes.dtype),
            *node.input_grad,
        ),
    )


def with_summed_gradients(shapes: FrameworkShapes, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return products of one input, whose gradients autograd adds up: all but the last have a sum behind theirs.

    Tensor-parallel ranks gather the input before the first, and sum its gradient when that of the first is added. Or
    each product does so for itself, so that ranks add up their rows of the gradient.
    """
    if len(nodes) == 1 or shapes.framework.fuses_pointwise:
        return tuple(nodes)
    by_product = shapes.gathers_each_product
    nbytes = float(shapes.weight_element * (shapes.rows if by_product else shapes.tokens) * shapes.hidden)

    def summed(node: Node, comms: Ops) -> Node:
        add = memory(
            "B",
            f"{node.weights[0].gradient_product.removesuffix(' wgrad')} input grad",
            "residual",
            2 * nbytes,
            nbytes,
            shapes.dtype,
        )
        input_grad = (*(node.input_grad if by_product else _kernels(node.input_grad)), add, *comms)
        return replace(node, input_grad=input_grad, grad_bytes=node.grad_bytes + nbytes)

    def after_the_first(node: Node) -> Node:
        return replace(node, forward=_kernels(node.forward), input_grad=_kernels(node.input_grad))

    if by_product:
        return (*(summed(node, ()) for node in nodes[:-1]), nodes[-1])
    first = nodes[0]
    sums = tuple(op for op in first.input_grad if _exchanges(op))
    *inner, last = map(after_the_first, nodes[1:])
    return (summed(first, sums), *(summed(node, ()) for node in inner), last)


def _kernels(ops: Ops) -> Ops:
    return tuple(op for op in ops if not _exchanges(op))


def _exchanges(op: Op) -> bool:
    """Tell whether ``op`` is communication of tensor parallelism, or a copy for it."""
    return isinstance(op, Collective) or (isinstance(op, Compute) and op.name.startswith("tp."))


def _with_copies(shapes: FrameworkShapes, phase: str, ops: Ops) -> Ops:
    """Return ``ops`` with a copy after each gathering of rows, and before each reduce-scatter of them.

    Functional collectives join and cut the first dimension; rows of a sequence are the second
    (torch/distributed/_functional_collectives.py, ``all_gather_tensor``, ``reduce_scatter_tensor``).
    """
    ordered: list[Op] = []
    for op in ops:
        if isinstance(op, Collective) and op.op == "reduce_scatter":
            ordered.append(memory(phase, f"{op.name} cut", "copy", op.nbytes, op.nbytes, shapes.dtype))
        ordered.append(op)
        if isinstance(op, Collective) and op.op == "all_gather":
            ordered.append(memory(phase, f"{op.name} join", "strided", op.nbytes, op.nbytes, shapes.dtype))
    return tuple(ordered)


def _hidden(comms: tuple[Collective, ...], kernel: Compute) -> Ops:
    """Return ``kernel`` with communication beside it, if there is any."""
    return tuple(Beside(comm, (kernel,)) for comm in comms) or (kernel,)


def product(shapes: FrameworkShapes, name: str, role: str, m: int, n: int, k: int) -> Compute:
    """Return the product ``name`` in its ``role``: fwd, dgrad or wgrad."""
    accumulate = role == "wgrad" and shapes.accumulates_in_product
    out_dtype = shapes.grad_dtype if accumulate else ""
    kernel = Matmul(m, n, k, dtype=shapes.dtype, role=role, out_dtype=out_dtype, accumulate=accumulate)
    return Compute(name if role == "fwd" else f"{name} {role}", kernel, PHASES[role])


def _passes(shapes: FrameworkShapes, layer: LinearLayer) -> tuple[Ops, Ops, tuple[Collective, ...]]:
    """Return `_split_passes`, with the copies around their collectives where a framework has such."""
    forward, input_grad, gather = _split_passes(shapes, layer)
    if shapes.framework.copies_gathered:
        forward, input_grad = _with_copies(shapes, "F", forward), _with_copies(shapes, "B", input_grad)
    return forward, input_grad, gather


def _split_passes(shapes: FrameworkShapes, layer: LinearLayer) -> tuple[Ops, Ops, tuple[Collective, ...]]:
    """Return the forward pass, the input gradient, and the gathering of x for the weight gradient.

    ``column`` starts from a replicated x and sums its gradient, ``row`` ends with a sum of y (arXiv 1909.08053, section
    3). With sequence parallelism x is all-gathered and the sums are reduce-scatters (arXiv 2205.05198, section 4.2.2).
    Then x is kept as the rank's own shard, to be gathered once more for the weight gradient. ``none``: every rank holds
    W and does all of it. ``duplicated``: every rank holds W and works on its own rows (Megatron-Core's name, as of
    `TELinear`).

    Where tensor-parallel communication is overlapped and there is sequence parallelism, each all-gather with the
    product after it, and each product with the reduce-scatter after it, becomes a ring. It has t products of 1/t of the
    rows beside t - 1 exchanges (Wang et al., ASPLOS 2023, doi 10.1145/3567955.3567959; PyTorch's async TP;
    TransformerEngine's userbuffers with ``ring_exchange``). The unsplit backward of a column-split layer hides its two
    collectives whole instead. The gathering of x goes beside the input gradient's product, and the sum beside the
    weight gradient's (Megatron-LM's ``LinearWithGradAccumulationAndAsyncCommunication``, TransformerEngine's ``bulk``).
    Without sequence parallelism only that sum, an all-reduce, is hidden, as in Megatron-LM.
    """
    block, x_bytes, y_bytes = layer.block, layer.x_bytes(shapes), layer.y_bytes(shapes)
    whole, dgrad = (layer.product(shapes, role, layer.tokens(shapes)) for role in ("fwd", "dgrad"))
    if layer.split == "duplicated":
        return (whole,), (dgrad,), ()
    if layer.split == "none":
        return (*_gathered(shapes, block, x_bytes), whole), (dgrad,), ()
    in_ring = shapes.overlaps_tp and shapes.sequence_parallel
    chunk, dgrad_chunk = layer.product(shapes, "fwd", shapes.rows), layer.product(shapes, "dgrad", shapes.rows)
    if layer.split == "column":
        gather = _gathered(shapes, block, x_bytes)
        if in_ring:
            return (
                _gather_around(shapes, block, x_bytes, chunk),
                _sum_around(shapes, block, x_bytes, dgrad_chunk),
                gather,
            )
        return (*gather, whole), (dgrad, *_summed(shapes, block, x_bytes)), gather
    if in_ring:
        return _sum_around(shapes, block, y_bytes, chunk), _gather_around(shapes, block, y_bytes, dgrad_chunk), ()
    return (whole, *_summed(shapes, block, y_bytes)), (*_gathered(shapes, block, y_bytes), dgrad), ()


def _gathered(shapes: FrameworkShapes, block: str, nbytes: float) -> tuple[Collective, ...]:
    """Return the gathering of rows that tensor-parallel ranks have a part of each."""
    return (comm("all_gather", block, nbytes),) if shapes.sequence_parallel else ()


def _summed(shapes: FrameworkShapes, block: str, nbytes: float) -> tuple[Collective, ...]:
    """Return the sum over tensor-parallel ranks: of whole rows, or with sequence parallelism of each rank's part."""
    op = "reduce_scatter" if shapes.sequence_parallel else "all_reduce"
    return (comm(op, block, nbytes),) if shapes.tp > 1 else ()


def _weights(shapes: FrameworkShapes, layer: LinearLayer) -> tuple[Weight, ...]:
    """Return W, and the bias of a layer that has one."""
    name, n, k, split, shared = layer.name, layer.n, layer.k, layer.split, layer.shared
    over = () if split in ("none", "duplicated") else ("tp",)
    whole_rows = (n - shared) * shapes.tp + shared * shapes.tp // shapes.kv_replicas if split == "column" else n
    rows = layer.rows or whole_rows
    columns = k * shapes.tp if split == "row" else k
    weight = Weight(
        weight_name(name),
        (n, k),
        (rows, columns),
        shapes.dtype,
        sharded_over=over,
        partial_rows=n if split == "duplicated" and shapes.sequence_parallel else shared,
        gradient_product=f"{name} wgrad",
    )
    if not layer.bias:
        return (weight,)
    # A row-split layer's bias is added to the sum, by every rank to its own rows.
    whole_bias = split == "row"
    return (
        weight,
        Weight(
            weight_name(name, "bias"),
            (n,),
            (rows,),
            shapes.dtype,
            sharded_over=() if whole_bias else over,
            partial_rows=n if whole_bias and shapes.sequence_parallel else shared,
        ),
    )


def _gather_around(shapes: FrameworkShapes, block: str, nbytes: float, chunk: Compute) -> Ops:
    """Return ``chunk`` for the rows of every rank, this rank's first, while those of the next come round.

    The rows of all ranks are ``nbytes``.
    """
    around = Beside(comm("send_recv", block, nbytes / shapes.tp), (_further(shapes, chunk),))
    return (*(around,) * (shapes.tp - 1), chunk)


def _sum_around(shapes: FrameworkShapes, block: str, nbytes: float, chunk: Compute) -> Ops:
    """Return ``chunk`` for the rows of every rank, this rank's last, while the sum of the rows before them goes round.

    Every rank adds its part to the sum that comes in, and hands it on.
    """
    part = nbytes / shapes.tp
    add = memory(chunk.phase, f"{chunk.name} partial sum", "residual", 2 * part, part, shapes.dtype)
    around = (Beside(comm("send_recv", block, part), (_further(shapes, chunk),)), _further(shapes, add))
    return (chunk, *around * (shapes.tp - 1))


def _further(shapes: FrameworkShapes, op: Compute) -> Compute:
    """Return a kernel of a ring behind its first product, as the framework launches it."""
    return replace(op, within_call=shapes.framework.rings_in_one_call)
