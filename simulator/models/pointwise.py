"""Operations that work element by element: activations, rotary positions."""

from __future__ import annotations

from simulator.frameworks.framework import traffic_kernels
from simulator.frameworks.rotation import rotated
from simulator.models.low_precision import activation_in_low_precision
from simulator.models.shapes import FrameworkShapes
from simulator.operations.nodes import Node, Ops, Tensor
from simulator.units import FP32_BYTES


def activation(shapes: FrameworkShapes, block: str, elements: int) -> Node:
    """Return the activation between the two products of ``block``: GELU, ReLU, SwiGLU or GeGLU.

    Its output has so many ``elements``. ReLU keeps its output, which is the next product's input.
    """
    nbytes = float(shapes.element * elements)
    kernels_of = (shapes.framework.experts.activation if block == "moe" else None) or shapes.framework.activation
    name, kernels = f"{block}.{shapes.activation}", kernels_of(shapes)
    saved: tuple[Tensor, ...]
    if shapes.gated:  # gate and up come from one product
        saved = (Tensor(f"{block}.pre", 2 * nbytes),)
    else:
        saved = (Tensor(f"{block}.act" if shapes.activation == "relu" else f"{block}.pre", nbytes),)
    saved = saved if kernels.keeps_input else ()
    saved += tuple(Tensor(f"{block}.{result}", nbytes) for result in kernels.kept)
    saved += tuple(Tensor(f"{block}.{result}", FP32_BYTES * float(elements)) for result in kernels.kept_in_fp32)
    node = Node(
        forward=traffic_kernels("F", name, kernels.forward, nbytes, shapes.dtype),
        input_grad=traffic_kernels("B", name, kernels.backward, nbytes, shapes.dtype),
        saved=saved,
        grad_bytes=(3 if shapes.gated else 2) * nbytes,
    )
    return activation_in_low_precision(shapes, node, name, nbytes)


def rope(shapes: FrameworkShapes) -> Node:
    """Return the rotary positions of queries and keys. The gradient is the inverse rotation and needs no activation."""
    return rotated(shapes, *shapes.framework.rotation)


def rotation_kernels(shapes: FrameworkShapes, phase: str, name: str, nbytes: float, *, latent: bool = False) -> Ops:
    """Return the kernels of a ``phase`` that turn ``nbytes`` of queries or keys by their positions, or of gradients.

    ``latent``: they are those of latent attention.
    """
    framework = shapes.framework
    forward, backward = (framework.latent_rotation if latent else None) or framework.rotation
    table = forward if phase == "F" else backward
    return traffic_kernels(phase, f"attn.rope {name}", table, nbytes, shapes.dtype)
