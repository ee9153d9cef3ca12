"""Heavily compressed attention of DeepSeek-V4: to a window, and to every key of many tokens before.

As in transformers 5.24 (modeling_deepseek_v4.py, ``DeepseekV4HCACompressor``).
"""

from __future__ import annotations

from simulator.mixers.compressing import compression
from simulator.mixers.mixer import Mixer, Operations
from simulator.mixers.shared_key import CompressedKeys, SharedKey, attention, attention_flops, refusals
from simulator.operations.shapes import Shapes
from simulator.program.kernels import causal_pairs


def operations(shapes: Shapes, sizes: SharedKey) -> Operations:
    """Return attention to the window and to all compressed keys before a query."""
    rate = sizes.heavy_rate
    count = shapes.seq // rate
    pairs = shapes.batch * causal_pairs(shapes.seq, shapes.seq) / rate if count else 0.0
    compressed = compression(shapes, "compress", rate, sizes.head_dim, sizes.rotary_dim, series=1)
    return attention(shapes, sizes, CompressedKeys(count, pairs, count), compressed)


def flops(sizes: SharedKey, seen: float) -> float:
    """Return the products of a query with its window, and with the compressed keys of the tokens ``seen``."""
    return attention_flops(sizes, min(sizes.window, seen) + seen / sizes.heavy_rate)


MIXER = Mixer(
    "heavily_compressed",
    "attention to a window, and to keys of heavy_rate tokens each",
    section="shared_key",
    sizes=SharedKey,
    operations=operations,
    flops=flops,
    refusals=refusals,
)
