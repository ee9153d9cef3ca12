"""DoRA (arXiv 2402.09353): LoRA, and the magnitude of every column of W + s A B trained apart.

Kernels are those of PEFT, one per operation: github.com/huggingface/peft, src/peft/tuners/lora/dora.py.
"""

from __future__ import annotations

from simulator.adapters.kind import AdaptedProduct, AdapterKind
from simulator.frameworks.framework import Traffic, traffic_kernels
from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.operations.tuning import ThinProducts
from simulator.program import Compute, Matmul, StepPhase

#: In tensors of the product's output: of (m - 1) y + m s (x A) B + y, where m is a magnitude over a norm. Kernels
#: that take one number for a whole column have no vector loads.
_MAGNITUDES_FORWARD = (
    Traffic(" magnify base", "bias", 1, 1),
    Traffic(" magnify", "bias", 1, 1),
    Traffic(" scale", "activation", 1, 1),
    Traffic(" join", "residual", 2, 1),
    Traffic(" add", "residual", 2, 1),
)
_MAGNITUDES_BACKWARD = (
    Traffic(" scale", "activation", 1, 1),
    Traffic(" magnify", "bias", 1, 1),
    Traffic(" magnify base", "bias", 1, 1),
    Traffic(" base grad", "residual", 2, 1),
)
#: Of the magnitude itself, from both terms: a product, and its sum over rows.
_MAGNITUDE_GRADIENT = (Traffic("", "residual", 2, 1), Traffic(" sum", "reduce", 1, 0)) * 2
#: In tensors of the weight's size: s A B, its sum with the weight, and the norm of each column of that.
_NORM = (
    Traffic(" scaled", "activation", 1, 1),
    Traffic(" weight sum", "strided", 2, 1),
    Traffic(" norm", "reduce", 1, 0),
)


def nodes(product: AdaptedProduct) -> tuple[Node, ...]:
    """Return the products with A and B, and the magnitudes behind them."""
    return (*product.factors(), magnitudes(product))


def magnitudes(product: AdaptedProduct) -> Node:
    """Return the magnitudes of the columns of all targets of a product, whose weight is made whole first."""
    parts = [_target_magnitudes(product.shapes, one) for one in product.targets]
    return Node(
        forward=(*product.made_whole(), *(op for part in parts for op in part.forward)),
        input_grad=tuple(op for part in parts for op in part.input_grad),
        weight_grad=tuple(op for part in parts for op in part.weight_grad),
        saved=tuple(tensor for part in parts for tensor in part.saved),
        forward_bytes=max(part.forward_bytes for part in parts),
        grad_bytes=sum(part.grad_bytes for part in parts),
        output_grad_bytes=sum(part.output_grad_bytes for part in parts),
        weights=product.column_weights("lora_magnitude_vector"),
    )


def _target_magnitudes(shapes: Shapes, target: ThinProducts) -> Node:
    """Return the magnitudes of the columns of one target (``DoraLinearLayer.forward``).

    A B is got by taking the identity through both, which has no gradient. The operands of both terms are kept.
    """
    name, square = f"{target.name} magnitude", float(shapes.element * target.inner * target.inner)
    weight = float(shapes.element * target.outer * target.inner)
    output = float(shapes.element * target.rows * target.outer)

    def matmul(factor: str, n: int, k: int) -> Compute:
        return Compute(f"{name} {factor}", Matmul(target.inner, n, k, dtype=shapes.dtype), StepPhase.FORWARD)

    return Node(
        forward=(
            memory("F", f"{name} identity", "zero", 0, square, shapes.dtype),
            matmul("A", target.rank, target.inner),
            matmul("B", target.outer, target.rank),
            *traffic_kernels("F", name, _NORM, weight, shapes.dtype),
            *traffic_kernels("F", name, _MAGNITUDES_FORWARD, output, shapes.dtype),
        ),
        input_grad=traffic_kernels("B", name, _MAGNITUDES_BACKWARD, output, shapes.dtype),
        weight_grad=traffic_kernels("W", name, _MAGNITUDE_GRADIENT, output, shapes.dtype),
        saved=(Tensor(f"{target.name} output", output), Tensor(f"{target.name} adapted", output)),
        forward_bytes=square + 2 * weight,
        grad_bytes=3 * output,
        output_grad_bytes=output,
    )


#: The norm of a column of W takes all of its rows, of which each tensor-parallel rank may have a part.
KIND = AdapterKind("dora", "DoRA", nodes, splits=False, takes_dropout=False)
