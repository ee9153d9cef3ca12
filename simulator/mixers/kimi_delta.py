"""Kimi delta attention: the delta rule with a decay for every channel of a key (arXiv 2510.26692).

As in Kimi Linear (transformers 5.24, modeling_kimi_linear.py, ``KimiLinearDeltaAttention``) with the kernels of
flash-linear-attention (fla/ops/kda/chunk_fwd.py and chunk_bwd.py), which work on pieces of 64 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.bounds import ModelSize
from simulator.mixers.gated_delta import PIECE, rule_kernels
from simulator.mixers.mixer import Mixer, MixerProduct, Operations, Refusal, Split
from simulator.mixers.state import convolution, gated_norm, split_refusals, split_weight
from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.operations.weights import Weight
from simulator.units import FP32_BYTES

#: Kernels of the rule. Forward: kda_gate_chunk_cumsum, three of chunk_kda_fwd_intra, chunk_gated_delta_rule_fwd_h,
#: chunk_gla_fwd_o_gk. Backward: gate, recompute_w_u_fwd and _fwd_h again, then chunk_kda_bwd_dAv,
#: chunk_gated_delta_rule_bwd_dhu, chunk_kda_bwd_wy_dqkg_fused, chunk_kda_bwd_intra, chunk_local_cumsum, kda_gate_bwd.
KERNELS, BACKWARD_KERNELS = 6, 9


@dataclass(frozen=True)
class KimiDelta:
    """Sizes of layers with Kimi delta attention (arXiv 2510.26692)."""

    heads: ModelSize
    """heads of queries, keys and values, each with a state"""
    head_dim: ModelSize
    """width of a head of queries, of keys and of values, and of the inside of both gates"""
    conv_width: ModelSize = 4
    """tokens that the convolution before the rule sees [4]"""


def operations(shapes: Shapes, sizes: KimiDelta) -> Operations:
    """Return the operations of a rank, which has a part of the heads."""
    heads, width = sizes.heads // shapes.tp, sizes.heads // shapes.tp * sizes.head_dim
    norm = Weight("mixer.norm.weight", (sizes.head_dim,), (sizes.head_dim,), shapes.dtype)
    if shapes.tp > 1:  # each rank has a part of the gradient, from its heads
        norm = Weight(norm.name, norm.shape, norm.whole, shapes.dtype, partial_rows=sizes.head_dim)

    def low_rank(name: str) -> Operations:
        down = MixerProduct(f"{name}_a", sizes.head_dim, shapes.hidden, "none", "attn.normed", sizes.head_dim)
        up = MixerProduct(f"{name}_b", width, sizes.head_dim, "column", f"mixer.{name} inside", width * shapes.tp)
        return down, up

    return (
        MixerProduct("qkv", 3 * width, shapes.hidden, "column", "attn.normed", 3 * width * shapes.tp),
        convolution(shapes, 3 * width, sizes.conv_width, bias=False, saved=True),
        *(_length(shapes, name, width, sizes.head_dim) for name in "qk"),
        *low_rank("f"),
        MixerProduct("b", heads, shapes.hidden, "column", "attn.normed", heads * shapes.tp),
        _strength(shapes, heads),
        _rule(shapes, heads, sizes.head_dim),
        *low_rank("g"),
        gated_norm(shapes, width, sizes.head_dim, norm),
        MixerProduct("out", shapes.hidden, width, "row", "mixer.normed", shapes.hidden),
    )


def _length(shapes: Shapes, name: str, width: int, head_dim: int) -> Node:
    """Return the norm of queries, or keys, to length 1."""
    nbytes = float(shapes.element * shapes.tokens * width)
    return Node(
        forward=(memory("F", f"mixer.{name} length", "rms_norm", nbytes, nbytes, shapes.dtype, head_dim),),
        input_grad=(
            memory("B", f"mixer.{name} length bwd", "rms_norm_bwd", 2 * nbytes, nbytes, shapes.dtype, head_dim),
        ),
        grad_bytes=2 * nbytes,
    )


def _strength(shapes: Shapes, heads: int) -> Node:
    """Return the strengths of corrections, a number for every token and head."""
    nbytes = float(shapes.element * shapes.tokens * heads)
    return Node(
        forward=(memory("F", "mixer.beta", "activation", nbytes, nbytes, shapes.dtype),),
        input_grad=(memory("B", "mixer.beta bwd", "activation_bwd", 2 * nbytes, nbytes, shapes.dtype),),
        saved=(Tensor("mixer.beta", nbytes),),
        grad_bytes=nbytes,
    )


def _multiply_adds(k: int) -> tuple[float, float]:
    """Return the multiply-adds of a token and head ``k`` wide, forward and backward, by kernel."""
    c = PIECE
    again = {"recompute_w_u_fwd": 2 * c * k, "chunk_gated_delta_rule_fwd_h": 2 * k * k}
    forward = again | {
        # Scores of queries and of keys with keys, and the inverse of a triangle.
        "chunk_kda_fwd_intra": 2 * c * k + c * c / 3,
        "chunk_gla_fwd_o_gk": k * k + c * k,
    }
    backward = again | {
        "chunk_kda_bwd_dAv": 2 * c * k,
        "chunk_gated_delta_rule_bwd_dhu": 3 * k * k,
        "chunk_kda_bwd_wy_dqkg_fused": 3 * k * k + 4 * c * k + 2 * c * c,
        "chunk_kda_bwd_intra": 4 * c * k,
    }
    return sum(forward.values()), sum(backward.values())


def _rule(shapes: Shapes, heads: int, k: int) -> Node:
    """Return the rule with its decays, which keeps its inputs and two triangles, and makes the rest again.

    Decays are made in the rule's first kernel, in fp32. Bytes are assumed, as those of the gated delta rule: forward
    every tensor crosses memory once; backward all that was read is read twice.
    """
    (forward, backward), rows = _multiply_adds(k), shapes.tokens * heads
    row, decays = float(shapes.element * rows * k), float(FP32_BYTES * rows * k)
    states, triangles, strengths = row * k / PIECE, 2.0 * shapes.element * rows * PIECE, float(shapes.element * rows)
    read = 4 * row + strengths + decays + 2 * row + states + triangles
    outputs = 3 * row + 2 * states + decays
    forward_kernels, backward_kernels = rule_kernels(
        shapes,
        (2.0 * rows * forward, 2.0 * rows * backward),
        (read, 3 * row + decays + states + triangles),
        (2 * read + row, outputs + 4 * row + strengths),
        k,
        (KERNELS, BACKWARD_KERNELS),
    )
    return Node(
        forward=(forward_kernels,),
        input_grad=(backward_kernels,),
        weight_grad=(memory("W", "mixer.decay wgrad", "reduce", decays, FP32_BYTES * heads * k, shapes.dtype, heads),),
        saved=(
            *(Tensor(f"mixer.{name}", row) for name in ("q", "k", "v", "decays")),
            Tensor("mixer.strengths", strengths),
            Tensor("mixer.triangles", triangles),
        ),
        saved_for_weights=(Tensor("mixer.decays", row),),
        forward_bytes=decays + states + 2 * row,
        grad_bytes=outputs + 4 * row + strengths,
        output_grad_bytes=decays,
        weights=(split_weight(shapes, "A_log", heads), split_weight(shapes, "dt_bias", heads * k)),
    )


def flops(sizes: KimiDelta, seen: float) -> float:
    """Return four products of a key and a value a head, as of the gated delta rule, however many are ``seen``."""
    return 8.0 * sizes.heads * sizes.head_dim**2


def refusals(sizes: KimiDelta, split: Split) -> Iterator[Refusal]:
    """Yield what the layer cannot be split over; how its state would go on over ranks of a sequence is not known."""
    yield from split_refusals("kimi_delta", split, heads=sizes.heads)
    if split.cp > 1:
        yield Refusal("parallelism.cp", split.cp, "the state of kimi_delta passes through whole sequences", "1")


MIXER = Mixer(
    "kimi_delta",
    "linear attention by the delta rule with a decay for every channel",
    section="kimi_delta",
    sizes=KimiDelta,
    operations=operations,
    flops=flops,
    refusals=refusals,
)
