"""Setters of frozen dataclasses with slots, for copies that are made faster than `dataclasses.replace` makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any


def slot_setters(cls: type) -> Mapping[str, Callable[[Any, Any], None]]:
    """Return for each field of a dataclass with slots what sets it on a new object, be the class frozen or not.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, slots=True)
    ... class Pair:
    ...     a: int
    ...     b: int
    >>> pair = object.__new__(Pair)
    >>> for name, value in (("a", 1), ("b", 2)):
    ...     slot_setters(Pair)[name](pair, value)
    >>> pair
    Pair(a=1, b=2)
    """
    return {field.name: getattr(cls, field.name).__set__ for field in fields(cls)}
