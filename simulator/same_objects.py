"""Values of objects that are told apart by identity, as comparing large equal ones takes long."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

_Known = TypeVar("_Known")


class SameObjects(Generic[_Known]):
    """Values by the very objects that they follow from, and by a key beside these.

    It holds the objects, so that no others have their ids.

    >>> sums = SameObjects[int]()
    >>> one, equal = [1, 2], [1, 2]
    >>> [sums.get([numbers], lambda: sum(one)) for numbers in (one, one, equal)], len(sums)
    ([3, 3, 3], 2)
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], Hashable], tuple[tuple[object, ...], _Known]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, objects: Sequence[object], make: Callable[[], _Known], key: Hashable = None) -> _Known:
        """Return the value of ``objects``, in their order, and ``key``; ``make`` works it out the first time."""
        ids = tuple(map(id, objects)), key
        if ids not in self._known:
            self._known[ids] = tuple(objects), make()
        return self._known[ids][1]
