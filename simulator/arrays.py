"""Types of numpy arrays that annotations name, and what many modules ask of arrays: their runs, places and order."""

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
    return ordered[run_starts(ordered)]


def is_any(values: NDArray[Any], chosen: Iterable[Any]) -> Bools:
    """Tell which values are among a few ``chosen`` ones; a comparison each, which is faster than `numpy.isin`.

    >>> is_any(np.array([-1, 4, 2, 4]), (4, -1)).tolist()
    [True, True, False, True]
    """
    is_chosen = np.zeros(len(values), dtype=np.bool_)
    for one in chosen:
        is_chosen |= values == one
    return is_chosen


def row_numbers(*columns: Ints) -> Ints:
    """Return a number of each row of some columns. Equal rows have equal numbers, which grow with the rows' values.

    >>> row_numbers(np.array([0, 1, 1]), np.array([7, 5, 7])).tolist()
    [2, 3, 5]
    """
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
        number = number * (high - low + 1) + column - low
    return number


def run_starts(values: NDArray[Any]) -> Ints:
    """Return where each run of equal neighbours begins.

    >>> run_starts(np.array([-1, -1, 4, -1])).tolist(), run_starts(np.zeros(0)).tolist()
    ([0, 2, 3], [])
    """
    return np.flatnonzero(np.concatenate([np.ones(min(len(values), 1), dtype=bool), values[1:] != values[:-1]]))


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return ranges of whole numbers one after another, of which each has a start and a length.

    >>> ranges(np.array([4, 0, 7]), np.array([2, 0, 3])).tolist()
    [4, 5, 7, 8, 9]
    """
    before = np.cumsum(lengths) - lengths
    numbers: Ints = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
    return numbers


def inverse(order: Ints) -> Ints:
    """Return the place that each element has in an ``order`` of all: the reverse permutation.

    >>> inverse(np.array([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place


def by_appearance(values: NDArray[Any]) -> tuple[Ints, Ints]:
    """Number different values by their first appearance: return the first place of each, and the number of each entry.

    >>> [part.tolist() for part in by_appearance(np.array([7, 3, 7, 5]))]
    [[0, 1, 3], [0, 1, 0, 2]]
    """
    _, first, number = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order], inverse(order)[number]


def without_rounding(figure: float) -> float:
    """Return ``figure`` to ten digits: where equal figures are ordered, the last digits of sums do not decide."""
    return float(f"{figure:.9e}")
