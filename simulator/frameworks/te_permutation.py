"""Permutation of tokens by Transformer Engine's kernels, which find a row's place before they copy it.

github.com/NVIDIA/TransformerEngine, transformer_engine/pytorch/triton/permutation.py (``make_row_id_map``,
``make_chunk_sort_map``), pytorch/permutation.py (``_moe_permute_mask_map``, ``_moe_chunk_sort``). Maps of a forward
pass are kept for the backward pass.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.frameworks import fused_kernels, megatron_experts
from simulator.frameworks.fused_kernels import SHORT_INDEX
from simulator.frameworks.token_travel import RowChunks
from simulator.operations.experts import CHOICE, Experts
from simulator.operations.nodes import Ops, memory


def rows_of(tokens: float, experts: int, copies: float) -> Ops:
    """Return the kernels that find the rows of all copies: sums in blocks of tokens, sums of blocks, and a dense map.

    The first two go over all pairs of tokens and experts. The third writes for each token how many copies it has, and a
    row and an expert for each.
    """
    pairs = tokens * experts
    choices, places, dense = CHOICE * pairs, SHORT_INDEX * pairs, SHORT_INDEX * (tokens + 2 * copies)
    sizes = (("in blocks", choices, places), ("of blocks", places, places), ("dense", places, dense))
    return tuple(memory("F", f"moe.row map {name}", "strided", read, written, "fp32") for name, read, written in sizes)


def row_map(experts: Experts) -> Ops:
    """Return the kernels that find the rows of the copies that a rank sends."""
    return rows_of(experts.tokens, experts.experts, experts.sent)


def chunks(experts: Experts) -> RowChunks:
    """Return the kernel that finds the place of every row that comes in chunks. One kernel then sorts all chunks.

    Chunks of a fixed size are turned, for which no places are needed (``combine_preprocess`` under ``drop_and_pad``).
    """
    if not experts.counted:
        return RowChunks((), 0)
    places = float(SHORT_INDEX * experts.worked_on)
    return RowChunks((memory("F", "moe.chunk map", "strided", 0, places, "fp32"),), 0)


def counted(experts: Experts) -> tuple[Ops, Ops]:
    """Return Megatron-Core's kernels around the exchange of counts, of which those of chunks stay on the GPU."""
    return megatron_experts.counted(experts, cuts=False)


EXPERTS = replace(fused_kernels.EXPERTS, sort=row_map, chunks=chunks, counted=counted)
