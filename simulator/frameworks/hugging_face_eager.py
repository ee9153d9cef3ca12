"""Attention in steps, as Hugging Face's transformers 5 asks PyTorch for it, or as PyTorch falls back to it.

``eager_attention_forward`` of Llama and Gemma 2 adds a mask in the working precision to all scores, and takes their
softmax in fp32. Gemma 2's caps them by a tangent first. In fp32 PyTorch has no fused kernel for grouped queries.
``scaled_dot_product_attention`` then works in steps too, under a mask that it makes anew in each layer.

github.com/huggingface/transformers 5.17, src/transformers: models/llama/modeling_llama.py,
models/gemma2/modeling_gemma2.py, masking_utils.py (``eager_mask``); torch 2.11,
aten/src/ATen/native/transformers/attention.cpp (``_scaled_dot_product_attention_math``). Kernels, their order and their
classes were read from a profiler on an H200: calibration/measurements/eager-kernels.csv.
"""

from __future__ import annotations

from functools import partial

from simulator.frameworks import hugging_face_gpt_oss, pytorch
from simulator.operations.nodes import Node, Ops, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.units import FP32_BYTES

#: Kernels that make the mask of a kind of layers from positions, in bytes of a score read and written. The first tells
#: what sees what, and the second puts zeros or the least number in its place. A window needs two comparisons more.
MASK = (("seen", "bias", 2.0, 2.0), ("bias", "bias", 2.0, 2.0))
WINDOW = (("window", "bias", 2.0, 2.0), ("both", "bias", 2.0, 2.0))


def falls_back(shapes: Shapes) -> bool:
    """Return True for grouped queries in fp32, which no fused kernel of PyTorch takes."""
    return shapes.dtype == "fp32" and shapes.kv_heads < shapes.heads


def masks(shapes: Shapes) -> Ops:
    """Return the kernels that make masks for all layers: of all tokens before, and of a window if some layers have one.

    They have a row for each query of a sequence, and serve all sequences and heads.
    """
    scores = float(shapes.seq * shapes.seq)
    table = (*MASK, *((*WINDOW, *MASK) if shapes.has_window else ()))
    return tuple(memory("F", f"mask.{name}", op, r * scores, w * scores, shapes.dtype) for name, op, r, w in table)


def softmax(shapes: Shapes, elements: int) -> tuple[Node, Node]:
    """Return what turns so many scores into probabilities. Dropout has no kernel: models of Llama's kind have none."""
    if shapes.sinks:
        return hugging_face_gpt_oss.softmax(shapes, elements), Node()
    return (_math(shapes, elements) if falls_back(shapes) else _in_fp32(shapes, elements)), Node()


def _in_fp32(shapes: Shapes, elements: int) -> Node:
    """Return scaling, caps, the mask, and the softmax in fp32.

    Kept are what the tangent gave, and the probabilities in fp32 and as they are cast. Adding a mask that serves all
    heads has no vector loads.
    """
    square, wide = float(shapes.element * elements), float(FP32_BYTES * elements)
    kernel = partial(pytorch.score_kernel, shapes)
    cap: Ops = ()
    uncap: Ops = ()
    if shapes.softcap:
        cap = (
            kernel("F", "cap divide", "activation", square, square),
            kernel("F", "cap tangent", "activation", square, square),
            kernel("F", "cap times", "activation", square, square),
        )
        uncap = (
            kernel("B", "cap times bwd", "activation", square, square),
            kernel("B", "cap tangent bwd", "activation_bwd", 2 * square, square),
            kernel("B", "cap divide bwd", "activation", square, square),
        )
    return Node(
        forward=(
            kernel("F", "scale", "activation", square, square),
            *cap,
            kernel("F", "mask", "rope", square, square),
            kernel("F", "upcast", "upcast", square, wide),
            kernel("F", "softmax", "softmax_fp32", wide, wide, shapes.seq),
            kernel("F", "cast", "cast", wide, square),
        ),
        input_grad=(
            kernel("B", "cast bwd", "upcast", square, wide),
            kernel("B", "softmax bwd", "softmax_fp32_bwd", 2 * wide, wide, shapes.seq),
            kernel("B", "upcast bwd", "cast", wide, square),
            *uncap,
            kernel("B", "scale bwd", "activation", square, square),
        ),
        saved=(
            *((Tensor("attn.capped", square),) if shapes.softcap else ()),
            Tensor("attn.probs fp32", wide),
            Tensor("attn.probs", square),
        ),
        forward_bytes=square + wide,
        grad_bytes=3 * wide,
    )


def _math(shapes: Shapes, elements: int) -> Node:
    """Return the mask, its sum with the scores, and a softmax that leaves rows without a key at zero.

    Queries and keys are scaled, not scores: kernels too small to count.
    """
    square, scores = float(shapes.element * elements), float(shapes.seq * shapes.seq)
    kernel = partial(pytorch.score_kernel, shapes)
    return Node(
        forward=(
            kernel("F", "mask ones", "zero", 0, scores),
            kernel("F", "mask triangle", "bias", 2 * scores, 2 * scores),
            kernel("F", "mask bias", "bias", 2 * scores, 2 * scores),
            kernel("F", "mask", "strided", square, square),
            kernel("F", "softmax", "softmax_fp32", square, square, shapes.seq),
            kernel("F", "softmax without keys", "residual", square, float(elements)),
            kernel("F", "softmax any key", "row_max", float(elements), 0),
            kernel("F", "softmax filled", "accumulate", square + float(elements), square),
        ),
        input_grad=(kernel("B", "softmax bwd", "softmax_fp32_bwd", 2 * square, square, shapes.seq),),
        saved=(Tensor("attn.probs", square),),
        forward_bytes=2 * square + elements,
        grad_bytes=2 * square,
    )
