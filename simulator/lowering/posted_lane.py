"""Lanes while passes and transfers are posted on them, one after another."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from simulator.program import LaneSteps, Step, StepColumns

_First = TypeVar("_First")


class PostedLane(Generic[_First]):
    """Steps of a lane as columns (see `StepColumns`), with whatever tells their prototypes in place of these."""

    def __init__(self) -> None:
        self.label: list[str] = []
        self._firsts: list[_First] = []
        self._number: dict[Hashable, int] = {}
        self._prototype: list[int] = []
        self._microbatch: list[int] = []
        self._after: list[tuple[str, ...]] = []
        self._tags: list[tuple[str, ...]] = []

    def post(
        self,
        kind: Hashable,
        first: _First,
        microbatch: int,
        label: str,
        after: tuple[str, ...],
        tags: tuple[str, ...] = (),
    ) -> None:
        """Post a step of a kind after other steps; ``first`` tells its prototype where it is the first of that kind."""
        number = self._number.get(kind)
        if number is None:
            number = self._number[kind] = len(self._firsts)
            self._firsts.append(first)
        self._prototype.append(number)
        self._microbatch.append(microbatch)
        self.label.append(label)
        self._after.append(after)
        self._tags.append(tags)

    def steps(self, prototype_of: Callable[[_First], Step]) -> LaneSteps:
        """Return the steps of the lane; all that came with one ``first`` are as the prototype that it tells."""
        prototypes = list(map(prototype_of, self._firsts))
        columns = self._prototype, self._microbatch, self.label, self._after, self._tags
        return LaneSteps(StepColumns(prototypes, *columns))
