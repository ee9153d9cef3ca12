"""PyTorch's caching allocator: rounding of requests, reuse of blocks, segments reserved from CUDA.

Rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 1.3 to 2.x, defaults). A request is rounded up to 512
bytes. It takes the smallest free block that fits, which is split where enough is left over. Without such a block CUDA
gives a segment. It has 2 MiB for requests up to 1 MiB, 20 MiB below 10 MiB, else the request rounded up to 2 MiB.
Free neighbours join again inside their segment. Segments stay reserved until CUDA has no more.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import lru_cache

from simulator.units import MiB

ROUND = 512
SMALL_REQUEST, SMALL_SEGMENT = 1 * MiB, 2 * MiB
MEDIUM_REQUEST, MEDIUM_SEGMENT = 10 * MiB, 20 * MiB
ROUND_LARGE = 2 * MiB
#: The remainder of a large block is split off when it is larger.
LARGE_REMAINDER = 1 * MiB


@lru_cache(maxsize=4096)
def rounded(nbytes: float) -> int:
    """Return the bytes of a block for a tensor of ``nbytes``: a multiple of 512.

    >>> rounded(1), rounded(512), rounded(513)
    (512, 512, 1024)

    Raises ValueError for a negative number.
    """
    if nbytes < 0:
        raise ValueError(f"a tensor of {nbytes} bytes")
    return max(math.ceil(nbytes / ROUND), 1) * ROUND


def segment_bytes(size: int) -> int:
    """Return the bytes of CUDA's segment for a rounded request.

    >>> [segment_bytes(size * MiB) // MiB for size in (1, 2, 10, 11)]
    [2, 20, 10, 12]
    """
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < MEDIUM_REQUEST:
        return MEDIUM_SEGMENT
    return math.ceil(size / ROUND_LARGE) * ROUND_LARGE


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A piece of a segment; ``before`` and ``after`` are its neighbours there."""

    order: int
    size: int
    small: bool
    before: CachedBlock | None = None
    after: CachedBlock | None = None
    free: bool = False


class CachingAllocator:
    """Bytes ``allocated`` to tensors and ``reserved`` from CUDA, now and at most.

    ``limit``: bytes that CUDA has. Where a new segment would exceed it, wholly free segments return to CUDA first, as
    PyTorch does before it runs out of memory. A segment that still exceeds it is reserved all the same.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.allocated = self.reserved = 0
        self.most_allocated = self.most_reserved = 0
        self._free: dict[bool, list[tuple[int, int, CachedBlock]]] = {True: [], False: []}
        self._blocks = 0

    def malloc(self, nbytes: float) -> CachedBlock:
        """Return a block for a tensor of ``nbytes``. Raises ValueError for a negative number."""
        size = rounded(nbytes)
        small = size <= SMALL_REQUEST
        free = self._free[small]
        at = bisect_left(free, (size,))
        if at < len(free):
            block = free.pop(at)[2]
            block.free = False
        else:
            block = self._reserve(segment_bytes(size), small)
        remainder = block.size - size
        if remainder >= ROUND if small else remainder > LARGE_REMAINDER:
            rest = self._new_block(remainder, small)
            rest.before, rest.after = block, block.after
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: CachedBlock) -> None:
        """Free a block; it joins free neighbours."""
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take(other)
                block.size += other.size
                if other is block.before:
                    block.before = other.before
                    if other.before is not None:
                        other.before.after = block
                else:
                    block.after = other.after
                    if other.after is not None:
                        other.after.before = block
        self._put(block)

    def _reserve(self, size: int, small: bool) -> CachedBlock:
        if self.reserved + size > self.limit:
            self._release_free_segments()
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        return self._new_block(size, small)

    def _release_free_segments(self) -> None:
        """Return every segment that is one free block to CUDA."""
        for small, free in self._free.items():
            whole = [entry for entry in free if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(size for size, _, _ in whole)
            self._free[small] = [entry for entry in free if entry[2].before is not None or entry[2].after is not None]

    def _new_block(self, size: int, small: bool) -> CachedBlock:
        self._blocks += 1
        return CachedBlock(self._blocks, size, small)

    def _put(self, block: CachedBlock) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.order, block))

    def _take(self, block: CachedBlock) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.order))]
