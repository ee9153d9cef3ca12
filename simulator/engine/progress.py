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


@contextmanager
def watched(watch: PlayWatch) -> Iterator[None]:
    """Tell ``watch`` within, several times a second, which share of a play's blocks has ended.

    Plays follow one another, and each has shares up to 1.

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
