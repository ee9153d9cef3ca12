"""Pareto fronts: the layouts that no other one beats in every respect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: Figures of a front, and whether more of one is better.
_WEIGHED = {"step_time_s": False, "headroom_bytes": True, "n_gpus": False, "cost": False}


def undominated(layouts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the layouts than which no other is at least as good in all figures and better in one, fastest first.

    Of several with equal figures the first stays. A figure that layouts lack, as the cost without a price, is equal.

    >>> slow = {"step_time_s": 2.0, "headroom_bytes": 5.0, "n_gpus": 8}
    >>> undominated([slow, {**slow, "step_time_s": 1.0}, {**slow, "n_gpus": 4}, {**slow, "n_gpus": 16}])
    [{'step_time_s': 1.0, 'headroom_bytes': 5.0, 'n_gpus': 8}, {'step_time_s': 2.0, 'headroom_bytes': 5.0, 'n_gpus': 4}]
    """
    front: list[tuple[tuple[float, ...], Mapping[str, Any]]] = []
    ordered = sorted(((_costs(one), one) for one in layouts), key=lambda pair: pair[0])
    for costs, one in ordered:  # whatever beats a layout comes before it
        if not any(all(a <= b for a, b in zip(kept, costs, strict=True)) for kept, _ in front):
            front.append((costs, one))
    return [one for _, one in front]


def _costs(figures: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the figures of a layout, the less the better."""
    return tuple(
        (-1 if more_is_better else 1) * float(figures.get(name) or 0.0) for name, more_is_better in _WEIGHED.items()
    )
