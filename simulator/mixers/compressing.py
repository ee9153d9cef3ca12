"""Compression of keys along a sequence: every few tokens make one key, weighed by a softmax (DeepSeek-V4)."""

from __future__ import annotations

from simulator.mixers.mixer import MixerProduct, Operations
from simulator.mixers.rows import rms_norm, rotation
from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.operations.weights import Weight
from simulator.units import FP32_BYTES


def compression(
    shapes: Shapes, name: str, rate: int, width: int, rotary_dim: int, *, series: int, detached: bool = False
) -> Operations:
    """Return the operations that make keys ``width`` wide, one of each ``rate`` tokens.

    Each of so many ``series`` has a key and a gate of every token (transformers 5.24, modeling_deepseek_v4.py,
    ``DeepseekV4HCACompressor``, and ``DeepseekV4CSACompressor`` with two). Tokens that fill no piece are left out.
    ``detached``: no gradient reaches the layer's input.
    """
    columns, keys = series * width, shapes.batch * (shapes.seq // rate)
    return (
        MixerProduct(f"{name}_kv", columns, shapes.hidden, "none", "attn.normed", columns, detached=detached),
        MixerProduct(f"{name}_gate", columns, shapes.hidden, "none", "attn.normed", columns, detached=detached),
        _pooled(shapes, name, rate, columns, keys * width),
        rms_norm(shapes, f"{name}_norm", keys, width),
        rotation(shapes, name, keys, min(rotary_dim, width)),
    )


def _pooled(shapes: Shapes, name: str, rate: int, columns: int, outputs: int) -> Node:
    """Return the softmax of gates over the tokens of a piece, and the sum of keys that it weighs.

    One kernel each way is assumed, at the speed of sums over rows. Gates have a bias for each place in a piece.
    """
    each = float(shapes.element * shapes.tokens * columns)
    pooled = float(shapes.element * outputs)
    bias = Weight(f"mixer.{name}_places", (rate, columns), (rate, columns), shapes.dtype)
    saved = (Tensor(f"mixer.{name} keys", each), Tensor(f"mixer.{name} gates", each))
    return Node(
        forward=(memory("F", f"mixer.{name} pool", "reduce", 2 * each, pooled, shapes.dtype),),
        input_grad=(memory("B", f"mixer.{name} pool bwd", "reduce", 2 * each + pooled, 2 * each, shapes.dtype),),
        weight_grad=(
            memory(
                "W", f"mixer.{name} places wgrad", "reduce", each, FP32_BYTES * rate * columns, shapes.dtype, columns
            ),
        ),
        saved=saved,
        saved_for_weights=saved[1:],
        grad_bytes=2 * each + pooled,
        output_grad_bytes=each,
        weights=(bias,),
    )
