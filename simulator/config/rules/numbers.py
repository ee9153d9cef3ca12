"""Divisors, splits and the nearest value that works: what proposals in error messages are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator


def divisors(number: int) -> list[int]:
    """Ascending.

    >>> divisors(28)
    [1, 2, 4, 7, 14, 28]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest(wanted: int, allowed: list[int]) -> int:
    """The allowed value closest to the wanted one by ratio, the larger of two equally close.

    >>> nearest(5, [1, 2, 4, 8]), nearest(3, [1, 2, 4])
    (4, 4)
    """
    return min(allowed, key=lambda value: (abs(math.log(value / wanted)), -value))


def split(layers: int, stages: int) -> list[int]:
    """``layers`` over ``stages`` as evenly as can be, the larger stages first (the last one also has the loss).

    >>> split(30, 4)
    [8, 8, 7, 7]
    """
    base, rest = divmod(layers, stages)
    return [base + 1] * rest + [base] * (stages - rest)


def around(number: int) -> Iterator[int]:
    """Whole numbers above 0, nearest to ``number`` first, as far as twice ``number`` and a schedule's usual round."""
    for distance in range(1, number + 1025):
        if number - distance > 0:
            yield number - distance
        yield number + distance


def nearest_multiple(number: int, step: int) -> int:
    return max(1, round(number / step)) * step


def listed(numbers: list[int]) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 24 else [*shown[:22], "...", shown[-1]])


def shown(sizes: list[int]) -> str:
    return str(sizes) if len(sizes) <= 64 else f"[{sizes[0]}, {sizes[1]}, ... {sizes[-1]}]"
