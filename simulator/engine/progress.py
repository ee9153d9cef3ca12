"""How far what is played has come, told to whoever watches.

A play may lie deep below the call that a user waits for: under a search, or under advice. So the watcher is not handed
from function to function, but is there within a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: A listener to the share of a play's blocks that have ended.
PlayWatch = Callable[[float], object]

_watch: ContextVar[PlayWatch | None] = ContextVar("watch", default=None)

#: Blocks from one word to the watcher of a play to the next: a fraction of a second.
BLOCKS_AT_ONCE = 100


@contextmanager
def watched(watch: PlayWatch) -> Iterator[None]:
    """Tell ``watch`` within, now and then and at the end, which share of a play's blocks of kernels has ended.

    Plays follow one another. The shares of each rise to 1, unless it is given up. Of a play that grows none is told, as
    nobody knows its blocks.

    >>> shares = []
    >>> with watched(shares.append):
    ...     tell(1, 4)
    >>> shares
    [0.25]
    """
    before = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(before)


def is_watched() -> bool:
    """Return whether anybody asks how far a play is."""
    return _watch.get() is not None


def tell(ended: int, blocks: int) -> None:
    """Tell who watches, if anybody does, that so many of a play's ``blocks`` have ended."""
    watch = _watch.get()
    if watch is not None and blocks:
        watch(ended / blocks)


class EndedBlocks:
    """Counts the blocks of a play that have ended, of so many ``blocks``, and tells who watches."""

    def __init__(self, blocks: int) -> None:
        self._blocks, self._ended = blocks, 0

    def add_one(self) -> None:
        """Count one more; tell of each `BLOCKS_AT_ONCE`, and of the last one."""
        self._ended += 1
        if self._ended % BLOCKS_AT_ONCE == 0 or self._ended == self._blocks:
            tell(self._ended, self._blocks)
