"""What links do for GPUs of several types at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)


def slowest(models: Sequence[M]) -> M:
    """The constants of transports, or of parts of them, when GPUs of several types take part: a ring or a tree is as
    slow as its slowest member, so that of every constant the slower one counts, and of protocols those that all have.
    """
    return models[0].model_copy(
        update={
            name: _slowest(name, [getattr(model, name) for model in models]) for name in type(models[0]).model_fields
        }
    )


def _slowest(name: str, values: list[Any]) -> Any:
    first = next((value for value in values if value is not None), None)
    if name == "full_bytes":  # what fills on and on is slower than what is full once
        return None if None in values else max(values)
    if isinstance(first, BaseModel):  # what one lacks is for all as its other constants say
        return None if None in values else slowest(values)
    if isinstance(first, Mapping):
        common = [key for key in first if all(key in other for other in values)]
        return {key: _slowest(key, [value[key] for value in values]) for key in common}
    numbers = [value for value in values if isinstance(value, float | int)]
    if not numbers:
        return first
    return (max if name.endswith("_s") or name in ("half_bytes", "head_bytes") else min)(numbers)
