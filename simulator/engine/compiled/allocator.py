"""PyTorch's caching allocator in C, which reserves what `simulator.analysis.training.caching_allocator` does."""

from __future__ import annotations

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.engine.compiled.library import event_loop


def compiled_most_bytes(starts: Ints, requests: Ints, order: Ints, firsts: Ints, n_slots: int, limits: Floats) -> Ints:
    """Play requests of ranks; return the most bytes reserved, and the most allocated, shape (ranks, 2).

    ``requests``: of all sequences, shape (requests, 2): a slot below ``n_slots``, and rounded bytes, or 0 to free it.
    ``starts``: the first request of each sequence, and behind the last one. ``order``: the sequences that are played,
    shape (2, sequences): numbers, and the slots where their slots begin. ``firsts``: the first of them of each rank,
    and behind the last. ``limits``: bytes that CUDA has on each. Raises MemoryError where this process has none left.
    """
    most = np.zeros((len(limits), 2), dtype=np.int64)
    columns = [np.ascontiguousarray(column) for column in (starts, requests, firsts, order[0], order[1])]
    addresses = [column.ctypes.data for column in columns]
    counts = len(limits), len(requests), n_slots
    if event_loop().play_requests(*addresses, *counts, limits.ctypes.data, most.ctypes.data) < 0:
        raise MemoryError
    return most
