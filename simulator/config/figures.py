"""Figures with an origin, and the bounds that a profile's numbers keep to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from simulator.config.section import Section
from simulator.errors import InputError

Kind = Literal["measured", "published", "datasheet", "assumed"]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Cited(Section):
    """Something with an origin."""

    kind: Kind
    """measured (by us) | published | datasheet | assumed"""
    source: str
    """a key of the profile's sources"""
    note: str = ""
    """what was made of the source"""


class Figure(Cited):
    """One number."""

    value: Positive


class Amount(Cited):
    """One number that may be 0."""

    value: NotNegative


def need_all(key: str, given: Iterable[str], needed: Iterable[str]) -> None:
    """Raise `InputError` where what is ``given`` under ``key`` lacks some of what is ``needed``."""
    present = list(given)
    missing = [name for name in needed if name not in present]
    if missing:
        raise InputError(f"lacks {', '.join(missing)}", key=key, found=", ".join(present))
