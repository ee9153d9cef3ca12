"""PyTorch's caching allocator in C, which reserves what `simulator.analysis.training.caching_allocator` does."""

from __future__ import annotations

import numpy as np

from simulator.arrays import Ints
from simulator.engine.compiled.library import event_loop


def compiled_most_bytes(starts: Ints, requests: Ints, order: Ints, n_slots: int, limit: float) -> tuple[int, int]:
    """Play requests; return the most bytes reserved, and the most allocated.

    ``requests``: of all sequences, shape (requests, 2): a slot below ``n_slots``, and rounded bytes, or 0 to free it.
    ``starts``: the first request of each sequence, and behind the last one. ``order``: the sequences that are played,
    shape (2, sequences): numbers, and the slots where their slots begin. ``limit``: bytes that CUDA has. Raises
    MemoryError where this process has none left.
    """
    most = np.zeros(2, dtype=np.int64)
    starts, requests, order = map(np.ascontiguousarray, (starts, requests, order))
    columns = starts.ctypes.data, requests.ctypes.data, order.shape[1], order[0].ctypes.data, order[1].ctypes.data
    if event_loop().play_requests(*columns, n_slots, limit, most.ctypes.data) < 0:
        raise MemoryError
    return int(most[0]), int(most[1])
