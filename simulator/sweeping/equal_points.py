"""Equal points, which have one key: the first of them is simulated, and the others wait for its outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from simulator.sweeping.point import Point


class Released(NamedTuple):
    """Points that waited for one that has ended. ``alike`` share its outcome; ``left`` still need a simulation."""

    alike: Sequence[Point] = ()
    left: Sequence[Point] = ()


@dataclass
class EqualPoints:
    """The keys of a runner's points, of which each is simulated once.

    ``claim`` says of a key whether this command may begin it; another one may be at it.
    ``_first``: key -> number of the point that is simulated for all equal ones. ``_keys``: number of a point under way
    -> keys under which it has begun. ``_twins``: those keys -> the points that wait for the outcome.
    """

    claim: Callable[[str], bool]
    _first: dict[str, int] = field(default_factory=dict)
    _keys: dict[int, list[str]] = field(default_factory=dict)
    _twins: dict[str, list[Point]] = field(default_factory=dict)

    def begins(self, point: Point, key: str) -> bool:
        """Return whether a point is to be simulated: the first of its key, also where it begins once more."""
        if self._first.get(key, point.number) != point.number:
            return False
        if key not in self._twins:
            if not self.claim(key):
                return False
            self._first[key] = point.number
            self._twins[key] = []
            self._keys.setdefault(point.number, []).append(key)
        return True

    def waits(self, point: Point, key: str) -> bool:
        """Let a point wait for the outcome of an equal one; return False where none is under way."""
        if key not in self._twins:
            return False
        self._twins[key].append(point)
        return True

    def key_of(self, point: Point) -> str | None:
        """Return the key under which a point has begun; None where it has not."""
        keys = self._keys.get(point.number)
        return keys[-1] if keys else None

    def ended(self, point: Point, key: str) -> Released:
        """Return the points that waited for ``point``, whose outcome has a ``key``.

        It may have begun under another key, where a file was changed before it began once more.
        """
        alike, left = list[Point](), list[Point]()
        for begun in self._keys.pop(point.number, ()):
            twins = self._twins.pop(begun)
            if begun == key:
                alike += twins
            else:
                left += twins
                del self._first[begun]
        return Released(alike, left)

    @property
    def n_waiting(self) -> int:
        """Number of points that wait."""
        return sum(map(len, self._twins.values()))
