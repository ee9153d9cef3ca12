"""Colours as 64-bit hashes in arrays: mixing them, adding up those of neighbours, and classes of equal ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Ints, distinct, run_starts

Colours = NDArray[np.uint64]


@dataclass(frozen=True)
class Classes:
    """Elements by colour: the ``first`` of each class in order of appearance, each element's class, class sizes."""

    first: Ints
    class_of: Ints
    size: Ints

    @classmethod
    def by(cls, colours: Colours) -> Classes:
        """Return the classes of elements of equal colours."""
        order = np.argsort(colours)
        ordered = colours[order]
        starts = run_starts(ordered)
        counts = np.diff(starts, append=len(order))
        first = np.minimum.reduceat(order, starts) if len(order) else order
        is_first = np.zeros(len(order), dtype=bool)
        is_first[first] = True
        number = (np.cumsum(is_first) - 1)[first]
        class_of, size = np.empty_like(order), np.empty_like(starts)
        class_of[order] = np.repeat(number, counts)
        size[number] = counts
        return cls(np.flatnonzero(is_first), class_of, size)

    @classmethod
    def each_alone(cls, size: int) -> Classes:
        """Return a class for every element."""
        return cls(np.arange(size), np.arange(size), np.ones(size, dtype=np.int64))


def mixed(*parts: NDArray[Any]) -> Colours:
    """Return a hash per position of several arrays (finaliser of splitmix64, Steele et al. 2014)."""
    value = np.zeros(np.broadcast_shapes(*[part.shape for part in parts]), dtype=np.uint64)
    shifted = np.empty_like(value)
    for part in parts:
        value += part if part.dtype == np.uint64 else part.view(np.uint64)
        value += np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            value ^= np.right_shift(value, np.uint64(shift), out=shifted)
            value *= np.uint64(factor)
        value ^= np.right_shift(value, np.uint64(31), out=shifted)
    return value


class NeighbourColours:
    """Entries that point at targets, so that the colours of those which point at one can be added up again and again.

    ``target``: what each entry points at, of ``size`` targets.
    """

    def __init__(self, target: Ints, size: int) -> None:
        self._target, self._size = target, size

    def sums(self, colours: Colours) -> Colours:
        """Return for each target a hash of the multiset of colours that point at it."""
        gathered = np.zeros(self._size, dtype=np.uint64)
        np.add.at(gathered, self._target, mixed(colours))
        return gathered


def n_distinct(colours: Colours) -> int:
    """Return the number of different colours."""
    return len(distinct(colours))


def labelled(values: Iterable[object]) -> Colours:
    """Give equal values equal colours, numbered by first appearance."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.uint64)
