"""Thick grids of cases, thinned: `make test` has a sample with every value of each axis, slow tests the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def thinned(points: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """Return all points; of those about one in ``every`` is left to `make test`, and the others are marked slow.

    Left are points that stand in a diagonal of the grid, and the first one with a value that no other point has left.
    Values are told apart by how they are written.
    """
    all_points = list(points)
    values = [{(axis, repr(value)) for axis, value in enumerate(point)} for point in all_points]
    kept = {number for number in range(len(all_points)) if number % every == number // every % every}
    seen = set().union(*(values[number] for number in kept))
    for number in range(len(all_points)):
        if not values[number] <= seen:
            kept.add(number)
            seen |= values[number]
    return [
        pytest.param(*point, marks=() if number in kept else pytest.mark.slow)
        for number, point in enumerate(all_points)
    ]


def one_in(every: int, cases: Iterable[Any]) -> list[Any]:
    """Return ``cases``: values of one argument, or tuples of several arguments' values.

    One in ``every`` is left to `make test`, and the others are marked slow.
    """
    params = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        params.append(pytest.param(*values, marks=pytest.mark.slow if number % every else ()))
    return params


def grid(*axes: Iterable[Any], every: int) -> list[Any]:
    """Return the product of ``axes``, thinned."""
    return thinned(product(*axes), every)


def every_pair(axes: Mapping[str, Iterable[Any]], indirect: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Return the parametrization of a test by the product of ``axes``: names of arguments -> values.

    `make test` has points in which each value meets each of every other axis; the others are marked slow. Of the points
    not yet taken comes next the one with most new pairs, the first of equals. Arguments that are ``indirect`` are
    parameters of the fixtures of these names.
    """
    values = [list(axis) for axis in axes.values()]
    several = ["," in names for names in axes]
    places = list(product(*(range(len(axis)) for axis in values)))
    pairs = {place: set(combinations(enumerate(place), 2)) for place in places}
    missing, kept = set().union(*pairs.values()), set()
    while missing:
        most = max(places, key=lambda place: len(pairs[place] & missing))
        missing -= pairs[most]
        kept.add(most)
    params = []
    for place in places:
        point: list[Any] = []
        for axis, i, is_several in zip(values, place, several, strict=True):
            point += axis[i] if is_several else [axis[i]]
        params.append(pytest.param(*point, marks=() if place in kept else pytest.mark.slow))
    names = [name.strip() for together in axes for name in together.split(",")]
    return pytest.mark.parametrize(names, params, indirect=list(indirect))
