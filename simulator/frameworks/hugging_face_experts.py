"""Experts as Hugging Face's transformers 5 runs them: grouped products over rows in the order of the experts.

All of it stays on the GPU. A layer that is split over ranks has rows without an expert, which are set to zero around
each product. So they are where there are none. Out of place that is a copy and a kernel under a mask.

github.com/huggingface/transformers 5.17, src/transformers: integrations/moe.py, ``grouped_mm_experts_forward``, and
``MixtralTopKRouter`` and ``Qwen3MoeTopKRouter`` of the models.
"""

from __future__ import annotations

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


def _small(z: Shapes, phase: str, name: str, labels: tuple[str, ...], entries: float) -> Ops:
    """Return kernels over so many indices each."""
    nbytes = INDEX * entries
    return tuple(memory(phase, f"moe.{name} {label}", "copy", nbytes, nbytes, z.dtype) for label in labels)


def _masked(z: Shapes, phase: str, name: str, nbytes: float) -> Ops:
    """Return the copy of rows, and the kernel that sets some of them to zero."""
    return (
        memory(phase, f"moe.{name} copy", "copy", nbytes, nbytes, z.dtype),
        memory(phase, f"moe.{name} mask", "bias", nbytes, nbytes, z.dtype),
    )


def _added_by_index(z: Shapes, name: str, rows: float, written: float, entries: float) -> Ops:
    """Return the gradient of an index: zeros, the order of the rows taken, and their sums."""
    return (
        memory("B", f"moe.{name} zero grad", "zero", 0, written, z.dtype),
        *_small(z, "B", f"{name} bwd", INDEX_GRADIENT, entries),
        memory("B", f"moe.{name} bwd", "strided", rows, rows, z.dtype),
    )


def router(z: Shapes, x: Experts) -> Node:
    """Return the router: product in the working precision, softmax in fp32, and the choice of experts."""
    rows, scores, choices = z.row_bytes, float(x.tokens * x.experts), float(x.tokens * x.top_k)

    def product(phase: str, role: str, m: int, n: int, k: int) -> Compute:
        name = "moe.router" if role == "fwd" else f"moe.router {role}"
        return Compute(name, Matmul(m, n, k, dtype=x.router_dtype, role=role), StepPhase(phase))

    inputs = (Tensor("mlp.normed", rows),)
    return Node(
        forward=(
            product("F", "fwd", x.tokens, x.experts, z.hidden),
            *_small(z, "F", "router", ROUTER, max(scores, choices) / 2),
        ),
        input_grad=(
            *_small(z, "B", "router bwd", ROUTER_GRADIENT, scores / 2),
            product("B", "dgrad", x.tokens, z.hidden, x.experts),
            memory("B", "moe.input grad", "residual", 2 * rows, rows, z.dtype),
        ),
        weight_grad=(product("W", "wgrad", x.experts, z.hidden, x.tokens),),
        saved=(*inputs, Tensor("moe.router probs", PROBABILITY * scores)),
        saved_for_weights=inputs,
        grad_bytes=2 * rows,
        output_grad_bytes=PROBABILITY * scores,
        weight_grad_bytes=float(z.element * x.experts * z.hidden),
    )


def sort(x: Experts) -> Ops:
    """Return the kernels that put choices in the order of the experts."""
    nbytes = INDEX * x.sent
    return tuple(memory("F", f"moe.sort {label}", "copy", nbytes, nbytes, "bf16") for label in ORDER)


def permuted(z: Shapes, x: Experts) -> tuple[Ops, Ops]:
    """Return the gathering of rows in the order of the experts, masked, and the sums of their gradients."""
    token_bytes, sent_bytes = float(z.element * x.tokens * z.hidden), float(z.element * x.sent * z.hidden)
    return (
        (
            memory("F", "moe.permute", "embedding", sent_bytes, sent_bytes, z.dtype),
            *_small(z, "F", "groups", OFFSETS, x.sent),
            memory("F", "moe.permute mask", "bias", sent_bytes, sent_bytes, z.dtype),
        ),
        (
            *_masked(z, "B", "permute bwd", sent_bytes),
            *_added_by_index(z, "weights", 2.0 * INDEX * x.sent, PROBABILITY * x.sent, x.sent),
            *_added_by_index(z, "permute", sent_bytes, token_bytes, x.sent),
        ),
    )


def _weighed(z: Shapes, x: Experts, *, wide: bool) -> tuple[Ops, Ops]:
    """Return the products of rows with their weights, in fp32 if ``wide``, and the gradients of both."""
    rows = float(z.element * x.sent * z.hidden)
    if not wide:
        return (
            (memory("F", "moe.weigh", "weigh", rows, rows, z.dtype),),
            (
                memory("B", "moe.weights product", "residual", 2 * rows, rows, z.dtype),
                memory("B", "moe.weigh bwd", "weigh", rows, rows, z.dtype),
                memory("B", "moe.weights sum", "reduce", rows, z.element * x.sent, z.dtype),
            ),
        )
    return (
        (memory("F", "moe.weigh", "weigh", rows, 2 * rows, "fp32"),),
        (
            memory("B", "moe.weights product", "accumulate", 3 * rows, 2 * rows, z.dtype),
            memory("B", "moe.weigh bwd", "strided", rows, rows, z.dtype),
            memory("B", "moe.weigh cast bwd", "cast", 2 * rows, rows, z.dtype),
            memory("B", "moe.weights sum", "reduce", 2 * rows, PROBABILITY * x.sent, z.dtype),
        ),
    )


def unpermuted(z: Shapes, x: Experts) -> tuple[Ops, Ops]:
    """Return the masking and weighing of experts' outputs, their gathering in the order of tokens, and their sums.

    Weights of Mixtral stay in fp32, so that all of it is. Qwen3's are cast.
    """
    wide = not z.qk_norm
    times = 2 if wide else 1
    rows, tokens = float(z.element * x.sent * z.hidden), float(z.element * x.tokens * z.hidden)
    weighed, weighed_back = _weighed(z, x, wide=wide)
    cast = (memory("F", "moe.sum cast", "cast", 2 * tokens, tokens, z.dtype),) if wide else ()
    cast_back = (memory("B", "moe.sum cast bwd", "upcast", tokens, 2 * tokens, z.dtype),) if wide else ()
    dtype = "fp32" if wide else z.dtype
    return (
        (
            *_masked(z, "F", "unpermute", rows),
            *weighed,
            *_small(z, "F", "inverse order", ("places", "put"), x.sent),
            memory("F", "moe.unpermute", "embedding", times * rows, times * rows, z.dtype),
            memory("F", "moe.sum", "combine", times * rows, times * tokens, dtype),
            *cast,
        ),
        (
            *cast_back,
            memory("B", "moe.sum bwd", "strided", tokens, rows, z.dtype),
            *_added_by_index(z, "unpermute", rows, times * rows, x.sent),
            *weighed_back,
            *_masked(z, "B", "unpermute bwd", rows),
        ),
    )


def kept(z: Shapes, x: Experts) -> tuple[Tensor, ...]:
    """Return the kept tensors: experts' outputs, to be weighed, their weights, and the order of rows with its inverse.

    Autograd keeps which rows are masked, a byte for each.
    """
    return (
        Tensor("moe.out", float(z.element * x.sent * z.hidden)),
        Tensor("moe.order", (2.0 * INDEX + 1) * x.sent),
        Tensor("moe.weights", float(2 * PROBABILITY * x.sent)),
    )


EXPERTS = ExpertHooks(
    router=router,
    sort=sort,
    permute=permuted,
    unpermute=unpermuted,
    kept_by_dispatch=lambda z, x: (),
    kept_by_combine=kept,
    weighs_in_activation=False,
    host_waits_for_counts=False,
    activation=lambda z: GATED,
)
