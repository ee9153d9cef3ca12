"""The outcome of a point: its figures, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """State of a point that is done with.

    ``simulated``: it has figures. ``refused``: it is not legal, or cannot run. ``failed``: the simulator or its process
    broke down. ``kept``: it has been simulated or refused before, and what came of it is in the store.
    """

    SIMULATED = "simulated"
    REFUSED = "refused"
    FAILED = "failed"
    KEPT = "kept"


@dataclass(frozen=True)
class PointOutcome:
    """Figures of a point under the names of the JSON output of ``run``, or the ``error`` in their place.

    ``key``: hash of all that the figures follow from (`simulator.sweeping.key`). ``wall_s``: seconds that it took.
    """

    key: str
    status: Status
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    warnings: tuple[str, ...] = ()
    wall_s: float = 0.0
