"""Transports among GPUs of several types at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from simulator.hardware.transport import Transport


def slowest(transports: Sequence[Transport]) -> Transport:
    """Return the constants of transports when GPUs of several types take part.

    A ring or a tree is as slow as its slowest member. The slower one of every constant counts. Protocols are the ones
    in common.
    """
    transport: Transport = _slowest_parts(transports)
    return transport


def _slowest_parts(parts: Sequence[Any]) -> Any:
    names = [field.name for field in fields(parts[0])]
    return replace(parts[0], **{name: _slowest(name, [getattr(part, name) for part in parts]) for name in names})


def _slowest(name: str, values: Sequence[Any]) -> Any:
    first = next((value for value in values if value is not None), None)
    if name == "full_bytes":  # filling that goes on is slower than filling that ends
        return None if None in values else max(values)
    if is_dataclass(first):  # a part that some transport lacks follows from its other constants
        return None if None in values else _slowest_parts(values)
    if isinstance(first, Mapping):
        common = [key for key in first if all(key in other for other in values)]
        return {key: _slowest(key, [value[key] for value in values]) for key in common}
    numbers = [value for value in values if isinstance(value, float | int)]
    if not numbers:
        return first
    return (max if name.endswith("_s") or name in ("half_bytes", "head_bytes") else min)(numbers)
