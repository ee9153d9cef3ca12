"""Norms and rotary positions of rows inside a mixer, whose widths are no others' of the model."""

from __future__ import annotations

from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.operations.weights import Weight


def rms_norm(shapes: Shapes, name: str, rows: int, width: int, *, weighted: bool = True) -> Node:
    """Return an RMSNorm of so many ``rows``: a kernel each way, and one for the gradient of its weight."""
    nbytes = float(shapes.element * rows * width)
    saved = (Tensor(f"mixer.{name} input", nbytes),)
    weight = Weight(f"mixer.{name}.weight", (width,), (width,), shapes.dtype)
    wgrad = memory("W", f"mixer.{name} wgrad", "rms_norm_bwd", 2 * nbytes, shapes.element * width, shapes.dtype, width)
    return Node(
        forward=(memory("F", f"mixer.{name}", "rms_norm", nbytes, nbytes, shapes.dtype, width),),
        input_grad=(memory("B", f"mixer.{name} bwd", "rms_norm_bwd", 2 * nbytes, nbytes, shapes.dtype, width),),
        weight_grad=(wgrad,) if weighted else (),
        saved=saved,
        grad_bytes=2 * nbytes,
        output_grad_bytes=nbytes,
        weights=(weight,) if weighted else (),
    )


def rotation(shapes: Shapes, name: str, rows: int, width: int) -> Node:
    """Return rotary positions on a part of so many ``rows``, in place."""
    nbytes = float(shapes.element * rows * width)
    return Node(
        forward=(memory("F", f"mixer.rope {name}", "rope", nbytes, nbytes, shapes.dtype),),
        input_grad=(memory("B", f"mixer.rope {name} bwd", "rope", nbytes, nbytes, shapes.dtype),),
        grad_bytes=nbytes,
    )
