"""Gated delta rule: linear attention with a state that forgets and is corrected (arXiv 2412.06464).

As in Qwen3-Next (transformers 5.17, modeling_qwen3_next.py, ``Qwen3NextGatedDeltaNet``) with the kernels of
flash-linear-attention (fla/ops/gated_delta_rule/chunk.py), which work on pieces of 64 tokens. Context-parallel ranks
trade parts of sequences for heads behind the first products, and back before the last (Megatron-LM,
ssm/gated_delta_net.py, ``tensor_a2a_cp2hp``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from simulator.bounds import ModelSize
from simulator.mixers.mixer import Mixer, MixerProduct, Operations, Refusal, Split
from simulator.mixers.state import (
    convolution,
    exchanged,
    gated_norm,
    sequence_refusals,
    split_refusals,
    split_weight,
    whole_sequences,
)
from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.operations.weights import Weight
from simulator.program import Compute, StepPhase, Tiled
from simulator.units import FP32_BYTES

#: Tokens of a piece.
PIECE = 64
#: Kernels of the rule, forward and backward (chunk.py, ``chunk_gated_delta_rule_fwd`` and ``_bwd``). Forward:
#: chunk_local_cumsum, chunk_scaled_dot_kkt, solve_tril, recompute_w_u, chunk_gated_delta_rule_fwd_h, chunk_fwd_o.
#: Backward: recompute_w_u and _fwd_h again, then chunk_bwd_dv_local, chunk_gated_delta_rule_bwd_dhu, chunk_bwd_dqkwg,
#: prepare_wy_repr_bwd, two sums of gradients, and chunk_local_cumsum.
KERNELS, BACKWARD_KERNELS = 6, 9


@dataclass(frozen=True)
class GatedDelta:
    """Sizes of layers with the gated delta rule (arXiv 2412.06464), as in Qwen3-Next."""

    key_heads: ModelSize
    """heads of queries and keys"""
    value_heads: ModelSize
    """heads of values, each with a state; a multiple of key_heads"""
    key_dim: ModelSize
    """width of a head of queries and keys"""
    value_dim: ModelSize
    """width of a head of values"""
    conv_width: ModelSize = 4
    """tokens that the convolution before the rule sees [4]"""


def operations(shapes: Shapes, sizes: GatedDelta) -> Operations:
    """Return the operations of a rank, which has a part of the heads."""
    heads = sizes.value_heads // shapes.tp
    keys, values = sizes.key_heads // shapes.tp * sizes.key_dim, heads * sizes.value_dim
    inside: Operations = _inside(shapes, sizes)
    if shapes.cp > 1:
        widths = {"q": keys, "k": keys, "v": values, "gate": values, "beta": heads, "decay": heads}
        pairs = zip(_inside(whole_sequences(shapes), sizes), _inside(shapes, sizes), strict=True)
        inside = (
            exchanged(shapes, widths),
            *(replace(node, weights=undivided.weights) for node, undivided in pairs),
            exchanged(shapes, {"output": values}, back=True),
        )
    return (
        MixerProduct(
            "qkvz", 2 * (keys + values), shapes.hidden, "column", "attn.normed", 2 * (keys + values) * shapes.tp
        ),
        MixerProduct("ba", 2 * heads, shapes.hidden, "column", "attn.normed", 2 * heads * shapes.tp),
        *inside,
        MixerProduct("out", shapes.hidden, values, "row", "mixer.normed", shapes.hidden),
    )


def _inside(shapes: Shapes, sizes: GatedDelta) -> tuple[Node, ...]:
    """Return what stands between the products, of the heads that a rank works on."""
    key_heads, heads = sizes.key_heads // shapes.tp, sizes.value_heads // shapes.tp
    keys, values = key_heads * sizes.key_dim, heads * sizes.value_dim
    width = 2 * keys + values
    joined = float(shapes.element * shapes.tokens * width)
    norm = Weight("mixer.norm.weight", (sizes.value_dim,), (sizes.value_dim,), shapes.dtype)
    if shapes.tp > 1:  # each rank has a part of the gradient, from its heads
        norm = Weight(norm.name, norm.shape, norm.whole, shapes.dtype, partial_rows=sizes.value_dim)
    return (
        Node(  # queries, keys and values beside each other, without the gate
            forward=(memory("F", "mixer.qkv join", "copy", joined, joined, shapes.dtype),),
            input_grad=(memory("B", "mixer.qkv join bwd", "copy", joined, joined, shapes.dtype),),
            grad_bytes=2 * joined,
        ),
        convolution(shapes, width, sizes.conv_width, bias=False, saved=True),
        *_repeated(shapes, key_heads, heads, sizes.key_dim),
        _decays(shapes, heads),
        _rule(shapes, heads, sizes.key_dim, sizes.value_dim),
        gated_norm(shapes, values, sizes.value_dim, norm),
    )


def _repeated(shapes: Shapes, key_heads: int, heads: int, key_dim: int) -> tuple[Node, ...]:
    """Return the copies of queries and keys to all heads of values that share them, and their norms to length 1."""
    narrow, wide = (float(shapes.element * shapes.tokens * count * key_dim) for count in (key_heads, heads))
    nodes = []
    for name in "qk":
        if heads > key_heads:
            copied = memory("F", f"mixer.{name} repeat", "copy", narrow, wide, shapes.dtype)
            summed = memory("B", f"mixer.{name} repeat bwd", "reduce", wide, narrow, shapes.dtype)
            nodes.append(Node(forward=(copied,), input_grad=(summed,), grad_bytes=narrow + wide))
        normed = memory("F", f"mixer.{name} length", "rms_norm", wide, wide, shapes.dtype, key_dim)
        back = memory("B", f"mixer.{name} length bwd", "rms_norm_bwd", 2 * wide, wide, shapes.dtype, key_dim)
        nodes.append(Node(forward=(normed,), input_grad=(back,), grad_bytes=2 * wide))
    return tuple(nodes)


def _decays(shapes: Shapes, heads: int) -> Node:
    """Return the decays and the strengths of corrections: a number each for every token and head."""
    narrow, wide = float(shapes.element * shapes.tokens * heads), float(FP32_BYTES * shapes.tokens * heads)
    return Node(
        forward=(
            memory("F", "mixer.beta", "activation", narrow, narrow, shapes.dtype),
            memory("F", "mixer.decay", "activation", narrow, wide, shapes.dtype),
        ),
        input_grad=(
            memory("B", "mixer.decay bwd", "activation_bwd", narrow + wide, narrow, shapes.dtype),
            memory("B", "mixer.beta bwd", "activation_bwd", 2 * narrow, narrow, shapes.dtype),
        ),
        weight_grad=(memory("W", "mixer.decay wgrad", "reduce", wide, FP32_BYTES * heads, shapes.dtype, heads),),
        saved=(Tensor("mixer.ba", 2 * narrow),),
        saved_for_weights=(Tensor("mixer.ba", 2 * narrow),),
        grad_bytes=narrow + wide,
        output_grad_bytes=wide,
        weights=(split_weight(shapes, "A_log", heads), split_weight(shapes, "dt_bias", heads)),
    )


def _multiply_adds(k: int, v: int) -> tuple[float, float]:
    """Return the multiply-adds of a token and head, forward and backward, by kernel."""
    c = PIECE
    vectors = c * (k + v)  # recompute_w_u
    passed = 2 * k * v  # chunk_gated_delta_rule_fwd_h
    forward = (
        c * k  # chunk_scaled_dot_kkt
        + c * c / 3  # solve_tril, an inverse
        + vectors
        + passed
        + k * v
        + c * (k + v)  # with the term before: chunk_fwd_o
    )
    backward = (
        vectors  # again
        + passed  # again
        + c * (k + v)  # chunk_bwd_dv_local
        + 3 * k * v  # chunk_gated_delta_rule_bwd_dhu
        + 3 * k * v
        + c * (3 * k + v)  # with the term before: chunk_bwd_dqkwg
        + 2 * c * (k + v)
        + 2 * c * c
        + 2 * c * k  # with the two terms before: prepare_wy_repr_bwd
    )
    return forward, backward


def _rule(shapes: Shapes, heads: int, k: int, v: int) -> Node:
    """Return the rule, which keeps its inputs and the inverted triangles, and makes states again for its backward pass.

    Bytes are assumed. Forward every tensor crosses memory once; backward all that was read is read twice, as a guess of
    what caches leave.
    """
    c, (forward, backward) = PIECE, _multiply_adds(k, v)
    rows = shapes.tokens * heads
    qkv, states, triangles = rows * (2 * k + v), rows * k * v / c, rows * c
    narrow = float(rows * (FP32_BYTES + shapes.element))
    read, written = (
        shapes.element * (qkv + rows * (k + v) + states + triangles),
        shapes.element * (rows * v + states + triangles),
    )
    outputs = shapes.element * (rows * (k + 2 * v) + 2 * states)
    forward_kernels, backward_kernels = rule_kernels(
        shapes,
        (2.0 * rows * forward, 2.0 * rows * backward),
        (read + narrow, written),
        (2 * (read + narrow) + shapes.element * rows * v, outputs + shapes.element * qkv + narrow),
        k,
        (KERNELS, BACKWARD_KERNELS),
    )
    return Node(
        forward=(forward_kernels,),
        input_grad=(backward_kernels,),
        saved=(
            Tensor("mixer.q", float(shapes.element * rows * k)),
            Tensor("mixer.k", float(shapes.element * rows * k)),
            Tensor("mixer.v", float(shapes.element * rows * v)),
            Tensor("mixer.decays", narrow),
            Tensor("mixer.triangles", float(shapes.element * triangles)),
        ),
        forward_bytes=shapes.element * (states + rows * (k + v)),
        grad_bytes=outputs + shapes.element * (qkv + rows * v) + narrow,
    )


def rule_kernels(
    shapes: Shapes,
    flops: tuple[float, float],
    forward_bytes: tuple[float, float],
    backward_bytes: tuple[float, float],
    key_dim: int,
    launches: tuple[int, int],
) -> tuple[Compute, Compute]:
    """Return the kernels of a delta rule, forward and backward, which work on pieces of `PIECE` tokens.

    ``flops`` and ``launches``: of the forward pass and of the backward pass. Bytes: read and written.
    """
    forward = Tiled(flops[0], *forward_bytes, PIECE, key_dim, launches[0], dtype=shapes.dtype)
    backward = Tiled(flops[1], *backward_bytes, PIECE, key_dim, launches[1], backward=True, dtype=shapes.dtype)
    return (
        Compute("mixer.rule", forward, StepPhase.FORWARD),
        Compute("mixer.rule bwd", backward, StepPhase.BACKWARD),
    )


def flops(sizes: GatedDelta, seen: float) -> float:
    """Return four products of a key and a value a head, however many tokens are ``seen``.

    So Megatron-LM counts them (training/training.py, ``gated_delta_net``).
    """
    return 8.0 * sizes.value_heads * sizes.key_dim * sizes.value_dim


def refusals(sizes: GatedDelta, split: Split) -> Iterator[Refusal]:
    """Yield heads that do not divide, and what the layer cannot be split over."""
    if sizes.value_heads % sizes.key_heads:
        allowed = f"a divisor of value_heads {sizes.value_heads}"
        yield Refusal("model.gated_delta.key_heads", sizes.key_heads, "heads of values share those of keys", allowed)
        return
    yield from split_refusals("gated_delta", split, key_heads=sizes.key_heads)
    yield from sequence_refusals("gated_delta", split, key_heads=sizes.key_heads)


MIXER = Mixer(
    "gated_delta",
    "linear attention by the gated delta rule",
    section="gated_delta",
    sizes=GatedDelta,
    operations=operations,
    flops=flops,
    refusals=refusals,
)
