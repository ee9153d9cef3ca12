"""Adapters as modules of Python run them, a kernel per operation: PEFT, torchtune, NeMo.

github.com/huggingface/peft, src/peft/tuners/lora: layer.py, bnb.py, dora.py.
"""

from __future__ import annotations

from simulator.frameworks.framework import AdapterKernels, Traffic
from simulator.operations.nodes import Node, Op, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.operations.tuning import ThinProducts
from simulator.program import Compute, Matmul, StepPhase

ADAPTERS = AdapterKernels(
    added=(Traffic(" scale", "activation", 1, 1), Traffic(" add", "residual", 2, 1)),
    added_backward=(Traffic(" scale", "activation", 1, 1),),
    input_summed=Traffic(" input grad", "residual", 2, 1),
)
#: PEFT clones what a product of a 4-bit weight gives (``Linear4bit.forward``).
COPIED = (Traffic(" clone", "copy", 1, 1),)

#: DoRA, in tensors of the product's output: of (m - 1) y + m s B(A(x)) + y, where m is a magnitude over a norm. Kernels
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
#: In tensors of the weight's size: s B A, its sum with the weight, and the norm of each row of that.
_NORM = (
    Traffic(" scaled", "activation", 1, 1),
    Traffic(" weight sum", "strided", 2, 1),
    Traffic(" norm", "reduce", 1, 0),
)


def magnitudes(shapes: Shapes, products: ThinProducts) -> Node:
    """Return DoRA's magnitudes of the columns of a product (``DoraLinearLayer.forward``).

    B A is got by taking the identity through both, which has no gradient. The operands of both terms are kept.
    """
    name, square = f"{products.name} magnitude", float(shapes.element * products.inner * products.inner)
    weight, output = (
        float(shapes.element * size) for size in (products.outer * products.inner, products.rows * products.outer)
    )

    def kernels(phase: str, traffic: tuple[Traffic, ...], nbytes: float, suffix: str = "") -> list[Op]:
        return [
            memory(phase, f"{name}{s}{suffix}", op, r * nbytes, w * nbytes, shapes.dtype) for s, op, r, w in traffic
        ]

    def product(factor: str, n: int, k: int) -> Compute:
        return Compute(f"{name} {factor}", Matmul(products.inner, n, k, dtype=shapes.dtype), StepPhase.FORWARD)

    return Node(
        forward=(
            memory("F", f"{name} identity", "zero", 0, square, shapes.dtype),
            product("A", products.rank, products.inner),
            product("B", products.outer, products.rank),
            *kernels("F", _NORM, weight),
            *kernels("F", _MAGNITUDES_FORWARD, output),
        ),
        input_grad=tuple(kernels("B", _MAGNITUDES_BACKWARD, output, " bwd")),
        weight_grad=tuple(kernels("W", _MAGNITUDE_GRADIENT, output, " wgrad")),
        saved=(Tensor(f"{products.name} output", output), Tensor(f"{products.name} adapted", output)),
        forward_bytes=square + 2 * weight,
        grad_bytes=3 * output,
        output_grad_bytes=output,
    )
