"""Pareto fronts: the layouts that no other one beats in every respect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

#: Figures of which more is better.
_MORE_IS_BETTER = ("headroom_bytes",)


def losses(figures: Mapping[str, Any], names: Iterable[str]) -> tuple[float, ...]:
    """Return figures of a layout, the less the better. One that it lacks, as the cost without a price, is infinite.

    >>> losses({"step_time_s": 2.0, "headroom_bytes": 5.0}, ("step_time_s", "headroom_bytes", "cost"))
    (2.0, -5.0, inf)
    """
    signs = {name: -1.0 if name in _MORE_IS_BETTER else 1.0 for name in names}
    return tuple(math.inf if figures.get(name) is None else sign * figures[name] for name, sign in signs.items())


def undominated(layouts: Iterable[T], losses_of: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Return the layouts than which no other loses as little in all respects and less in one, by their losses.

    Of several with equal losses the first stays.

    >>> undominated([(1.0, 3.0), (2.0, 1.0), (2.0, 3.0), (1.0, 3.0)], lambda one: one)
    [(1.0, 3.0), (2.0, 1.0)]
    """
    front: list[tuple[tuple[float, ...], T]] = []
    ordered = sorted(((losses_of(one), one) for one in layouts), key=lambda pair: pair[0])
    for here, one in ordered:  # whatever beats a layout comes before it
        if not any(all(a <= b for a, b in zip(kept, here, strict=True)) for kept, _ in front):
            front.append((here, one))
    return [one for _, one in front]
