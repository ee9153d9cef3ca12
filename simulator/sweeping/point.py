"""A point: one job to simulate, as a workload and what is changed in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: A shipped name, a path, or a mapping such as a workload file holds.
Source = str | Path | Mapping[str, Any]


def source_name(workload: Source) -> str:
    """Return a workload as the user wrote it, or the name that its mapping has."""
    return str(workload.get("name", "workload")) if isinstance(workload, Mapping) else str(workload)


@dataclass(frozen=True)
class Point:
    """One job of many: plain data, which any process can be handed.

    ``number``: its place among the points, from 0. ``changes``: dotted keys of ``workload`` with their values.
    """

    number: int
    workload: Source
    changes: Mapping[str, Any]
