"""LayerNorm and RMSNorm: a kernel each way, or RMSNorm operation by operation."""

from __future__ import annotations

from simulator.models.linear import add_gradient
from simulator.models.weight_names import weight_name
from simulator.operations.nodes import Node, Ops, Tensor, fuse, memory
from simulator.operations.shapes import Shapes
from simulator.operations.weights import Weight, elements
from simulator.program import Compute

#: Kernels of ``(x.float() * rsqrt(x.float().pow(2).mean(-1) + eps)).type_as(x) * weight``. That is PyTorch's RMSNorm up
#: to 2.8 (PyTorch, pull request 153666), Meta's and Hugging Face's in Llama. A kernel has a label, a class, the tensors
#: that it reads in fp32 and in the working precision, and those that it writes in both. Kernels that take the same
#: number from a whole row or column have no vector loads. Kernels over one number per row are left out.
FORWARD = (
    ("float", "upcast", 0, 1, 1, 0),
    ("square", "activation", 1, 0, 1, 0),
    ("mean", "reduce", 1, 0, 0, 0),
    ("divide", "strided", 1, 0, 1, 0),
    ("cast", "cast", 1, 0, 0, 1),
    ("weight", "bias", 0, 1, 0, 1),
)
#: Autograd's kernels, in its order: of the product with the weight, the cast, the division (of x, and of its row's
#: number), and the square (2 x times the gradient of the mean). The sum of both gradients of x.float() and the cast of
#: that sum come last.
BACKWARD = (
    ("weight", "bias", 0, 1, 0, 1),
    ("cast", "upcast", 0, 1, 1, 0),
    ("divide", "strided", 1, 0, 1, 0),
    ("divisor", "residual", 2, 0, 1, 0),
    ("divisor sum", "reduce", 1, 0, 0, 0),
    ("square", "copy", 1, 0, 1, 0),
    ("square doubled", "activation", 1, 0, 1, 0),
    ("mean", "strided", 1, 0, 1, 0),
    ("sum", "residual", 2, 0, 1, 0),
    ("float", "cast", 1, 0, 0, 1),
)


def norm(z: Shapes, name: str, *, saved: str, residual: bool) -> Node:
    """LayerNorm or RMSNorm over this rank's rows: one kernel forward; backward one for the input's gradient and one for
    the parameters'. The statistics it keeps (8 bytes per row) are neglected, as in arXiv 2205.05198.

    ``residual``: its input also goes round the block, so that autograd adds the two gradients.
    """
    if z.norm_by_ops:
        return _by_ops(z, name, residual=residual)
    weights = _weights(z, name)
    params = elements(weights)
    small = z.element * params
    op = "norm" if z.norm == "layernorm" else "rms_norm"
    backward = memory("B", f"{name} bwd", f"{op}_bwd", 2 * z.row_bytes, z.row_bytes, z.dtype, z.hidden)
    input_grad: Ops = (backward,)
    if residual:
        add = _added(z, name)
        input_grad = (fuse("B", backward, add, z.row_bytes, keep=False),) if z.compiled else (backward, add)
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


def _weights(z: Shapes, name: str) -> tuple[Weight, ...]:
    """Return a norm's weight and, of a LayerNorm, its bias.

    With sequence parallelism every rank computes their gradients from its own rows.
    """
    partial = z.hidden if z.sequence_parallel else 0
    tensors = ("weight", "bias") if z.norm == "layernorm" else ("weight",)
    return tuple(
        Weight(weight_name(name, tensor), (z.hidden,), (z.hidden,), z.dtype, partial_rows=partial) for tensor in tensors
    )


def _added(z: Shapes, name: str) -> Compute:
    """Autograd's sum of the gradient through the norm and the one that goes round the block."""
    return memory("B", f"{name} residual grad", "residual", 2 * z.row_bytes, z.row_bytes, z.dtype)


def _by_ops(z: Shapes, name: str, *, residual: bool) -> Node:
    """RMSNorm as `FORWARD` and `BACKWARD`; kept are its input in fp32, for the square and the division, and what the
    weight multiplies."""
    wide = 4.0 * z.rows * z.hidden

    def kernel(phase: str, label: str, op: str, *tensors: int) -> Ops:
        read, written = (tensors[at] * wide + tensors[at + 1] * z.row_bytes for at in (0, 2))
        suffix = " bwd" if phase == "B" else ""
        return (memory(phase, f"{name}.{label}{suffix}", op, read, written, z.dtype),)

    input_grad = tuple(op for each in BACKWARD for op in kernel("B", *each))
    if residual:
        input_grad += (_added(z, name),)
    return Node(
        forward=tuple(op for each in FORWARD for op in kernel("F", *each)),
        input_grad=input_grad,
        weight_grad=(
            memory("W", f"{name}.weight wgrad", "residual", 2 * z.row_bytes, z.row_bytes, z.dtype),
            memory("W", f"{name}.weight wgrad sum", "reduce", z.row_bytes, z.element * z.hidden, z.dtype, z.hidden),
            *add_gradient(z, name, z.hidden),
        ),
        saved=(Tensor(f"{name}.float", wide), Tensor(f"{name}.divided", z.row_bytes)),
        grad_bytes=3 * wide,
        output_grad_bytes=z.row_bytes,
        weights=_weights(z, name),
    )
