"""Result of the fit of a part of a profile: its figures, and measured beside fitted seconds point by point."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Constants = dict[str, float]


@dataclass(frozen=True)
class FittedPoint:
    """One measured case beside its fit. ``group``: class and what is told apart in it, as in ``matmul.bf16.fwd``.

    ``fits_itself``: the only case that tells one of the figures, which therefore meets it exactly. Such a case says
    nothing of how good a fit is, and is left out of residuals.
    """

    group: str
    size: float  # bytes or FLOPs: the abscissa of the picture
    measured_s: float
    fitted_s: float
    held_out: bool
    fits_itself: bool = False

    @property
    def kind(self) -> str:
        """The class, as in ``matmul``."""
        return self.group.split(".")[0]

    @property
    def error(self) -> float:
        """fitted / measured - 1"""
        return self.fitted_s / self.measured_s - 1


@dataclass(frozen=True)
class ProfilePart:
    """``figures``: dotted key of the profile -> plain data that stands there from now on."""

    figures: Mapping[str, Any]
    points: Sequence[FittedPoint] = ()


def residual(points: Iterable[FittedPoint]) -> dict[str, float]:
    """How many, mean and largest absolute error, mean signed error. Needs a point at least."""
    errors = [point.error for point in points]
    sizes = [abs(error) for error in errors]
    return {
        "n": len(errors),
        "mean": round(statistics.fmean(sizes), 4),
        "max": round(max(sizes), 4),
        "bias": round(statistics.fmean(errors), 4) + 0.0,  # no -0
    }


def residuals(points: Iterable[FittedPoint]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the errors of each class and each group, apart for fitted and held-out points.

    Points that fit themselves are left out.
    """
    names: dict[str, list[FittedPoint]] = {}
    for point in points:
        for name in () if point.fits_itself else dict.fromkeys((point.kind, point.group)):
            names.setdefault(name, []).append(point)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name in sorted(names):
        halves = {"fitted": False, "held_out": True}
        chosen = {half: [p for p in names[name] if p.held_out == is_held_out] for half, is_held_out in halves.items()}
        table[name] = {half: residual(some) for half, some in chosen.items() if some}
    return table


def every_second(items: Iterable[T], size: Callable[[T], float]) -> tuple[list[T], list[T]]:
    """(fitted, held out): every second distinct size is left out, with all that have it."""
    listed = list(items)
    held_out = set(sorted({size(item) for item in listed})[1::2])
    return [item for item in listed if size(item) not in held_out], [item for item in listed if size(item) in held_out]


def search(
    start: Constants,
    loss: Callable[[Constants], float],
    *,
    limits: Mapping[str, tuple[float, float]] = {},
    step: float = 0.2,
    least: float = 0.004,
    sweeps: int = 40,
) -> Constants:
    """Return the constants of least ``loss``.

    Each in turn is multiplied by e^step or e^-step while that helps. Its step grows by half after a success, up to
    ``step``, and halves after a failure. The search ends when all steps are below ``least``.
    """
    best, steps = dict(start), dict.fromkeys(start, step)
    lowest = loss(best)
    for _ in range(sweeps):
        for name in start:
            if steps[name] < least:
                continue
            low, high = limits.get(name, (0.0, math.inf))
            for factor in (math.exp(steps[name]), math.exp(-steps[name])):
                candidate = best | {name: min(max(best[name] * factor, low), high)}
                value = loss(candidate)
                if value < lowest * (1 - 1e-6):
                    best, lowest = candidate, value
                    steps[name] = min(steps[name] * 1.5, step)
                    break
            else:
                steps[name] /= 2
        if all(value < least for value in steps.values()):
            break
    return best


def rounded(value: float, digits: int = 4) -> float:
    """Return ``value`` to so many significant digits."""
    return float(f"{value:.{digits}g}")
