"""Thick grids of cases, thinned: `make test` has a sample with every value of each axis, slow tests the rest."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def thinned(points: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """Return all points; of those about one in ``every`` is left to `make test`, and the others are marked slow.

    Left are points that stand in a diagonal of the grid, and the first one with a value that no point before it has
    left. Values are told apart by how they are written.
    """
    params, seen = [], set()
    for number, point in enumerate(points):
        values = {(axis, repr(value)) for axis, value in enumerate(point)}
        kept = number % every == number // every % every or not values <= seen
        seen |= values if kept else set()
        params.append(pytest.param(*point, marks=() if kept else pytest.mark.slow))
    return params


def grid(*axes: Iterable[Any], every: int) -> list[Any]:
    """Return the product of ``axes``, thinned."""
    return thinned(product(*axes), every)
