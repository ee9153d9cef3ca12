"""Communication by the name of its operation."""

from __future__ import annotations

from typing import Any

from simulator.program import AllToAll, Comm, PointToPoint
from simulator.program.validation import COMM_TYPES


def comm_called(name: str, op: str, nbytes: float, axis: str, purpose: str, **fields: Any) -> Comm:
    """Return communication of the type that has the fields of operation ``op``; a transfer with member 0 by default."""
    kind, word = next((kind, word) for word, kind in COMM_TYPES.items() if word == op)
    if kind is PointToPoint:
        fields.setdefault("peer", 0)
    return kind(name, *(() if kind is AllToAll else (word,)), nbytes, axis, purpose, **fields)
