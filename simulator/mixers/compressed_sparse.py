"""Compressed sparse attention of DeepSeek-V4: to a window, and to chosen keys of a few tokens each.

As in transformers 5.24 (modeling_deepseek_v4.py, ``DeepseekV4CSACompressor`` and ``DeepseekV4Indexer``). The indexer
learns by a loss of its own, as that of DeepSeek-V3.2 does, which is assumed.
"""

from __future__ import annotations

from simulator.mixers.compressing import compression
from simulator.mixers.index_scores import NUMBER, IndexScores, index_scores
from simulator.mixers.mixer import Mixer, MixerProduct, Operations
from simulator.mixers.rows import rotation
from simulator.mixers.shared_key import CompressedKeys, SharedKey, attention, attention_flops, refusals
from simulator.operations.shapes import Shapes
from simulator.program.kernels import causal_pairs

#: Keys and gates of a token: one for its own piece, one for the next piece.
SERIES = 2


def operations(shapes: Shapes, sizes: SharedKey) -> Operations:
    """Return attention to the window and to the compressed keys that an indexer chooses for a query."""
    rate = sizes.sparse_rate
    count = shapes.seq // rate
    most = min(sizes.top_k, count)
    # A query sees all keys until there are more than it may choose.
    chosen = shapes.batch * causal_pairs(shapes.seq, shapes.seq, window=min(sizes.top_k * rate, shapes.seq)) / rate
    keys = CompressedKeys(count, chosen, most, float(NUMBER * shapes.tokens * most))
    beside = (
        *compression(shapes, "compress", rate, sizes.head_dim, sizes.rotary_dim, series=SERIES),
        *_indexer(shapes, sizes, keys),
    )
    return attention(shapes, sizes, keys, beside)


def _indexer(shapes: Shapes, sizes: SharedKey, keys: CompressedKeys) -> Operations:
    """Return the indexer, which compresses keys of its own, scores them, and chooses among them."""
    width, q = sizes.index_heads * sizes.index_dim, sizes.heads * sizes.head_dim
    scores = IndexScores(
        heads=sizes.index_heads,
        head_dim=sizes.index_dim,
        keys=shapes.batch * keys.count,
        pairs=shapes.batch * causal_pairs(shapes.seq, shapes.seq) / sizes.sparse_rate,
        chosen=keys.pairs,
        choices=keys.most,
        attention_width=q,
        attention_head_dim=sizes.head_dim,
        attention_bytes=float(shapes.element * (shapes.tokens * q + shapes.batch * keys.count * sizes.head_dim)),
    )
    return (
        *compression(
            shapes, "index", sizes.sparse_rate, sizes.index_dim, sizes.rotary_dim, series=SERIES, detached=True
        ),
        MixerProduct("index_q", width, sizes.query_rank, "none", "mixer.q_down normed", width, detached=True),
        rotation(shapes, "index_q", shapes.tokens * sizes.index_heads, min(sizes.rotary_dim, sizes.index_dim)),
        MixerProduct(
            "index_weights", sizes.index_heads, shapes.hidden, "none", "attn.normed", sizes.index_heads, detached=True
        ),
        index_scores(shapes, scores),
    )


def flops(sizes: SharedKey, seen: float) -> float:
    """Return the products of a query with its window and its chosen keys, and the scores of all compressed keys."""
    compressed = seen / sizes.sparse_rate
    scores = 2.0 * sizes.index_heads * sizes.index_dim * compressed
    return attention_flops(sizes, min(sizes.window, seen) + min(sizes.top_k, compressed)) + scores


MIXER = Mixer(
    "compressed_sparse",
    "attention to a window, and to chosen keys of sparse_rate tokens each",
    section="shared_key",
    sizes=SharedKey,
    operations=operations,
    flops=flops,
    refusals=refusals,
)
