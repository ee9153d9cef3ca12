"""Sparse attention of DeepSeek-V3.2: a small indexer chooses the tokens that each query attends to (arXiv 2512.02556).

The indexer is that of transformers 5.17 (modeling_deepseek_v32.py, ``DeepseekV32Indexer``), in the working precision.
It learns what attention looks at by a loss of its own, over the chosen tokens alone (section 2.1.1 there); nothing of
it reaches the layers below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.bounds import ModelSize
from simulator.mixers.index_scores import IndexScores, index_scores
from simulator.mixers.mixer import Attends, Mixer, MixerProduct, Operations, Refusal, Split
from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.operations.weights import Weight
from simulator.program.kernels import causal_pairs


@dataclass(frozen=True)
class Indexer:
    """Sizes of the indexer of sparse attention (DeepSeek-V3.2)."""

    heads: ModelSize
    """heads of its queries; its one key serves all"""
    head_dim: ModelSize
    """width of a head"""
    top_k: ModelSize
    """tokens that a query attends to"""


def operations(shapes: Shapes, sizes: Indexer) -> Operations:
    """Return the operations of an indexer, which every tensor-parallel rank does whole."""
    width = sizes.heads * sizes.head_dim
    return (
        MixerProduct("index_q", width, shapes.compressed_queries, "none", "attn.q_normed", width, detached=True),
        MixerProduct("index_k", sizes.head_dim, shapes.hidden, "none", "attn.normed", sizes.head_dim, detached=True),
        _key_norm(shapes, sizes.head_dim),
        MixerProduct("index_weights", sizes.heads, shapes.hidden, "none", "attn.normed", sizes.heads, detached=True),
        _scores(shapes, sizes),
    )


def _key_norm(shapes: Shapes, width: int) -> Node:
    """Return the LayerNorm of the indexer's keys, one of each token, which every tensor-parallel rank has."""
    nbytes = float(shapes.element * shapes.tokens * width)
    weights = tuple(Weight(f"mixer.key_norm.{name}", (width,), (width,), shapes.dtype) for name in ("weight", "bias"))
    return Node(
        forward=(memory("F", "mixer.key norm", "norm", nbytes, nbytes, shapes.dtype, width),),
        input_grad=(memory("B", "mixer.key norm bwd", "norm_bwd", 2 * nbytes, nbytes, shapes.dtype, width),),
        weight_grad=(
            memory(
                "W", "mixer.key norm wgrad", "norm_bwd", 2 * nbytes, 2 * shapes.element * width, shapes.dtype, width
            ),
        ),
        saved=(Tensor("mixer.key raw", nbytes),),
        grad_bytes=2 * nbytes,
        output_grad_bytes=nbytes,
        weights=weights,
    )


def _scores(shapes: Shapes, sizes: Indexer) -> Node:
    """Return the scores of all tokens before a query, the choice among them, and the gradient of the indexer's loss."""
    choices = min(sizes.top_k, shapes.seq)
    return index_scores(
        shapes,
        IndexScores(
            heads=sizes.heads,
            head_dim=sizes.head_dim,
            keys=shapes.tokens,
            pairs=shapes.batch * causal_pairs(shapes.seq, shapes.seq),
            chosen=shapes.batch * causal_pairs(shapes.seq, shapes.seq, window=choices),
            choices=choices,
            attention_width=shapes.heads * shapes.head_dim,
            attention_head_dim=shapes.head_dim,
            attention_bytes=float(shapes.element * shapes.tokens * (shapes.q_width + shapes.kv_width)),
        ),
    )


def flops(sizes: Indexer, seen: float) -> float:
    """Return the products of a query with the keys of the tokens before it."""
    return 2.0 * sizes.heads * sizes.head_dim * seen


def refusals(sizes: Indexer, split: Split) -> Iterator[Refusal]:
    """Yield context parallelism: an indexer looks at whole sequences."""
    if split.cp > 1:
        yield Refusal("parallelism.cp", split.cp, "an indexer chooses among the tokens of whole sequences", "1")


MIXER = Mixer(
    "sparse",
    "attention to the tokens that an indexer chooses",
    Attends(mask="top_k"),
    section="indexer",
    sizes=Indexer,
    operations=operations,
    flops=flops,
    refusals=refusals,
)
