"""Attention to a window as Hugging Face's transformers 5 asks PyTorch for it: attention under a mask of booleans.

A mask of the window is made once for all layers. Attention under a mask has no grouped queries and skips nothing. So
every layer copies its keys and values to all heads, and turns the mask into a bias of the working precision.
That is why a window makes a step longer, not shorter.

github.com/huggingface/transformers 5.17, src/transformers: masking_utils.py (``_ignore_causal_mask_sdpa``,
``sdpa_mask``) and integrations/sdpa_attention.py (``use_gqa_in_sdpa``); torch 2.11,
aten/src/ATen/native/transformers/attention.cpp (``convert_boolean_attn_mask``).
"""

from __future__ import annotations

from simulator.operations.nodes import Node, Ops, Tensor, memory
from simulator.operations.shapes import Shapes

#: Kernels that make the mask element by element: two comparisons of positions and what both say. The sum with the
#: causal mask has vector loads.
COMPARISONS = ("causal", "both", "window")
#: Bytes that count for an element of kernels without vector loads, which elements bound: those of two in 16 bits. A
#: mask of 8,192 tokens squared takes an H200 147 to 169 us to make, and 157 us to turn into a bias.
COUNTED_BYTES = 2.0


def is_masked(shapes: Shapes) -> bool:
    """Return True for layers whose window is shorter than a sequence, or as long."""
    return shapes.has_window


def mask(shapes: Shapes) -> Ops:
    """Return the kernels that make the mask of a window, the same for all sequences."""
    scores = float(shapes.seq * shapes.seq)
    nbytes = COUNTED_BYTES * scores
    compared = (memory("F", f"mask.{name}", "bias", nbytes, nbytes, shapes.dtype) for name in COMPARISONS)
    return (*compared, memory("F", "mask.with causal", "residual", 2 * scores, scores, shapes.dtype))


def before_attention(shapes: Shapes) -> Node:
    """Return the copies of keys and values to all heads, and the bias that the mask becomes, which attention keeps."""
    if not is_masked(shapes):
        return Node()
    scores = float(shapes.batch * shapes.seq * shapes.seq)
    narrow, wide = (float(shapes.element * shapes.tokens * width) for width in (shapes.kv_width, shapes.context_width))
    shared = shapes.kv_heads < shapes.heads
    # Priced as the kernels that turn queries, which have no vector loads either.
    copies = tuple(memory("F", f"attn.repeat {x}", "rope", wide, wide, shapes.dtype) for x in "kv") if shared else ()
    sums = tuple(memory("B", f"attn.repeat {x} bwd", "reduce", wide, narrow, shapes.dtype) for x in "kv")
    nbytes = COUNTED_BYTES * scores
    return Node(
        forward=(*copies, memory("F", "attn.mask bias", "bias", nbytes, nbytes, shapes.dtype)),
        input_grad=sums if shared else (),
        saved=(Tensor("attn.mask bias", shapes.element * scores),),
        grad_bytes=2 * (narrow + wide) if shared else 0.0,
    )
