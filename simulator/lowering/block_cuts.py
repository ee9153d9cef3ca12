"""Blocks cut into parts that all micro-batches share."""

from __future__ import annotations

from simulator.program import Block


class BlockCuts:
    """Parts of blocks; a part that is asked for again is the same block."""

    def __init__(self) -> None:
        # A block is kept beside its part: the id of one that is gone could be another's.
        self._parts: dict[tuple[int, int, int], tuple[Block, Block]] = {}

    def part(self, block: Block, low: int, high: int) -> Block:
        """Return ops ``low`` to ``high`` of a block as a block."""
        key = id(block), low, high
        if key not in self._parts:
            self._parts[key] = block, Block(f"{block.name}[{low}:{high}]", block.ops[low:high])
        return self._parts[key][1]
