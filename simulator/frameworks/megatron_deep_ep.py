"""DeepEP's kernels around its transfers, and PyTorch's of Megatron-Core's dispatcher that calls it.

github.com/NVIDIA/Megatron-LM, core_v0.19, megatron/core/transformer/moe/token_dispatcher.py (``_DeepepManager``),
fused_a2a.py (``FusedDispatch``). Megatron-Core has a kernel that turns choices into a map, by ``--enable-experimental``
alone. Without it the map is written with three answers that the host waits for, behind the transfer. Before the
transfer it waits for DeepEP's counts.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.frameworks import te_permutation
from simulator.frameworks.megatron_experts import SCORES_OF_A_BLOCK, per_element
from simulator.frameworks.token_travel import Surroundings
from simulator.operations.experts import CHOICE, INDEX, PROBABILITY, Experts
from simulator.operations.nodes import Ops, memory
from simulator.operations.shapes import Shapes
from simulator.program import Axis, Collective, CollectiveKind, Compute, Purpose


def surroundings(shapes: Shapes, experts: Experts) -> Surroundings:
    """Return the kernels, and the bytes of choices and probabilities that travel with a token, and of their gradients.

    Gradients of probabilities are written over all experts of a rank, with zeros, by the kernel that sums rows.
    """
    chosen = float(experts.travelling * experts.top_k)
    fused = not experts.permutes_by_operations
    rows = te_permutation.rows_of(experts.arriving, len(experts.loads), experts.received) if fused else ()
    return Surroundings(
        before=_counted(experts),
        behind=(*_map_of_choices(experts), *rows),
        gradients_before=(),
        gradients_behind=_gradients_of_choices(experts),
        gradients_last=_gradients_of_top_k(experts),
        beside_bytes=(INDEX + PROBABILITY) * chosen,
        gradients_beside_bytes=PROBABILITY * chosen,
        summed_bytes=float(PROBABILITY * experts.arriving * len(experts.loads)) if fused else 0.0,
    )


def _kernel(phase: str, name: str, op: str, read: float, written: float) -> Compute:
    return memory(phase, f"moe.{name}", op, read, written, "fp32")


def _counted(experts: Experts) -> Ops:
    """Return what turns the map of choices back into choices, counts by rank and expert, and exchanges the counts.

    The host waits for the counts.
    """
    scores = float(PROBABILITY * experts.tokens * experts.experts)
    chosen = float(experts.tokens * experts.top_k)
    looked_at = float(experts.tokens * (experts.experts + SCORES_OF_A_BLOCK))
    counts = float(INDEX * experts.experts * experts.ep)
    return (
        per_element("F", "moe.choices", "top_k", looked_at, scores, (INDEX + PROBABILITY) * chosen),
        _kernel("F", "ranks", "reduce", INDEX * chosen, float(CHOICE * experts.tokens * experts.ep)),
        Collective(
            "ep.all_gather token counts",
            CollectiveKind.ALL_GATHER,
            counts,
            Axis.EP,
            Purpose.EXPERT,
            host_waits=True,
        ),
    )


def _masked(name: str, mask: float, copies: float, element: int) -> Ops:
    """Return the kernels that pick the numbers of a tensor under a mask.

    True ones are counted. The host waits for the count. Their places are written, as rows and columns, and read.
    """
    return (
        _kernel("F", f"{name} count", "reduce", mask, INDEX),
        replace(_kernel("F", f"{name} count to host", "copy", INDEX, INDEX), host_waits=True),
        _kernel("F", f"{name} places", "strided", mask, INDEX * copies),
        _kernel("F", f"{name} rows and columns", "strided", INDEX * copies, 2 * INDEX * copies),
        _kernel("F", name, "strided", (2 * INDEX + element) * copies, element * copies),
    )


def _map_of_choices(experts: Experts) -> Ops:
    """Return the kernels that write the choices that came into a map of tokens to a rank's experts.

    In order these are the lines of ``_indices_to_multihot``. A token has a choice of -1 for each expert elsewhere.
    """
    tokens, copies = experts.arriving, experts.received
    chosen, pairs = float(CHOICE * tokens * experts.top_k), float(tokens * len(experts.loads))
    return (
        _kernel("F", "map zero", "zero", 0, INDEX * pairs),
        _kernel("F", "map probs zero", "zero", 0, PROBABILITY * pairs),
        _kernel("F", "own", "cast", INDEX * chosen, chosen),
        *_masked("own choices", chosen, copies, INDEX),
        _kernel("F", "numbers", "zero", 0, INDEX * tokens),
        _kernel("F", "own by token", "reduce", chosen, INDEX * tokens),
        _kernel("F", "own sums", "strided", INDEX * tokens, INDEX * tokens),
        replace(_kernel("F", "own sum to host", "copy", INDEX, INDEX), host_waits=True),
        _kernel("F", "repeats", "strided", INDEX * tokens, INDEX * copies),
        _kernel("F", "repeated", "strided", 2 * INDEX * copies, INDEX * copies),
        _kernel("F", "map", "strided", 2 * INDEX * copies, INDEX * copies),
        *_masked("own probs", chosen, copies, PROBABILITY),
        _kernel("F", "map probs", "strided", (2 * INDEX + PROBABILITY) * copies, PROBABILITY * copies),
        _kernel("F", "map cast", "cast", INDEX * pairs, CHOICE * pairs),
    )


def _gradients_of_choices(experts: Experts) -> Ops:
    """Return the kernels that take gradients of probabilities from the map, and put them back in order by a sort."""
    copies = experts.received
    chosen = float(PROBABILITY * experts.arriving * experts.top_k)
    return (
        _kernel("B", "map probs bwd", "strided", (2 * INDEX + PROBABILITY) * copies, PROBABILITY * copies),
        _kernel("B", "own probs zero grad", "zero", 0, chosen),
        _kernel("B", "own probs sort", "strided", INDEX * copies, INDEX * copies),
        _kernel("B", "own probs bwd", "strided", (INDEX + PROBABILITY) * copies, PROBABILITY * copies),
    )


def _gradients_of_top_k(experts: Experts) -> Ops:
    """Return the kernels that put gradients of the choices into zeros as wide as all experts."""
    scores = float(PROBABILITY * experts.tokens * experts.experts)
    chosen = float(PROBABILITY * experts.tokens * experts.top_k)
    return (
        _kernel("B", "choices zero grad", "zero", 0, scores),
        _kernel("B", "choices bwd", "strided", chosen, chosen),
    )
