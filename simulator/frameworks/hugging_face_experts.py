"""Experts as Hugging Face's transformers 5 runs them: grouped products over rows in the order of the experts.

All of it stays on the GPU. A layer that is split over ranks has rows without an expert, which are set to zero around
each product. So they are where there are none. Out of place that is a copy and a kernel under a mask.

github.com/huggingface/transformers 5.17, src/transformers: integrations/moe.py, ``grouped_mm_experts_forward``, and
``MixtralTopKRouter`` and ``Qwen3MoeTopKRouter`` of the models.
"""

from __future__ import annotations

from simulator.frameworks import hugging_face_gpt_oss
from simulator.frameworks.framework import ActivationKernels, ExpertHooks, Traffic
from simulator.operations.experts import INDEX, PROBABILITY, Experts
from simulator.operations.nodes import Node, Ops, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute, Matmul, StepPhase

#: Kernels over a few numbers for each choice of a token. ``ROUTER`` are the router's behind its product, ``ORDER`` are
#: of the order of rows, ``OFFSETS`` of the groups. ``INDEX_GRADIENT``: autograd sorts an index to add up what it took.
ROUTER = ("float", "softmax", "top-k", "top-k sort", "top-k sum", "top-k copy", "top-k share")
ORDER = ("copy", "places", "histogram", "offsets", *(f"sort {number}" for number in range(8)), "tokens")
OFFSETS = ("weights", "int", "counts zero", "counts", "cumsum start", "cumsum", "outside", "inside")
INDEX_GRADIENT = ("remainder", "times", "quotient", "places", "histogram", "offsets", "sort 1", "sort 2")
ROUTER_GRADIENT = (
    "share 1",
    "share 2",
    "minus",
    "times",
    "share 3",
    "sum",
    "add",
    "zero",
    "scatter",
    "times",
    "softmax",
)
#: SiLU with a gate on halves of the rows that a grouped product wrote, once its rows are masked.
GATED = ActivationKernels(
    forward=(
        Traffic(" copy", "copy", 2, 2),
        Traffic(" mask", "bias", 2, 2),
        Traffic("", "strided", 1, 1),
        Traffic(" gate", "strided", 2, 1),
    ),
    backward=(
        Traffic(" gate", "residual", 2, 1),
        Traffic(" up", "strided", 2, 1),
        Traffic("", "strided", 2, 1),
        Traffic(" join", "copy", 2, 2),
        Traffic(" copy", "copy", 2, 2),
        Traffic(" mask", "bias", 2, 2),
    ),
    kept=("gate",),
)


def _small(shapes: Shapes, phase: str, name: str, labels: tuple[str, ...], entries: float) -> Ops:
    """Return kernels over so many indices each."""
    nbytes = INDEX * entries
    return tuple(memory(phase, f"moe.{name} {label}", "copy", nbytes, nbytes, shapes.dtype) for label in labels)


def _masked(shapes: Shapes, phase: str, name: str, nbytes: float) -> Ops:
    """Return the copy of rows, and the kernel that sets some of them to zero."""
    return (
        memory(phase, f"moe.{name} copy", "copy", nbytes, nbytes, shapes.dtype),
        memory(phase, f"moe.{name} mask", "bias", nbytes, nbytes, shapes.dtype),
    )


def _added_by_index(shapes: Shapes, name: str, rows: float, written: float, entries: float) -> Ops:
    """Return the gradient of an index: zeros, the order of the rows taken, and their sums."""
    return (
        memory("B", f"moe.{name} zero grad", "zero", 0, written, shapes.dtype),
        *_small(shapes, "B", f"{name} bwd", INDEX_GRADIENT, entries),
        memory("B", f"moe.{name} bwd", "strided", rows, rows, shapes.dtype),
    )


def router(shapes: Shapes, experts: Experts) -> Node:
    """Return the router: product in the working precision, softmax in fp32, and the choice of experts.

    gpt-oss chooses first, and takes the softmax of the chosen scores.
    """
    rows, scores, choices = (
        shapes.row_bytes,
        float(experts.tokens * experts.experts),
        float(experts.tokens * experts.top_k),
    )

    def product(phase: str, role: str, m: int, n: int, k: int) -> Compute:
        name = "moe.router" if role == "fwd" else f"moe.router {role}"
        return Compute(name, Matmul(m, n, k, dtype=experts.router_dtype, role=role), StepPhase(phase))

    inputs = (Tensor("mlp.normed", rows),)
    forward = _small(shapes, "F", "router", ROUTER, max(scores, choices) / 2)
    backward = _small(shapes, "B", "router bwd", ROUTER_GRADIENT, scores / 2)
    if hugging_face_gpt_oss.is_gpt_oss(shapes):
        forward, backward = hugging_face_gpt_oss.router_kernels(shapes, experts)
    return Node(
        forward=(product("F", "fwd", experts.tokens, experts.experts, shapes.hidden), *forward),
        input_grad=(
            *backward,
            product("B", "dgrad", experts.tokens, shapes.hidden, experts.experts),
            memory("B", "moe.input grad", "residual", 2 * rows, rows, shapes.dtype),
        ),
        weight_grad=(product("W", "wgrad", experts.experts, shapes.hidden, experts.tokens),),
        saved=(*inputs, Tensor("moe.router probs", PROBABILITY * scores)),
        saved_for_weights=inputs,
        grad_bytes=2 * rows,
        output_grad_bytes=PROBABILITY * scores,
        weight_grad_bytes=float(shapes.element * experts.experts * shapes.hidden),
    )


def sort(experts: Experts) -> Ops:
    """Return the kernels that put choices in the order of the experts."""
    nbytes = INDEX * experts.sent
    return tuple(memory("F", f"moe.sort {label}", "copy", nbytes, nbytes, "bf16") for label in ORDER)


def permuted(shapes: Shapes, experts: Experts) -> tuple[Ops, Ops]:
    """Return the gathering of rows in the order of the experts, masked, and the sums of their gradients."""
    token_bytes, sent_bytes = (
        float(shapes.element * experts.tokens * shapes.hidden),
        float(shapes.element * experts.sent * shapes.hidden),
    )
    return (
        (
            memory("F", "moe.permute", "embedding", sent_bytes, sent_bytes, shapes.dtype),
            *_small(shapes, "F", "groups", OFFSETS, experts.sent),
            memory("F", "moe.permute mask", "bias", sent_bytes, sent_bytes, shapes.dtype),
        ),
        (
            *_masked(shapes, "B", "permute bwd", sent_bytes),
            *_added_by_index(shapes, "weights", 2.0 * INDEX * experts.sent, PROBABILITY * experts.sent, experts.sent),
            *_added_by_index(shapes, "permute", sent_bytes, token_bytes, experts.sent),
        ),
    )


def _weighed(shapes: Shapes, experts: Experts, *, wide: bool) -> tuple[Ops, Ops]:
    """Return the products of rows with their weights, in fp32 if ``wide``, and the gradients of both."""
    rows = float(shapes.element * experts.sent * shapes.hidden)
    if not wide:
        return (
            (memory("F", "moe.weigh", "weigh", rows, rows, shapes.dtype),),
            (
                memory("B", "moe.weights product", "residual", 2 * rows, rows, shapes.dtype),
                memory("B", "moe.weigh bwd", "weigh", rows, rows, shapes.dtype),
                memory("B", "moe.weights sum", "reduce", rows, shapes.element * experts.sent, shapes.dtype),
            ),
        )
    return (
        (memory("F", "moe.weigh", "weigh", rows, 2 * rows, "fp32"),),
        (
            memory("B", "moe.weights product", "accumulate", 3 * rows, 2 * rows, shapes.dtype),
            memory("B", "moe.weigh bwd", "strided", rows, rows, shapes.dtype),
            memory("B", "moe.weigh cast bwd", "cast", 2 * rows, rows, shapes.dtype),
            memory("B", "moe.weights sum", "reduce", 2 * rows, PROBABILITY * experts.sent, shapes.dtype),
        ),
    )


def unpermuted(shapes: Shapes, experts: Experts) -> tuple[Ops, Ops]:
    """Return the masking and weighing of experts' outputs, their gathering in the order of tokens, and their sums.

    Weights of Mixtral stay in fp32, so that all of it is. Qwen3's are cast, and gpt-oss' never were in fp32.
    """
    wide = not (shapes.qk_norm or hugging_face_gpt_oss.is_gpt_oss(shapes))
    times = 2 if wide else 1
    rows, tokens = (
        float(shapes.element * experts.sent * shapes.hidden),
        float(shapes.element * experts.tokens * shapes.hidden),
    )
    weighed, weighed_back = _weighed(shapes, experts, wide=wide)
    cast = (memory("F", "moe.sum cast", "cast", 2 * tokens, tokens, shapes.dtype),) if wide else ()
    cast_back = (memory("B", "moe.sum cast bwd", "upcast", tokens, 2 * tokens, shapes.dtype),) if wide else ()
    dtype = "fp32" if wide else shapes.dtype
    return (
        (
            *_masked(shapes, "F", "unpermute", rows),
            *weighed,
            *_small(shapes, "F", "inverse order", ("places", "put"), experts.sent),
            memory("F", "moe.unpermute", "embedding", times * rows, times * rows, shapes.dtype),
            memory("F", "moe.sum", "combine", times * rows, times * tokens, dtype),
            *cast,
        ),
        (
            *cast_back,
            # Every token's row goes to all of its choices, element by element.
            memory("B", "moe.sum bwd", "bias", rows, rows, shapes.dtype),
            *_added_by_index(shapes, "unpermute", rows, times * rows, experts.sent),
            *weighed_back,
            *_masked(shapes, "B", "unpermute bwd", rows),
        ),
    )


def kept(shapes: Shapes, experts: Experts) -> tuple[Tensor, ...]:
    """Return the kept tensors: experts' outputs, to be weighed, their weights, and the order of rows with its inverse.

    Autograd keeps which rows are masked, a byte for each.
    """
    return (
        Tensor("moe.out", float(shapes.element * experts.sent * shapes.hidden)),
        Tensor("moe.order", (2.0 * INDEX + 1) * experts.sent),
        Tensor("moe.weights", float(2 * PROBABILITY * experts.sent)),
    )


EXPERTS = ExpertHooks(
    router=router,
    sort=sort,
    permute=permuted,
    unpermute=unpermuted,
    kept_by_dispatch=lambda shapes, experts: (),
    kept_by_combine=kept,
    weighs_in_activation=False,
    host_waits_for_counts=False,
    activation=lambda shapes: hugging_face_gpt_oss.GATED if hugging_face_gpt_oss.is_gpt_oss(shapes) else GATED,
    biased=hugging_face_gpt_oss.biased,
)
