"""Gemma 3 as Hugging Face's transformers 5 runs it: norms whose weights are in fp32, a GELU with a gate, scaled words.

github.com/huggingface/transformers 5.17, src/transformers/models/gemma3/modeling_gemma3.py. Kernels were counted in
a step on an H200.
"""

from __future__ import annotations

from simulator.frameworks import pytorch
from simulator.frameworks.framework import ActivationKernels, NormPlace, Traffic
from simulator.operations.nodes import Node, Ops, Tensor, memory
from simulator.operations.shapes import Shapes

#: ``Gemma3RMSNorm``: the quotient stays in fp32, is multiplied by ``1 + weight`` in fp32, and is cast then.
NORM_FORWARD = (
    *pytorch.RMS_NORM_FORWARD[:4],
    ("weight", "strided", 1, 0, 1, 0),
    ("cast", "cast", 1, 0, 0, 1),
)
#: So is its gradient.
NORM_BACKWARD = (
    ("cast", "upcast", 0, 1, 1, 0),
    ("weight", "strided", 1, 0, 1, 0),
    *pytorch.RMS_NORM_BACKWARD[2:],
)
#: ``gelu(gate_proj(x), approximate="tanh") * up_proj(x)``. PyTorch has one kernel for the GELU each way. By a tangent
#: it is as fast as memory (97 and 132 us of 84 million elements on an H200), which by the error function it is not.
GATED = ActivationKernels(
    forward=(Traffic("", "activation", 1, 1), Traffic(" gate", "residual", 2, 1)),
    backward=(
        Traffic(" gate", "residual", 2, 1),
        Traffic(" up", "residual", 2, 1),
        Traffic("", "activation_bwd", 2, 1),
    ),
    kept=("gate",),
)


def is_gemma(shapes: Shapes) -> bool:
    """Return True for models of Gemma's kind, which GeGLU means."""
    return shapes.activation == "geglu"


def rms_norm(shapes: Shapes, place: NormPlace) -> Node:
    """Return Gemma's RMSNorm operation by operation, or that of gpt-oss and OLMo 2, which add no one to the weight.

    Kept are its input and the quotient, both in fp32.
    """
    wide = 4.0 * shapes.rows * shapes.hidden
    gradient = f"{place.name}.weight wgrad"
    quotient = Tensor(f"{place.name}.divided", wide)
    *normed, weighed, cast = pytorch.norm_kernels(shapes, place, "F", NORM_FORWARD)
    added = _small(shapes, place, "F", ("weight float", "weight plus one")) if is_gemma(shapes) else ()
    return Node(
        forward=(*normed, *added, weighed, cast),
        input_grad=pytorch.norm_kernels(shapes, place, "B", NORM_BACKWARD),
        weight_grad=(
            memory("W", gradient, "residual", 2 * wide, wide, "fp32"),
            memory("W", f"{gradient} sum", "reduce", wide, 4.0 * shapes.hidden, "fp32", shapes.hidden),
            *_small(shapes, place, "W", ("weight grad cast",)),
        ),
        saved=(Tensor(f"{place.name}.float", wide), quotient),
        saved_for_weights=(quotient,),
        grad_bytes=3 * wide,
        output_grad_bytes=shapes.row_bytes,
    )


def _small(shapes: Shapes, place: NormPlace, phase: str, labels: tuple[str, ...]) -> Ops:
    """Return kernels over a norm's weight, of which its launches count and not its bytes."""
    nbytes = 4.0 * shapes.hidden
    return tuple(memory(phase, f"{place.name}.{label}", "copy", nbytes, nbytes, shapes.dtype) for label in labels)


def scaled_words(shapes: Shapes, phase: str) -> Ops:
    """Return the product of embedded words, or of their gradient, with the square root of the hidden size."""
    name = "embedding.scale" + (" wgrad" if phase == "W" else "")
    return (memory(phase, name, "rope", shapes.row_bytes, shapes.row_bytes, shapes.dtype),)
