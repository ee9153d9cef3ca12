"""Values that are kept under their keys for whoever asks next, as many as are allowed together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class RecentValues(Generic[_Value]):
    """Values by key: the last ones that were asked for. Together they weigh ``most`` at most, in whole numbers.

    >>> squares = RecentValues[int](most=2)
    >>> [squares.get(n, 1, lambda: n * n) for n in (3, 4, 3, 5)]
    [9, 16, 9, 25]
    >>> 3 in squares, 4 in squares
    (True, False)
    """

    def __init__(self, most: int) -> None:
        self._most, self._weight = most, 0
        self._kept: OrderedDict[Hashable, tuple[_Value, int]] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, weight: int, make: Callable[[], _Value]) -> _Value:
        """Return the value of ``key``, which ``make`` works out where it is not kept.

        Values that were not asked for the longest make room for its ``weight``. One that is too heavy is not kept.
        ``make`` may ask for keys too, for this one as well; then the value of the outermost call stays.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][0]
        value = make()
        if weight > self._most:
            return value
        if key in self._kept:  # by `make`
            self._weight -= self._kept.pop(key)[1]
        while self._weight + weight > self._most:
            _, (_, less) = self._kept.popitem(last=False)
            self._weight -= less
        self._kept[key] = value, weight
        self._weight += weight
        return value
