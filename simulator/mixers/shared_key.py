"""Attention of DeepSeek-V4 to a window: one head of keys for all queries, which is the values too.

As in transformers 5.24 (modeling_deepseek_v4.py, ``DeepseekV4Attention``), but in one fused kernel, where transformers
writes the scores to memory: its heads are 512 wide, and no FlashAttention has these. Layers that see more than the
window add keys of compressed pieces to it (`compressed_sparse`, `heavily_compressed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.bounds import ModelSize
from simulator.mixers.mixer import Mixer, MixerProduct, Operations, Refusal, Split
from simulator.mixers.rows import rms_norm, rotation
from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.operations.weights import Weight
from simulator.program import Compute, Matmul, StepPhase, Tiled
from simulator.program.kernels import causal_pairs
from simulator.units import FP32_BYTES


@dataclass(frozen=True)
class SharedKey:
    """Sizes of attention with one head of keys (DeepSeek-V4)."""

    heads: ModelSize
    """query heads; one head of keys serves all, and is the values too"""
    head_dim: ModelSize
    """width of a head"""
    query_rank: ModelSize
    """width that queries are compressed to"""
    output_groups: ModelSize
    """groups of heads, each with a product of its own behind attention; a divisor of heads"""
    output_rank: ModelSize
    """width that the output of a group is compressed to"""
    window: ModelSize = 128
    """tokens that a query sees as they are, itself among them [128]"""
    rotary_dim: ModelSize = 64
    """part of a head with rotary position [64]"""
    sparse_rate: ModelSize = 4
    """tokens that make one key of `compressed_sparse` layers [4]"""
    heavy_rate: ModelSize = 128
    """tokens that make one key of `heavily_compressed` layers [128]"""
    index_heads: ModelSize = 64
    """heads of the queries of the indexer of `compressed_sparse` layers [64]"""
    index_dim: ModelSize = 128
    """width of a head of the indexer [128]"""
    top_k: ModelSize = 512
    """compressed keys that a query of `compressed_sparse` layers sees [512]"""


@dataclass(frozen=True)
class CompressedKeys:
    """Keys of a sequence beside the window: their ``count``, and the ``pairs`` of a query and one that it sees.

    A query sees at most ``most`` of them. ``selected_bytes`` are those of the numbers of chosen keys.
    """

    count: int = 0
    pairs: float = 0.0
    most: int = 0
    selected_bytes: float = 0.0


def operations(shapes: Shapes, sizes: SharedKey) -> Operations:
    """Return attention to the window alone."""
    return attention(shapes, sizes)


def attention(
    shapes: Shapes, sizes: SharedKey, compressed: CompressedKeys = CompressedKeys(), beside: Operations = ()
) -> Operations:
    """Return attention to the window and to ``compressed`` keys, which the operations ``beside`` it make."""
    q, d = sizes.heads * sizes.head_dim, sizes.head_dim
    joined, inside = sizes.output_groups * sizes.output_rank, q // sizes.output_groups
    tokens, heads = shapes.tokens, shapes.tokens * sizes.heads
    return (
        MixerProduct("q_down", sizes.query_rank, shapes.hidden, "none", "attn.normed", sizes.query_rank),
        rms_norm(shapes, "q_down_norm", tokens, sizes.query_rank),
        MixerProduct("q_up", q, sizes.query_rank, "none", "mixer.q_down normed", q),
        rms_norm(shapes, "q_norm", heads, d, weighted=False),
        rotation(shapes, "q", heads, sizes.rotary_dim),
        MixerProduct("kv", d, shapes.hidden, "none", "attn.normed", d),
        rms_norm(shapes, "kv_norm", tokens, d),
        rotation(shapes, "kv", tokens, sizes.rotary_dim),
        *beside,
        _core(shapes, sizes, compressed),
        rotation(shapes, "context", heads, sizes.rotary_dim),  # back, as values were rotated with the keys
        _grouped(shapes, sizes.output_groups, sizes.output_rank, inside),
        MixerProduct("out", shapes.hidden, joined, "none", "mixer.grouped", shapes.hidden),
    )


def window_pairs(shapes: Shapes, sizes: SharedKey) -> float:
    """Return the pairs of a query and a token of its window, in all sequences."""
    return shapes.batch * causal_pairs(shapes.seq, shapes.seq, window=min(sizes.window, shapes.seq))


def _core(shapes: Shapes, sizes: SharedKey, compressed: CompressedKeys) -> Node:
    """Return the kernels of attention, each way one.

    Forward there are two products for each pair of a query and a key, backward five (arXiv 2205.14135). Every tensor
    crosses memory once, which is assumed. Each head has a sink, one more score that is learned.
    """
    heads, d = sizes.heads, sizes.head_dim
    pairs = window_pairs(shapes, sizes) + compressed.pairs
    per_product = 2.0 * pairs * heads * d
    keys = shapes.tokens + shapes.batch * compressed.count
    q, kv = (float(shapes.element * count * d) for count in (shapes.tokens * heads, keys))
    chosen = compressed.selected_bytes
    statistics = float(FP32_BYTES * shapes.tokens * heads)
    seen = max(1, min(sizes.window, shapes.seq) + compressed.most)
    return Node(
        forward=(
            Compute(
                "mixer.attention",
                Tiled(2 * per_product, q + kv + chosen, q + statistics, seen, d, dtype=shapes.dtype),
                StepPhase.FORWARD,
            ),
        ),
        input_grad=(
            Compute(
                "mixer.attention bwd",
                Tiled(
                    5 * per_product,
                    3 * q + kv + chosen + statistics,
                    q + kv,
                    seen,
                    d,
                    backward=True,
                    dtype=shapes.dtype,
                ),
                StepPhase.BACKWARD,
            ),
        ),
        weight_grad=(memory("W", "mixer.sinks wgrad", "reduce", 2 * statistics, FP32_BYTES * heads, "fp32", heads),),
        saved=(
            Tensor("mixer.q", q),
            Tensor("mixer.kv", kv),
            Tensor("mixer.context", q),
            Tensor("mixer.lse", statistics),
        ),
        saved_for_weights=(Tensor("mixer.lse", statistics),),
        grad_bytes=2 * q + kv,
        output_grad_bytes=q,
        weights=(Weight("mixer.sinks", (heads,), (heads,), shapes.dtype),),
    )


def _grouped(shapes: Shapes, groups: int, rank: int, inside: int) -> Node:
    """Return a product for each group of heads, from ``inside`` columns to ``rank``, all in one kernel."""
    tokens, params = shapes.tokens, groups * rank * inside
    x, y, name = (
        float(shapes.element * tokens * groups * inside),
        float(shapes.element * tokens * groups * rank),
        "mixer.grouped",
    )

    def product(role: str, phase: StepPhase, m: int, n: int, k: int) -> Compute:
        called = name if role == "fwd" else f"{name} {role}"
        return Compute(called, Matmul(m, n, k, batch=groups, dtype=shapes.dtype, role=role), phase)

    saved = (Tensor("mixer.turned context", x),)
    weight = Weight(
        f"{name}.weight",
        (groups * rank, inside),
        (groups * rank, inside),
        shapes.dtype,
        gradient_product=f"{name} wgrad",
    )
    return Node(
        forward=(product("fwd", StepPhase.FORWARD, tokens, rank, inside),),
        input_grad=(product("dgrad", StepPhase.BACKWARD, tokens, inside, rank),),
        weight_grad=(product("wgrad", StepPhase.WEIGHT_GRADIENT, rank, inside, tokens),),
        saved=saved,
        saved_for_weights=saved,
        grad_bytes=x + y + shapes.element * params,
        output_grad_bytes=y,
        weight_grad_bytes=float(shapes.element * params),
        weights=(weight,),
    )


def attention_flops(sizes: SharedKey, seen: float) -> float:
    """Return both products of a query with each of the keys ``seen``."""
    return 4.0 * sizes.heads * sizes.head_dim * seen


def flops(sizes: SharedKey, seen: float) -> float:
    """Return the products of a query with its window; queries at a sequence's beginning count like all others."""
    return attention_flops(sizes, min(sizes.window, seen))


def refusals(sizes: SharedKey, split: Split) -> Iterator[Refusal]:
    """Yield heads that do not group, and splits: all ranks would have the one head of keys and its compression."""
    if sizes.heads % sizes.output_groups:
        yield Refusal(
            "model.shared_key.output_groups",
            sizes.output_groups,
            f"does not divide heads {sizes.heads}",
            f"a divisor of {sizes.heads}",
        )
    if sizes.rotary_dim > sizes.head_dim:
        yield Refusal(
            "model.shared_key.rotary_dim",
            sizes.rotary_dim,
            "is a part of a head",
            f"at most head_dim {sizes.head_dim}",
        )
    if split.tp > 1:
        yield Refusal("parallelism.tp", split.tp, "attention with one head of keys is not split", "1")
    if split.cp > 1:
        yield Refusal("parallelism.cp", split.cp, "keys are compressed over whole sequences", "1")


MIXER = Mixer(
    "shared_key",
    "attention to a window, with one head of keys that are the values too",
    section="shared_key",
    sizes=SharedKey,
    operations=operations,
    flops=flops,
    refusals=refusals,
)
