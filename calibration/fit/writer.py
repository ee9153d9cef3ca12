"""A profile as a file for people: one figure a line, numbers in four digits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from calibration.fit.part import rounded
from simulator.config.section import as_data
from simulator.hardware.profile import Profile

HEADER = """\
# What a GPU, its host and its links do. Written by `python -m calibration fit`. Units are SI; every figure names its
# source (a key of `sources`) and what it rests on: measured (by us), published (a measurement of others), datasheet, or
# assumed (no measurement found; the note says why).
# Nothing is fitted to a step's time, but for hosts of frameworks: steps of models so narrow that the GPU always waits.
"""
WIDTH = 140


def written(profile: Profile) -> str:
    """YAML that reads back as the same profile, numbers rounded to four significant digits."""
    return HEADER + as_yaml(as_data(profile, nulls=False))


def as_yaml(data: Mapping[str, Any]) -> str:
    """A mapping as a file for people; sections stand apart."""
    sections = []
    for key, value in data.items():
        lines = "\n".join(_lines(key, value, 0))
        sections.append(lines if not isinstance(value, dict) else f"\n{lines}")
    return "\n".join(sections) + "\n"


def _lines(key: object, value: Any, depth: int) -> Iterator[str]:
    pad = "  " * depth
    if isinstance(value, Mapping):
        flow = f"{pad}{key}: {_flow(value)}"
        if not value or (depth > 0 and ("value" in value or len(flow) <= WIDTH)):
            yield flow
            return
        yield f"{pad}{key}:"
        for name, inner in _ordered(value):
            yield from _lines(name, inner, depth + 1)
    else:
        yield f"{pad}{key}: {_flow(value)}"


def _ordered(figure: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """The origin of a figure after its numbers."""
    origin = [(name, figure[name]) for name in ("kind", "source", "note") if figure.get(name)]
    return [item for item in figure.items() if item[0] not in ("kind", "source", "note")] + origin


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = (f"{key}: {_flow(one)}" for key, one in _ordered(value))
        return "{" + ", ".join(inner) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _number(value)
    text = str(value)
    simple = text.replace("_", "").replace("-", "").isalnum() and not text[0].isdigit()
    return (
        text if simple and text.lower() not in {"yes", "no", "on", "off", "true", "false", "null"} else json.dumps(text)
    )


def _number(value: float) -> str:
    """``3350e9`` and ``2.9e-6``: with the exponents of SI prefixes."""
    if math.isinf(value):
        return ".inf"
    value = value if value == int(value) and abs(value) > 1e9 else rounded(value)
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.10g}"
    power = 3 * math.floor(math.log10(abs(value)) / 3)
    power = min(max(power, -12), 12)
    return f"{value / 10.0**power:.12g}e{power}"
