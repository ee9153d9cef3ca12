"""LayerNorm and RMSNorm: a kernel each way, or RMSNorm operation by operation."""

from __future__ import annotations

from dataclasses import replace

from simulator.frameworks.framework import NormPlace
from simulator.models.linear import add_gradient
from simulator.models.shapes import FrameworkShapes
from simulator.models.weight_names import weight_name
from simulator.operations.nodes import Node, Ops, Tensor, fuse, memory
from simulator.operations.weights import Weight, elements
from simulator.program import Compute


def norm(
    shapes: FrameworkShapes, name: str, *, saved: str, residual: bool, readers: int = 1, per_head: bool = False
) -> Node:
    """Return a LayerNorm or RMSNorm over this rank's rows.

    It is one kernel forward; backward there is one for the input's gradient and one for the parameters'. The statistics
    that it keeps (8 bytes per row) are neglected, as in arXiv 2205.05198.

    ``residual``: its input also goes round the block, so that autograd adds the two gradients. ``readers``: products
    that read what it gives. ``per_head``: it norms each head.
    """
    place = NormPlace(name, saved, residual, readers, per_head)
    if shapes.norm_by_operations:
        return _by_operations(shapes, place)
    weights = _weights(shapes, name)
    if shapes.framework.norm:
        node = shapes.framework.norm(shapes, place)
        gradient = add_gradient(shapes, name, elements(weights))
        return replace(node, weight_grad=(*node.weight_grad, *gradient), weights=weights)
    params = elements(weights)
    small = shapes.element * params
    op = "norm" if shapes.norm == "layernorm" else "rms_norm"
    backward = memory(
        "B", f"{name} bwd", f"{op}_bwd", 2 * shapes.row_bytes, shapes.row_bytes, shapes.dtype, shapes.hidden
    )
    input_grad: Ops = (backward,)
    if residual:
        add = _residual_gradient(shapes, name)
        fuses = shapes.framework.fuses_residual_and_norm
        input_grad = (fuse("B", backward, add, shapes.row_bytes, keep=False),) if fuses else (backward, add)
    return Node(
        forward=(memory("F", name, op, shapes.row_bytes, shapes.row_bytes, shapes.dtype, shapes.hidden),),
        input_grad=input_grad,
        weight_grad=(
            memory("W", f"{name} wgrad", f"{op}_bwd", 2 * shapes.row_bytes, small, shapes.dtype, shapes.hidden),
            *add_gradient(shapes, name, params),
        ),
        saved=(Tensor(saved, shapes.row_bytes),),
        grad_bytes=2 * shapes.row_bytes,
        output_grad_bytes=shapes.row_bytes,
        weights=weights,
    )


def head_norms(shapes: FrameworkShapes) -> tuple[Node, ...]:
    """Return the norms of queries and keys over the width of a head, whose weights all heads share, or over all heads.

    Each tensor-parallel rank has heads of its own, and so a part of the gradients of these weights. Norms without
    weights only bring heads to a length, as those of values do.
    """
    nodes: tuple[Node, ...] = ()
    if shapes.reuses_keys:
        return (_head_norm(shapes, "q", shapes.q_width, shapes.head_dim, weighted=True),) if shapes.qk_norm else ()
    if shapes.qk_norm:
        width = (shapes.heads, shapes.kv_heads) if shapes.qk_norm == "width" else (1, 1)
        nodes = tuple(
            _head_norm(
                shapes, name, heads * shapes.head_dim, joined * shapes.head_dim, weighted=shapes.qk_norm != "unweighted"
            )
            for name, heads, joined in (("q", shapes.heads, width[0]), ("k", shapes.kv_heads, width[1]))
        )
    return (*nodes, _value_norm(shapes)) if shapes.value_norm else nodes


def _head_norm(shapes: FrameworkShapes, name: str, columns: int, width: int, *, weighted: bool) -> Node:
    """Return the norm of the ``columns`` of a token over rows ``width`` wide."""
    rows = replace(shapes, rows=shapes.tokens * columns // width, hidden=width, sequence_parallel=shapes.tp > 1)
    node = norm(rows, f"attn.{name}_norm", saved=f"attn.{name} raw", residual=False, per_head=True)
    return node if weighted else replace(node, weight_grad=(), weights=())


def _value_norm(shapes: FrameworkShapes) -> Node:
    """Return the norm of values over a head, without weights.

    Where values are the keys, it reads what the keys' norm reads, and the two gradients are summed.
    """
    node = _head_norm(shapes, "v", shapes.v_width, shapes.v_head_dim, weighted=False)
    if not shapes.keys_as_values:
        return node
    nbytes = float(shapes.element * shapes.tokens * shapes.kv_width)
    add = memory("B", "attn.k and v grad", "residual", 2 * nbytes, nbytes, shapes.dtype)
    saved = tuple(replace(tensor, name="attn.k raw") for tensor in node.saved)
    return replace(node, input_grad=(*node.input_grad, add), saved=saved)


def _weights(shapes: FrameworkShapes, name: str) -> tuple[Weight, ...]:
    """Return a norm's weight and, of a LayerNorm, its bias.

    Where every rank works on rows of its own, it has a part of their gradients.
    """
    partial = shapes.hidden if shapes.sequence_parallel else 0
    tensors = ("weight", "bias") if shapes.norm == "layernorm" else ("weight",)
    return tuple(
        Weight(weight_name(name, tensor), (shapes.hidden,), (shapes.hidden,), shapes.dtype, partial_rows=partial)
        for tensor in tensors
    )


def _residual_gradient(shapes: FrameworkShapes, name: str) -> Compute:
    """Return autograd's sum of the gradient through the norm and the one that goes round the block."""
    return memory("B", f"{name} residual grad", "residual", 2 * shapes.row_bytes, shapes.row_bytes, shapes.dtype)


def _by_operations(shapes: FrameworkShapes, place: NormPlace) -> Node:
    """Return RMSNorm without a kernel of its own."""
    assert shapes.framework.rms_norm_by_operations is not None
    node = shapes.framework.rms_norm_by_operations(shapes, place)
    return replace(
        node,
        input_grad=(*node.input_grad, _residual_gradient(shapes, place.name)) if place.residual else node.input_grad,
        weight_grad=(*node.weight_grad, *add_gradient(shapes, place.name, shapes.hidden)),
        weights=_weights(shapes, place.name),
    )
