"""HybridEP's kernels around its transfers, as Megatron-Core's dispatcher calls them.

github.com/deepseek-ai/DeepEP, branch hybrid-ep: deep_ep/hybrid_ep_buffer.py (``dispatch_with_permute``),
csrc/hybrid_ep/executor/executor.cu (``metadata_preprocess_core``, ``dispatch_preprocess``), extension/permute.cu
(``permute_processing_kernel``, ``unpermute_kernel``); github.com/NVIDIA/Megatron-LM, core_v0.19,
megatron/core/transformer/moe/fused_a2a.py (``HybridEPDispatch``, ``HybridEPCombine``).

A backward pass has the maps of the forward pass. Barriers of ranks around their transfers are not modelled.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.frameworks.token_travel import Surroundings
from simulator.operations.experts import CHOICE, PROBABILITY, Experts
from simulator.operations.nodes import Ops, memory
from simulator.operations.shapes import Shapes
from simulator.program import Axis, Collective, CollectiveKind, Purpose

#: Bytes of an entry of the maps of places (int32).
PLACE = 4


def surroundings(shapes: Shapes, experts: Experts) -> Surroundings:
    """Return the kernels, and the bytes of probabilities: a token takes those of all experts of a node to each rank.

    Their gradients come back so. The kernel that sums gradients of rows writes them, with zeros for other ranks.
    """
    node_probs = float(PROBABILITY * len(experts.loads) * experts.ep / experts.nodes)
    return Surroundings(
        before=(*maps(experts), *to_buffers(shapes, experts, "F", probabilities=True)),
        behind=(),
        gradients_before=to_buffers(shapes, experts, "B", probabilities=False),
        gradients_behind=(),
        gradients_last=(),
        beside_bytes=node_probs * experts.travelling,
        gradients_beside_bytes=node_probs * experts.travelling,
        summed_bytes=node_probs * experts.arriving,
    )


def maps(experts: Experts) -> Ops:
    """Return what finds the places of all tokens: before a token travels, each rank has the choices of all ranks.

    They are gathered as a map of tokens to experts (bool). A kernel finds from it where this rank's tokens go, and
    which of its experts each token wants. A second one gives every copy its row, for which it goes twice over the
    tokens that arrive. Its counts lie in the host's memory, who waits for them to know how many rows there are.
    """
    choices = float(CHOICE * experts.tokens * experts.experts * experts.ep)
    wanted = float(CHOICE * experts.tokens * experts.ep * len(experts.loads))
    targets = float(PLACE * experts.tokens * experts.ep)
    pairs = float(experts.arriving * len(experts.loads))
    rows = memory("F", "moe.rows", "strided", (CHOICE + PLACE) * pairs, 2 * PLACE * pairs, "fp32")
    return (
        Collective("ep.all_gather choices", CollectiveKind.ALL_GATHER, choices, Axis.EP, Purpose.EXPERT),
        memory("F", "moe.places", "strided", choices, wanted + targets, "fp32"),
        replace(rows, host_waits=True),
    )


def to_buffers(shapes: Shapes, experts: Experts, phase: str, *, probabilities: bool) -> Ops:
    """Return the copies of tokens into buffers that the network reads, with their ``probabilities`` of all experts.

    Within a node they are read where they lie.
    """
    if experts.nodes == 1:
        return ()
    tokens = float(shapes.element * experts.tokens * shapes.hidden)
    probs = float(PROBABILITY * experts.tokens * experts.experts)
    name = "moe.to buffer" if phase == "F" else "moe.to buffer bwd"
    copied = (memory(phase, name, "copy", tokens, tokens, shapes.dtype),)
    return (*copied, memory(phase, f"{name} probs", "copy", probs, probs, "fp32")) if probabilities else copied
