"""Requests of a step to PyTorch's caching allocator, and the bytes that it reserves for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from simulator.analysis.training.caching_allocator import CachedBlock, CachingAllocator, rounded
from simulator.arrays import Ints
from simulator.engine.compiled.allocator import compiled_most_bytes


class MostBytes(NamedTuple):
    """Most bytes reserved from CUDA, and most allocated to tensors."""

    reserved: int
    allocated: int


class RequestSequences:
    """Sequences of requests, that of number n at ``arrays[n]``; a request is as of `MemoryRequests`."""

    def __init__(self) -> None:
        self.arrays: list[Ints] = []
        self._numbers: dict[bytes, int] = {}

    def describe(self, requests: Ints) -> int:
        """Return the number of a sequence that may come, of shape (requests, 2). Its slots count from 0."""
        number = self._numbers.setdefault(requests.tobytes(), len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(requests)
        return number

    def tensors(self, sizes: Iterable[float]) -> int:
        """Return the number of the sequence that allocates tensors of ``sizes`` (bytes), each in a slot of its own."""
        return self.describe(np.array([*enumerate(map(rounded, sizes))], dtype=np.int64).reshape(-1, 2))


#: Request that frees the tensor in slot 0.
FREED = np.zeros((1, 2), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class MemoryRequests:
    """Requests to the allocator in order, as ``sequences`` that may come again and again.

    ``order``: numbers of the sequences that come, and the slots that are their slots 0, shape (2, sequences).
    ``n_slots``: slots in all. A request is a slot and bytes. A tensor of so many bytes, as `rounded`, is allocated
    there; 0 bytes free it.
    """

    sequences: RequestSequences
    order: Ints
    n_slots: int

    def in_order(self) -> list[tuple[int, int]]:
        """Return all requests one by one: slot, and bytes."""
        sequences = [one.tolist() for one in self.sequences.arrays]
        return [
            (first_slot + slot, nbytes)
            for number, first_slot in self.order.T.tolist()
            for slot, nbytes in sequences[number]
        ]

    def most_bytes(self, limit: float, *, compiled: bool) -> MostBytes:
        """Return what the allocator has at most for these requests. ``limit``: bytes that CUDA has.

        ``compiled``: of the allocator in C, which hands out the same blocks.
        """
        return self._most_bytes_in_c(limit) if compiled else self._most_bytes_in_python(limit)

    def _most_bytes_in_python(self, limit: float) -> MostBytes:
        allocator, blocks = CachingAllocator(limit), dict[int, CachedBlock]()
        for slot, nbytes in self.in_order():
            if nbytes:
                blocks[slot] = allocator.malloc(nbytes)
            else:
                allocator.free(blocks.pop(slot))
        return MostBytes(allocator.most_reserved, allocator.most_allocated)

    def _most_bytes_in_c(self, limit: float) -> MostBytes:
        starts = np.fromiter(accumulate(map(len, self.sequences.arrays), initial=0), dtype=np.int64)
        requests = np.concatenate([np.zeros((0, 2), dtype=np.int64), *self.sequences.arrays])
        return MostBytes(*compiled_most_bytes(starts, requests, self.order, self.n_slots, limit))
