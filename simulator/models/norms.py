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
    z: FrameworkShapes, name: str, *, saved: str, residual: bool, readers: int = 1, per_head: bool = False
) -> Node:
    """Return a LayerNorm or RMSNorm over this rank's rows.

    It is one kernel forward; backward there is one for the input's gradient and one for the parameters'. The statistics
    that it keeps (8 bytes per row) are neglected, as in arXiv 2205.05198.

    ``residual``: its input also goes round the block, so that autograd adds the two gradients. ``readers``: products
    that read what it gives. ``per_head``: it norms each head.
    """
    place = NormPlace(name, saved, residual, readers, per_head)
    if z.norm_by_operations:
        return _by_operations(z, place)
    weights = _weights(z, name)
    if z.framework.norm:
        node = z.framework.norm(z, place)
        gradient = add_gradient(z, name, elements(weights))
        return replace(node, weight_grad=(*node.weight_grad, *gradient), weights=weights)
    params = elements(weights)
    small = z.element * params
    op = "norm" if z.norm == "layernorm" else "rms_norm"
    backward = memory("B", f"{name} bwd", f"{op}_bwd", 2 * z.row_bytes, z.row_bytes, z.dtype, z.hidden)
    input_grad: Ops = (backward,)
    if residual:
        add = _residual_gradient(z, name)
        fuses = z.framework.fuses_residual_and_norm
        input_grad = (fuse("B", backward, add, z.row_bytes, keep=False),) if fuses else (backward, add)
    return Node(
        forward=(memory("F", name, op, z.row_bytes, z.row_bytes, z.dtype, z.hidden),),
        input_grad=input_grad,
        weight_grad=(
            memory("W", f"{name} wgrad", f"{op}_bwd", 2 * z.row_bytes, small, z.dtype, z.hidden),
            *add_gradient(z, name, params),
        ),
        saved=(Tensor(saved, z.row_bytes),),
        grad_bytes=2 * z.row_bytes,
        output_grad_bytes=z.row_bytes,
        weights=weights,
    )


def head_norms(z: FrameworkShapes) -> tuple[Node, ...]:
    """Return the norms of queries and keys over the width of a head, whose weights all heads share, or over all heads.

    Each tensor-parallel rank has heads of its own, and so a part of the gradients of these weights. Norms without
    weights only bring heads to a length, as those of values do.
    """
    nodes: tuple[Node, ...] = ()
    if z.qk_norm:
        width = (z.heads, z.kv_heads) if z.qk_norm == "width" else (1, 1)
        nodes = tuple(
            _head_norm(z, name, heads * z.head_dim, joined * z.head_dim, weighted=z.qk_norm != "unweighted")
            for name, heads, joined in (("q", z.heads, width[0]), ("k", z.kv_heads, width[1]))
        )
    return (*nodes, _value_norm(z)) if z.value_norm else nodes


def _head_norm(z: FrameworkShapes, name: str, columns: int, width: int, *, weighted: bool) -> Node:
    """Return the norm of the ``columns`` of a token over rows ``width`` wide."""
    rows = replace(z, rows=z.tokens * columns // width, hidden=width, sequence_parallel=z.tp > 1)
    node = norm(rows, f"attn.{name}_norm", saved=f"attn.{name} raw", residual=False, per_head=True)
    return node if weighted else replace(node, weight_grad=(), weights=())


def _value_norm(z: FrameworkShapes) -> Node:
    """Return the norm of values over a head, without weights.

    Where values are the keys, it reads what the keys' norm reads, and the two gradients are summed.
    """
    node = _head_norm(z, "v", z.v_width, z.v_head_dim, weighted=False)
    if not z.keys_as_values:
        return node
    nbytes = float(z.element * z.tokens * z.kv_width)
    add = memory("B", "attn.k and v grad", "residual", 2 * nbytes, nbytes, z.dtype)
    saved = tuple(replace(tensor, name="attn.k raw") for tensor in node.saved)
    return replace(node, input_grad=(*node.input_grad, add), saved=saved)


def _weights(z: FrameworkShapes, name: str) -> tuple[Weight, ...]:
    """Return a norm's weight and, of a LayerNorm, its bias.

    Where every rank works on rows of its own, it has a part of their gradients.
    """
    partial = z.hidden if z.sequence_parallel else 0
    tensors = ("weight", "bias") if z.norm == "layernorm" else ("weight",)
    return tuple(
        Weight(weight_name(name, tensor), (z.hidden,), (z.hidden,), z.dtype, partial_rows=partial) for tensor in tensors
    )


def _residual_gradient(z: FrameworkShapes, name: str) -> Compute:
    """Return autograd's sum of the gradient through the norm and the one that goes round the block."""
    return memory("B", f"{name} residual grad", "residual", 2 * z.row_bytes, z.row_bytes, z.dtype)


def _by_operations(z: FrameworkShapes, place: NormPlace) -> Node:
    """Return RMSNorm without a kernel of its own."""
    assert z.framework.rms_norm_by_operations is not None
    node = z.framework.rms_norm_by_operations(z, place)
    return replace(
        node,
        input_grad=(*node.input_grad, _residual_gradient(z, place.name)) if place.residual else node.input_grad,
        weight_grad=(*node.weight_grad, *add_gradient(z, place.name, z.hidden)),
        weights=_weights(z, place.name),
    )
