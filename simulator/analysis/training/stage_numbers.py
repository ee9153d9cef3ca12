"""Numbers of the stages of ranks, by which equal ones are told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.analysis.training.static_memory import StaticMemory
from simulator.arrays import Ints
from simulator.models import Part


class StageNumbers:
    """Stages of ranks; equal ones, whose parts are the very same, have one number, by which ``parts`` has their parts.

    ``static``: of each rank.
    """

    def __init__(self, static: Sequence[StaticMemory]) -> None:
        self.parts: list[tuple[Part, ...]] = []
        number_of: dict[int, int] = {}
        self._none = 1 + max((max(one.parts, default=-1) for one in static), default=-1)
        self._numbers = np.full((len(static), self._none + 1), -1)
        for rank, one in enumerate(static):
            for stage, parts in one.parts.items():
                number = self._numbers[rank, stage] = number_of.setdefault(id(parts), len(self.parts))
                if number == len(self.parts):
                    self.parts.append(parts)

    def numbers_at(self, rank: Ints, stage: Ints) -> Ints:
        """Return the numbers of stages of ranks, by their places; -1 where a rank does not have the stage."""
        numbers: Ints = self._numbers[rank, np.minimum(stage, self._none)]
        return numbers
