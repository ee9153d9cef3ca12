"""Figures of a calibration profile, each with its origin."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from simulator.bounds import NotNegative, Positive
from simulator.errors import InputError

OriginKind = Literal["measured", "published", "datasheet", "assumed"]


@dataclass(frozen=True, kw_only=True)
class Cited:
    """Something with an origin."""

    kind: OriginKind
    """measured (by us) | published | datasheet | assumed"""
    source: str
    """a key of the profile's sources"""
    note: str = ""
    """what was made of the source"""


@dataclass(frozen=True, kw_only=True)
class Figure(Cited):
    """One number."""

    value: Positive


@dataclass(frozen=True, kw_only=True)
class Amount(Cited):
    """One number that may be 0."""

    value: NotNegative


def check_date(key: str, date: str) -> None:
    """Raise `InputError` where what stands under ``key`` is no date."""
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        raise InputError("is no date", key=key, found=date, allowed="YYYY-MM-DD")


def need_all(key: str, names: Iterable[str], needed: Iterable[str]) -> None:
    """Raise `InputError` where the ``names`` under ``key`` lack some of those that are ``needed``."""
    present = list(names)
    missing = [name for name in needed if name not in present]
    if missing:
        raise InputError(f"lacks {', '.join(missing)}", key=key, found=", ".join(present))
