"""PyTorch's caching allocator: what it rounds, what it keeps, and what it cannot use again.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 1.3 to 2.x, defaults): a request is rounded
up to 512 bytes; what fits no free block takes a segment from CUDA, of 2 MiB for requests up to 1 MiB, of 20 MiB up to
10 MiB, above that of the request rounded up to 2 MiB; a free block is the smallest that fits, and is split where enough
is left over; neighbours that are free join again, but only inside their segment. Segments stay reserved, and are given
back only when CUDA has no more.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

from simulator.units import MiB

ROUND = 512
SMALL_REQUEST, SMALL_SEGMENT = 1 * MiB, 2 * MiB
MEDIUM_REQUEST, MEDIUM_SEGMENT = 10 * MiB, 20 * MiB
ROUND_LARGE = 2 * MiB
#: What is left over of a large block is split off when it is more than this.
LARGE_REMAINDER = 1 * MiB


def rounded(nbytes: float) -> int:
    """What a tensor of ``nbytes`` takes: a multiple of 512.

    >>> rounded(1), rounded(512), rounded(513)
    (512, 512, 1024)
    """
    return max(math.ceil(nbytes / ROUND), 1) * ROUND


def segment(size: int) -> int:
    """The segment that is taken from CUDA for a request of ``size`` (rounded) bytes.

    >>> [segment(size) // MiB for size in (512, 1 * MiB, 1 * MiB + 512, 10 * MiB, 11 * MiB)]
    [2, 2, 20, 10, 12]
    """
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < MEDIUM_REQUEST:
        return MEDIUM_SEGMENT
    return math.ceil(size / ROUND_LARGE) * ROUND_LARGE


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment; ``before`` and ``after`` are its neighbours there."""

    order: int
    size: int
    small: bool
    before: Block | None = None
    after: Block | None = None
    free: bool = False


class CachingAllocator:
    """Bytes ``allocated`` to tensors and ``reserved`` from CUDA, now and at most.

    ``limit``: what CUDA has. Where a new segment would pass it, segments that are wholly free are given back first, as
    PyTorch does before it runs out of memory; what is needed beyond is taken all the same.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.allocated = self.reserved = 0
        self.most_allocated = self.most_reserved = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._made = 0

    def malloc(self, nbytes: float) -> Block:
        """A block for a tensor of ``nbytes``."""
        size = rounded(nbytes)
        small = size <= SMALL_REQUEST
        free = self._free[small]
        at = bisect_left(free, (size,))
        if at < len(free):
            block = free.pop(at)[2]
            block.free = False
        else:
            block = self._new(segment(size), small)
        left = block.size - size
        if left >= ROUND if small else left > LARGE_REMAINDER:
            rest = self._block(left, small)
            rest.before, rest.after = block, block.after
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a block back; it joins free neighbours."""
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

    def _new(self, size: int, small: bool) -> Block:
        if self.reserved + size > self.limit:
            self._give_back()
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        return self._block(size, small)

    def _give_back(self) -> None:
        """Every segment that is one free block returns to CUDA."""
        for small, free in self._free.items():
            whole = [entry for entry in free if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(size for size, _, _ in whole)
            kept = [entry for entry in free if entry[2].before is not None or entry[2].after is not None]
            self._free[small] = kept

    def _block(self, size: int, small: bool) -> Block:
        self._made += 1
        return Block(self._made, size, small)

    def _put(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.order, block))

    def _take(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.order))]
