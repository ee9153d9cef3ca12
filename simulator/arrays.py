"""Types of numpy arrays that annotations name, how parts of one kind are joined, and figures that are put in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def joined(parts: Iterable[Ints]) -> Ints:
    """Return arrays of whole numbers one after another; of no arrays, an empty one."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def first_places(numbers: Ints, n: int) -> Ints:
    """Return for each number below ``n`` the first place that has it; -1 where none has.

    >>> first_places(np.array([2, 0, 2]), 4).tolist()
    [1, -1, 0, -1]
    """
    first = np.full(n, -1)
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]  # of values for one element numpy keeps the last
    return first


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """Return the different values in order; by sorting, which is faster than the hashes of `numpy.unique`."""
    ordered = np.sort(values)
    return ordered[np.flatnonzero(np.concatenate([ordered[:1] == ordered[:1], ordered[1:] != ordered[:-1]]))]


def without_rounding(figure: float) -> float:
    """Return ``figure`` to ten digits: where equal figures are ordered, the last digits of sums do not decide."""
    return float(f"{figure:.9e}")
