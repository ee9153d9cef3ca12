"""Requests of a step to PyTorch's caching allocator, and the bytes that it reserves for them."""

from __future__ import annotations

from collections.abc import Sequence
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
        self._tensors: dict[tuple[float, ...], int] = {}

    def describe(self, requests: Ints) -> int:
        """Add a sequence that may come, of shape (requests, 2); return its number. Its slots count from 0."""
        self.arrays.append(requests)
        return len(self.arrays) - 1

    def tensors(self, sizes: tuple[float, ...]) -> int:
        """Return the number of the sequence that allocates tensors of ``sizes`` (bytes), each in a slot of its own."""
        if sizes not in self._tensors:
            requests = np.array([*enumerate(map(rounded, sizes))], dtype=np.int64)
            self._tensors[sizes] = self.describe(requests.reshape(-1, 2))
        return self._tensors[sizes]


#: Request that frees the tensor in slot 0.
FREED = np.zeros((1, 2), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class MemoryRequests:
    """Requests of ranks to their allocators in order, as ``sequences`` that may come again and again.

    ``order``: numbers of the sequences that come, rank by rank, and the slots that are their slots 0, shape (2,
    sequences). ``firsts``: the first of each rank, and behind the last. ``n_slots``: slots in all. A request is a slot
    and bytes. A tensor of so many bytes, as `rounded`, is allocated there; 0 bytes free it.
    """

    sequences: RequestSequences
    order: Ints
    firsts: Ints
    n_slots: int

    def in_order(self, rank: int) -> list[tuple[int, int]]:
        """Return all requests of the rank at a place among all, one by one: slot, and bytes."""
        sequences = [one.tolist() for one in self.sequences.arrays]
        return [
            (first_slot + slot, nbytes)
            for number, first_slot in self.order[:, self.firsts[rank] : self.firsts[rank + 1]].T.tolist()
            for slot, nbytes in sequences[number]
        ]

    def most_bytes(self, limits: Sequence[float], *, compiled: bool) -> list[MostBytes]:
        """Return what each rank's allocator has at most for these requests. ``limits``: bytes that CUDA has there.

        ``compiled``: of the allocator in C, which hands out the same blocks.
        """
        if compiled:
            return self._most_bytes_in_c(limits)
        return [self._most_bytes_in_python(rank, limit) for rank, limit in enumerate(limits)]

    def _most_bytes_in_python(self, rank: int, limit: float) -> MostBytes:
        allocator, blocks = CachingAllocator(limit), dict[int, CachedBlock]()
        for slot, nbytes in self.in_order(rank):
            if nbytes:
                blocks[slot] = allocator.malloc(nbytes)
            else:
                allocator.free(blocks.pop(slot))
        return MostBytes(allocator.most_reserved, allocator.most_allocated)

    def _most_bytes_in_c(self, limits: Sequence[float]) -> list[MostBytes]:
        starts = np.fromiter(accumulate(map(len, self.sequences.arrays), initial=0), dtype=np.int64)
        requests = np.concatenate([np.zeros((0, 2), dtype=np.int64), *self.sequences.arrays])
        most = compiled_most_bytes(
            starts, requests, self.order, self.firsts, self.n_slots, np.array(limits, dtype=np.float64)
        )
        return [MostBytes(*row) for row in most.tolist()]
