"""Requests of a step to PyTorch's caching allocator, and the bytes that it reserves for them."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from simulator.analysis.training.caching_allocator import CachedBlock, CachingAllocator
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

    def describe(self, requests: Ints) -> int:
        """Add a sequence that may come, of shape (requests, 2); return its number. Its slots count from 0."""
        self.arrays.append(requests)
        return len(self.arrays) - 1


class MemoryRequests:
    """Requests to the allocator in order, as ``sequences`` that may come again and again.

    A request is a slot and bytes. A tensor of so many bytes, as `rounded`, is allocated there; 0 bytes free it.
    """

    def __init__(self, sequences: RequestSequences) -> None:
        self.n_slots = 0
        self._sequences = sequences
        self._numbers: list[int] = []
        self._first_slots: list[int] = []

    def new_slots(self, n: int) -> int:
        """Return the first of ``n`` slots that nothing else has."""
        self.n_slots += n
        return self.n_slots - n

    def add(self, number: int, first_slot: int) -> None:
        """Let a sequence come. Its slot 0 is ``first_slot``."""
        self._numbers.append(number)
        self._first_slots.append(first_slot)

    def in_order(self) -> list[tuple[int, int]]:
        """Return all requests one by one: slot, and bytes."""
        sequences = [one.tolist() for one in self._sequences.arrays]
        return [
            (first_slot + slot, nbytes)
            for number, first_slot in zip(self._numbers, self._first_slots, strict=True)
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
        starts = np.fromiter(accumulate(map(len, self._sequences.arrays), initial=0), dtype=np.int64)
        requests = np.concatenate([np.zeros((0, 2), dtype=np.int64), *self._sequences.arrays])
        order = np.array([self._numbers, self._first_slots], dtype=np.int64)
        return MostBytes(*compiled_most_bytes(starts, requests, order, self.n_slots, limit))
