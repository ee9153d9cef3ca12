"""gpt-oss as Hugging Face's transformers 5 runs it: attention in steps with sinks, experts with biases.

A sink is one more score of each head. It is joined to every row, whose length is odd then: kernels over such rows have
no vector loads, and products of them are cuBLAS' slow ones. The gate and the linear half of an expert's first product
lie in turns in a row.

github.com/huggingface/transformers 5.17, src/transformers: models/gpt_oss/modeling_gpt_oss.py, integrations/moe.py.
Kernels, their order and their classes were read from a profiler on an H200:
calibration/measurements/eager-kernels.csv.
"""

from __future__ import annotations

from functools import partial

from simulator.frameworks import hugging_face_gemma, pytorch
from simulator.frameworks.framework import ActivationKernels, Traffic
from simulator.operations.experts import INDEX, PROBABILITY, Experts
from simulator.operations.nodes import Node, Ops, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute, Memory, StepPhase

#: ``GptOssRMSNorm``: Gemma's, but the weight, which is in fp32, multiplies as it is.
rms_norm = partial(hugging_face_gemma.rms_norm, weight_kernels=())

#: ``_apply_rotary_emb``: both halves times cosine and sine, two sums, and the join of these.
ROTATION: tuple[Traffic, ...] = (
    Traffic(" first cos", "rope", 0.5, 0.5),
    Traffic(" second sin", "rope", 0.5, 0.5),
    Traffic(" minus", "residual", 1, 0.5),
    Traffic(" second cos", "rope", 0.5, 0.5),
    Traffic(" first sin", "rope", 0.5, 0.5),
    Traffic(" add", "residual", 1, 0.5),
    Traffic(" join", "rope", 1, 1),
)
ROTATION_BACKWARD: tuple[Traffic, ...] = (
    Traffic(" first sin", "rope", 0.5, 0.5),
    Traffic(" second cos", "rope", 0.5, 0.5),
    Traffic(" negate", "rope", 0.5, 0.5),
    Traffic(" second sin", "rope", 0.5, 0.5),
    Traffic(" add", "residual", 1, 0.5),
    Traffic(" first cos", "rope", 0.5, 0.5),
    Traffic(" minus", "residual", 1, 0.5),
    Traffic(" join", "copy", 1, 1),
    Traffic(" transpose", "rope", 1, 1),
)
#: ``_apply_gate`` on every second number of masked rows: both halves clamped, ``gate * sigmoid(alpha * gate)``, and
#: the product with the linear half plus one. Backward each half's gradient is put into zeros of the whole size.
GATED = ActivationKernels(
    forward=(
        Traffic(" copy", "copy", 2, 2),
        Traffic(" mask", "bias", 2, 2),
        Traffic(" gate clamp", "bias", 1, 1),
        Traffic(" up clamp", "bias", 1, 1),
        Traffic(" scale", "activation", 1, 1),
        Traffic(" sigmoid", "activation", 1, 1),
        Traffic(" times", "residual", 2, 1),
        Traffic(" plus", "activation", 1, 1),
        Traffic("", "residual", 2, 1),
    ),
    backward=(
        Traffic(" up", "residual", 2, 1),
        Traffic(" times", "residual", 2, 1),
        Traffic(" gate", "residual", 2, 1),
        Traffic(" gate sigmoid", "residual", 2, 1),
        Traffic(" sigmoid", "activation_bwd", 2, 1),
        Traffic(" scale", "activation", 1, 1),
        Traffic(" add", "residual", 2, 1),
        Traffic(" up least", "bias", 1, 1),
        Traffic(" up most", "bias", 1, 1),
        Traffic(" up inside", "residual", 1, 0.5),
        Traffic(" up clamp", "bias", 1, 1),
        Traffic(" gate most", "bias", 1, 1),
        Traffic(" gate clamp", "bias", 1, 1),
        Traffic(" zero up", "zero", 0, 2),
        Traffic(" up half", "bias", 1, 1),
        Traffic(" zero gate", "zero", 0, 2),
        Traffic(" gate half", "bias", 1, 1),
        Traffic(" halves", "residual", 4, 2),
        Traffic(" copy", "copy", 2, 2),
        Traffic(" mask", "bias", 2, 2),
    ),
    kept=("gate", "sigmoid", "up", "glu"),
)
#: Kernels of the router behind its product, and those of its gradient: a softmax over the chosen scores alone.
ROUTER = ("top-k", "top-k sort", "softmax")
ROUTER_GRADIENT = ("softmax", "zero", "scatter")
#: Kernels that sort an index before the rows of each expert are added up.
INDEX_ORDER = ("remainder", "times", "quotient", "places", "histogram", "offsets", "sort")


def is_gpt_oss(shapes: Shapes) -> bool:
    """Return True for models of gpt-oss' kind, which sinks mean."""
    return shapes.sinks


def softmax(shapes: Shapes, elements: int) -> Node:
    """Return the probabilities of so many scores and of a sink to each row, in the working precision.

    Of a row the largest is taken off first, and autograd takes that part too. It keeps the probabilities alone.
    """
    square, rows = float(shapes.element * elements), float(shapes.element * elements / shapes.seq)
    width, kernel = shapes.seq + 1, partial(pytorch.score_kernel, shapes)
    return Node(
        forward=(
            kernel("F", "scale", "activation", square, square),
            kernel("F", "mask", "rope", square, square),
            kernel("F", "sinks join", "join_odd", square, square),
            kernel("F", "largest", "row_max", square, rows),
            kernel("F", "minus largest", "rope", square, square),
            kernel("F", "softmax", "softmax_odd", square, square, width),
        ),
        input_grad=(
            kernel("B", "sinks zero", "zero", 0, square),
            kernel("B", "sinks cut bwd", "bias", square, square),
            kernel("B", "softmax bwd", "softmax_odd_bwd", 2 * square, square, width),
            kernel("B", "largest negate", "activation", square, square),
            kernel("B", "largest sum", "reduce", square, rows),
            kernel("B", "largest zero", "zero", 0, square),
            kernel("B", "largest scatter", "copy", rows, rows),
            kernel("B", "largest add", "residual", 2 * square, square),
            kernel("B", "scale bwd", "bias", square, square),
        ),
        weight_grad=(kernel("W", "sinks wgrad", "reduce", rows, float(shapes.element * shapes.heads)),),
        saved=(Tensor("attn.probs", square), Tensor("attn.largest", INDEX * rows / shapes.element)),
        forward_bytes=2 * square,
        grad_bytes=3 * square,
    )


def biased(shapes: Shapes, experts: Experts, split: str) -> tuple[Ops, Ops, Ops]:
    """Return the kernels that add experts' biases to the rows of a product, and those of their gradients.

    The bias of a row's expert is taken by an index. Its gradient adds up all rows of an expert one after another
    (aten/src/ATen/native/cuda/Indexing.cu, ``indexing_backward_kernel``), which takes as long for wide rows as for
    narrow ones.
    """
    name, width = ("fc1", 2 * experts.ffn) if split == "column" else ("fc2", shapes.hidden)
    rows, index = float(shapes.element * experts.worked_on * width), float(INDEX * experts.worked_on)
    written = float(shapes.element * len(experts.loads) * width)
    order = (memory("W", f"moe.{name} bias {x}", "copy", index, index, shapes.dtype) for x in INDEX_ORDER)
    summed = Memory("index_rows", rows, written, dtype=shapes.dtype, elements=float(max(experts.loads)))
    return (
        (
            memory("F", f"moe.{name} bias rows", "embedding", index, rows, shapes.dtype),
            memory("F", f"moe.{name} bias", "residual", 2 * rows, rows, shapes.dtype),
        ),
        (),
        (
            memory("W", f"moe.{name} bias zero", "zero", 0, written, shapes.dtype),
            *order,
            Compute(f"moe.{name} bias grad", summed, StepPhase.WEIGHT_GRADIENT),
        ),
    )


def router_kernels(shapes: Shapes, experts: Experts) -> tuple[Ops, Ops]:
    """Return the router's kernels behind its product, and before those of its gradient."""
    chosen = float(PROBABILITY * experts.tokens * experts.top_k)
    forward = tuple(memory("F", f"moe.router {x}", "copy", chosen, chosen, shapes.dtype) for x in ROUTER)
    backward = tuple(memory("B", f"moe.router bwd {x}", "copy", chosen, chosen, shapes.dtype) for x in ROUTER_GRADIENT)
    return forward, backward
