"""A suite: a table of measured steps, and what its software did that the table does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """Bounds on a suite's errors, as shares of the measured value; None: no bound."""

    mean: float | None = None
    row: float | None = None


@dataclass(frozen=True)
class Suite:
    """A table of measured steps.

    ``settings``: dotted workload keys for what its columns leave open. ``special``: more of them for the rows whose
    columns say what is given, as (columns, settings). ``note``: a sentence on what its rows were told that nobody knows
    of a machine before it is rented. ``measured_by``: who measured them, with which software; empty: column
    ``software`` says it, or else the suite's name. ``year``: of that software. ``evidence``: its steps say how far off
    those of other jobs are; not where its software does what no workload can say.
    """

    name: str
    about: str
    table: Path
    settings: Mapping[str, Any]
    bounds: Bounds
    year: int
    special: tuple[tuple[Mapping[str, str], Mapping[str, Any]], ...] = ()
    note: str = ""
    measured_by: str = ""
    evidence: bool = True

    def settings_of(self, row: Mapping[str, str]) -> dict[str, Any]:
        """The settings that go with a row of the table."""
        chosen = dict(self.settings)
        for columns, settings in self.special:
            if all(row.get(column) == text for column, text in columns.items()):
                chosen |= settings
        return chosen
