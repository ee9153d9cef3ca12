"""Figures with an origin, and the bounds that a profile's numbers keep to."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simulator.config.files import Section

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
