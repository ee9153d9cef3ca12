"""Copies between a layer's parameters and the flat buffers that torch's FSDP gathers and reduces."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from calibration.measure.bench import Bench
from calibration.measure.case import Work


def _weights(hidden: int) -> list[tuple[int, ...]]:
    """Shapes of the parameters of a layer of 12 hidden^2: norm, qkv, projection, norm, fc1, fc2."""
    h = hidden
    return [(h,), (3 * h, h), (h, h), (h,), (4 * h, h), (h, 4 * h)]


def _chunk_cat(dtype: torch.dtype) -> Callable[..., Work]:
    """Gradients of a layer into the buffer that torch's FSDP reduces, cut by rank
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, ``foreach_reduce_scatter_copy_in``)."""

    def prepare(bench: Bench, hidden: int, ranks: int) -> Work:
        numel = sum(math.prod(shape) for shape in _weights(hidden))

        def make() -> Callable[[], object]:
            grads = [bench.random(*shape) for shape in _weights(hidden)]
            out = bench.empty(ranks, numel // ranks, dtype=dtype)
            return lambda: torch._chunk_cat(grads, 0, ranks, out=out)

        return bench.rotated((2.0 + dtype.itemsize) * numel, make, 2, 8)

    return prepare


def _split_copy(bench: Bench, hidden: int, ranks: int) -> Work:
    """Copy from the buffer that torch's FSDP gathers to a layer's parameters, as ``foreach_all_gather_copy_out``."""
    sizes = [math.prod(shape) // ranks for shape in _weights(hidden)]

    def make() -> Callable[[], object]:
        gathered = bench.fresh(ranks, sum(sizes))
        out = [bench.empty(ranks, size) for size in sizes]
        return lambda: torch.split_with_sizes_copy(gathered, sizes, dim=1, out=out)

    return bench.rotated(4.0 * ranks * sum(sizes), make, 2, 8)


SHARDING: dict[str, Callable[..., Work]] = {
    "chunk_cat_bf16": _chunk_cat(torch.bfloat16),
    "chunk_cat_bf16_fp32": _chunk_cat(torch.float32),
    "split_copy_bf16": _split_copy,
}
