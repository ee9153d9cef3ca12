"""Experts in Megatron-Core where PyTorch's own kernels route, permute and compute them, one after another.

Source: github.com/NVIDIA/Megatron-LM, core_v0.19, megatron/core/transformer/moe: router.py, moe_utils.py
(``topk_routing_with_score_function``, ``permute``, ``unpermute``, ``sort_chunks_by_idxs``), token_dispatcher.py
(``MoEAlltoAllTokenDispatcher``), experts.py (``SequentialMLP``, ``TEGroupedMLP._apply_bias``).
"""

from __future__ import annotations

from dataclasses import replace

from simulator.frameworks import balancing, fused_kernels
from simulator.frameworks.framework import ActivationKernels, ExpertHooks, Traffic
from simulator.operations.experts import CHOICE, INDEX, PROBABILITY, Experts
from simulator.operations.nodes import Node, Ops, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute, Memory, StepPhase

#: PyTorch's top-k has a block for each row of scores, which takes as long as for so many scores more
#: (calibration/measurements/expert-kernels.csv).
SCORES_OF_A_BLOCK = 40


def per_element(phase: str, name: str, op: str, elements: float, read: float, written: float) -> Compute:
    """Return a kernel whose time goes with the ``elements`` that it works on, where bytes take less."""
    return Compute(name, Memory(op, read, written, dtype="fp32", elements=elements), StepPhase(phase))


def router(shapes: Shapes, experts: Experts) -> Node:
    """Return the product with the router's weight, top-k, softmax of the choices, and both maps of tokens to experts.

    Probabilities and choices are written into zeros as wide as all experts.
    """
    scores, chosen = (
        float(PROBABILITY * experts.tokens * experts.experts),
        float(PROBABILITY * experts.tokens * experts.top_k),
    )

    def kernel(phase: str, name: str, op: str, read: float, written: float) -> Compute:
        return memory(phase, f"moe.router {name}", op, read, written, "fp32")

    scores_by_block = float(experts.tokens * (experts.experts + SCORES_OF_A_BLOCK))
    choice = (
        per_element(
            "F", "moe.router top-k", "top_k", scores_by_block, scores, chosen + INDEX * experts.tokens * experts.top_k
        ),
        kernel("F", "softmax", "softmax", chosen, chosen),
        kernel("F", "probs zero", "zero", 0, scores),
        kernel("F", "probs", "strided", scores, scores),
        *balancing.map_of_choices(experts, "router"),
    )
    choice_grad = (
        kernel("B", "probs bwd", "strided", chosen, chosen),
        kernel("B", "softmax bwd", "softmax_bwd", 2 * chosen, chosen),
        kernel("B", "top-k zero grad", "zero", 0, scores),
        kernel("B", "top-k bwd", "strided", scores, scores),
    )
    balance, balance_grad = balancing.by_operations(shapes, experts)
    return fused_kernels.router_with(
        shapes, experts, choice=(*choice, *balance), choice_grad=(*balance_grad, *choice_grad)
    )


def _counted_alone(experts: Experts) -> Ops:
    """Return the kernels that count tokens by expert on a rank without others; with others `counted` has them.

    The counts go to the host, which cuts rows by them to sort them. They go there twice
    (``_maybe_dtoh_and_synchronize``); the second copy is of `simulator.models.dispatching`.
    """
    if experts.ep > 1 or not experts.counted:
        return ()
    nbytes = float(INDEX * experts.experts)
    return (
        memory("F", "moe.counts", "reduce", float(CHOICE * experts.tokens * experts.experts), nbytes, "fp32"),
        memory("F", "moe.counts by rank to host", "copy", nbytes, nbytes, "fp32"),
    )


def sort(experts: Experts) -> Ops:
    """Return the kernels that sort the map of choices into the order of the experts, behind the counts of a rank alone.

    The map is a row for each expert, so that all pairs of tokens and experts are sorted.
    """
    pairs, sent = float(experts.tokens * experts.experts), float(INDEX * experts.sent)

    def kernel(name: str, op: str, read: float, written: float) -> Compute:
        return memory("F", f"moe.{name}", op, read, written, "fp32")

    return (
        *_counted_alone(experts),
        kernel("map turned", "strided", CHOICE * pairs, CHOICE * pairs),
        kernel("sort indices", "zero", 0, INDEX * pairs),
        kernel("sort", "strided", (CHOICE + INDEX) * pairs, (CHOICE + INDEX) * pairs),
        kernel("tokens of rows", "copy", sent, sent),
        kernel("probs turned", "strided", PROBABILITY * pairs, PROBABILITY * pairs),
        kernel("probs of rows", "copy", sent, PROBABILITY * experts.sent),
    )


def counted(experts: Experts, *, cuts: bool = True) -> tuple[Ops, Ops]:
    """Return the kernels around the exchange of counts: before it, and behind it with the copies to the host.

    Tokens are counted by expert and by rank. Of all ranks' counts those of this rank's experts are copied, and summed
    by rank, by the ranks that split an expert, and by expert. The host takes what it sends and what it receives, the
    latter also by ranks that split experts. It takes the counts by rank and expert too where it ``cuts`` rows by them,
    and those by expert. So have it ``preprocess``, ``_maybe_dtoh_and_synchronize``, and mc2_ep_e8 in
    calibration/results/frameworks.
    """
    by_expert, by_rank = float(INDEX * experts.experts), float(INDEX * experts.ep)
    local = INDEX * float(experts.ep * experts.etp * len(experts.loads))

    def kernel(name: str, op: str, read: float, written: float) -> Compute:
        return memory("F", f"moe.counts {name}".rstrip(), op, read, written, "fp32")

    before = (
        kernel("", "reduce", CHOICE * float(experts.tokens * experts.experts), by_expert),
        kernel("by rank", "reduce", by_expert, by_rank),
    )
    copied = (
        ("sent", by_rank),
        ("received", by_rank),
        ("received by splitting ranks", INDEX * experts.etp),
        *((("by rank and expert", local),) if cuts and len(experts.loads) > 1 else ()),
        ("by expert", INDEX * len(experts.loads)),
    )
    to_host = tuple(kernel(f"{name} to host", "copy", nbytes, nbytes) for name, nbytes in copied)
    behind = (
        kernel("of own experts", "strided", local, local),
        kernel("received", "reduce", local, by_rank),
        kernel("received by splitting ranks", "reduce", by_rank, INDEX * experts.etp),
        kernel("by expert", "reduce", local, INDEX * len(experts.loads)),
        *to_host[:-1],
        replace(to_host[-1], host_waits=True),
    )
    return before, behind


def permute(shapes: Shapes, experts: Experts) -> tuple[Ops, Ops]:
    """Return the gathering of rows, and the sum of their gradients into zeros, with atomic additions row by row.

    Gradients of probabilities are sorted once more to be put back.
    """
    elements = float(experts.sent * shapes.hidden)
    token_bytes, sent = float(shapes.element * experts.tokens * shapes.hidden), shapes.element * elements
    pairs = float(PROBABILITY * experts.tokens * experts.experts)
    return (
        (memory("F", "moe.permute", "embedding", sent, sent, shapes.dtype),),
        (
            memory("B", "moe.probs zero grad", "zero", 0, pairs, "fp32"),
            memory("B", "moe.probs sort", "strided", INDEX * experts.sent, INDEX * experts.sent, "fp32"),
            memory("B", "moe.probs bwd", "strided", PROBABILITY * experts.sent, pairs, "fp32"),
            memory("B", "moe.permute zero grad", "zero", 0, token_bytes, shapes.dtype),
            per_element("B", "moe.permute bwd", "index_add", elements, sent, token_bytes),
        ),
    )


def unpermute(shapes: Shapes, experts: Experts) -> tuple[Ops, Ops]:
    """Return the sum of outputs into zeros, with an atomic addition for each number, and the gathered gradient.

    Each number has its own index (``scatter_add_`` with an index as wide as a row, which is no copy).
    """
    elements = float(experts.sent * shapes.hidden)
    token_bytes, sent = float(shapes.element * experts.tokens * shapes.hidden), shapes.element * elements
    return (
        (
            memory("F", "moe.unpermute zero", "zero", 0, token_bytes, shapes.dtype),
            per_element("F", "moe.unpermute", "scatter_add", elements, sent, token_bytes),
        ),
        (memory("B", "moe.unpermute bwd", "embedding", sent, sent, shapes.dtype),),
    )


def order(shapes: Shapes, experts: Experts) -> tuple[Tensor, ...]:
    """Return the kept indices: of the tokens of all rows, and of their probabilities."""
    return (Tensor("moe.order", 2.0 * INDEX * experts.sent),)


def weighted(shapes: Shapes) -> ActivationKernels:
    """Return the activation with its weights, and a kernel of its own that sums their gradients (Inductor)."""
    plain = fused_kernels.activation(shapes)
    read = 3 if shapes.gated else 2
    return replace(plain, backward=(*plain.backward, Traffic(" weights", "activation_bwd", read, 0)))


def biased(shapes: Shapes, experts: Experts, split: str) -> tuple[Ops, Ops, Ops]:
    """Return the kernels that add biases to experts' outputs: forward, backward, and of the biases' gradients.

    Those of the first product, which is ``split`` by column, are part of it.

    Expert by expert the bias is multiplied by the probabilities of its rows in fp32, and added. All are joined, and
    cast. An expert without tokens has no kernel.
    """
    if split == "column":
        return (), (), ()
    n_experts, elements = len(experts.loads), float(experts.worked_on * shapes.hidden)
    narrow, wide = shapes.element * elements, PROBABILITY * elements

    def each(phase: str, *ops: tuple[str, str, int, int]) -> Ops:
        """Return kernels of every expert, which read and write so many bytes for each number of its output."""
        return tuple(
            per_element(phase, f"moe.bias {name}", op, numbers, read * numbers, written * numbers)
            if op == "outer"
            else memory(phase, f"moe.bias {name}", op, read * numbers, written * numbers, "fp32")
            for numbers in (float(load * shapes.hidden) for load in experts.loads if load)
            for name, op, read, written in ops
        )

    bf16, fp32 = shapes.element, PROBABILITY
    forward = (
        *each("F", ("weigh", "outer", 0, fp32), ("add", "strided", bf16 + fp32, fp32)),
        memory("F", "moe.bias join", "copy", wide, wide, "fp32", parts=n_experts),
        memory("F", "moe.bias cast", "cast", wide, narrow, shapes.dtype),
    )
    backward = (
        memory("B", "moe.bias cast bwd", "upcast", narrow, wide, shapes.dtype),
        *each(
            "B",
            ("cast bwd each", "cast", fp32, bf16),
            ("weigh bwd", "outer", fp32, fp32),
            ("probs", "reduce", fp32, 0),
        ),
        memory("B", "moe.bias join bwd", "copy", narrow, narrow, shapes.dtype, parts=n_experts),
    )
    # The sum of rows is one row. Its cast takes a start, beside which its bytes take no time.
    gradients = each(
        "W", ("wgrad product", "outer", fp32, fp32), ("wgrad", "reduce", fp32, 0), ("wgrad cast", "cast", 0, 0)
    )
    return forward, backward, gradients


EXPERTS = ExpertHooks(
    router=router,
    sort=sort,
    permute=permute,
    unpermute=unpermute,
    kept_by_dispatch=order,
    kept_by_combine=lambda shapes, experts: (),
    weighs_in_activation=True,
    host_waits_for_counts=True,
    activation=weighted,
    one_by_one=True,
    sorts_alone=True,
    counted=counted,
    sends_probabilities=True,
)
