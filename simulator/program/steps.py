"""The steps of a lane, as columns and as `Step`s."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, overload

from simulator.program.ops import quick_key, tags_of, with_tags
from simulator.program.step import Step, reordered

_shared_fields = attrgetter("phase", "stage", "chunk", "part", "alloc_bytes", "free_bytes", "workspace_bytes", "hooks")


@dataclass(frozen=True)
class StepColumns:
    """Steps as columns: each is as its prototype but for micro-batch, label, steps before it, and tags of transfers.

    ``prototypes`` are steps that others are like, in the order in which they are first needed. ``prototype``: of each
    step the index of its own. ``tags``: of each step those of its transfers in their order; others have none.
    """

    prototypes: Sequence[Step]
    prototype: list[int]
    microbatch: list[int]
    label: list[str]
    after: list[tuple[str, ...]]
    tags: list[tuple[str, ...]]

    @classmethod
    def from_steps(cls, steps: Sequence[Step]) -> StepColumns:
        """Return the columns of ``steps``; the first of each kind is the prototype of all."""
        ops = [step.op for step in steps]
        prototypes, prototype = _numbered(zip(map(quick_key, ops), map(_shared_fields, steps), strict=True), steps)
        microbatch, label, after = (list(map(attrgetter(name), steps)) for name in ("microbatch", "label", "after"))
        return cls(prototypes, prototype, microbatch, label, after, list(map(tags_of, ops)))

    @classmethod
    def joined(cls, parts: Iterable[StepColumns]) -> StepColumns:
        """Return the steps of ``parts``, one part after another; prototypes that several share come once."""
        parts = list(parts)
        each = [part.prototypes[number] for part in parts for number in part.prototype]
        columns = [list(chain.from_iterable(getattr(part, name) for part in parts)) for name in _OF_STEPS]
        return cls(*_numbered(map(id, each), each), *columns)

    def part(self, begin: int, end: int) -> StepColumns:
        """Return the steps from place ``begin`` to before place ``end``."""
        each = [self.prototypes[number] for number in self.prototype[begin:end]]
        return StepColumns(*_numbered(map(id, each), each), *[getattr(self, name)[begin:end] for name in _OF_STEPS])

    def step(self, at: int) -> Step:
        """Return the step at a place, made anew."""
        return self.part(at, at + 1).steps[0]

    @cached_property
    def steps(self) -> Sequence[Step]:
        """All steps, the very same for whoever asks."""
        op_of = [with_tags(prototype.op) for prototype in self.prototypes]
        return tuple(
            [
                reordered(self.prototypes[number], after, label=label, microbatch=microbatch, op=op_of[number](tags))
                for number, microbatch, label, after, tags in zip(
                    self.prototype, self.microbatch, self.label, self.after, self.tags, strict=True
                )
            ]
        )

    def like(self, at: int) -> Step:
        """Return the prototype of the step at a place."""
        return self.prototypes[self.prototype[at]]

    def places(self, holds: Callable[[Step], bool]) -> list[int]:
        """Return the places of the steps for whose prototypes something ``holds``."""
        chosen = list(map(holds, self.prototypes))
        return [at for at, number in enumerate(self.prototype) if chosen[number]]

    def field(self, name: str) -> list[Any]:
        """Return, step by step, a field in which steps are as their prototypes."""
        values = [getattr(prototype, name) for prototype in self.prototypes]
        return [values[number] for number in self.prototype]


_OF_STEPS = [field.name for field in fields(StepColumns)][2:]


class LaneSteps(Sequence[Step]):
    """The steps of a lane in their order, in parts. Columns and `Step`s are made of each other where one is needed."""

    def __init__(self, *parts: LaneSteps | StepColumns | tuple[Step, ...]) -> None:
        """Take parts that follow each other; their `Step`s stay the very same objects."""
        self._parts = parts

    @classmethod
    def from_steps(cls, steps: Iterable[Step]) -> LaneSteps:
        """Return ``steps``, which may come as any iterable."""
        return steps if isinstance(steps, LaneSteps) else cls(steps if isinstance(steps, tuple) else tuple(steps))

    @cached_property
    def columns(self) -> StepColumns:
        """All steps as columns."""
        parts = list(map(_columns, self._parts))
        return parts[0] if len(parts) == 1 else StepColumns.joined(parts)

    @cached_property
    def _steps(self) -> tuple[Step, ...]:
        parts = [part.steps if isinstance(part, StepColumns) else part for part in self._parts]
        return tuple(chain.from_iterable(parts))

    def followed_by(self, more: Iterable[Step]) -> LaneSteps:
        """Return these steps with ``more`` behind them."""
        return LaneSteps(self, LaneSteps.from_steps(more))

    def replaced(self, changes: Mapping[int, Iterable[Step]]) -> LaneSteps:
        """Return these steps with others in the places that ``changes`` names, of any number each."""
        parts: list[StepColumns | tuple[Step, ...]] = []
        run, begin = list[Step](), 0  # changed steps one after another, and the first place behind them
        for at, steps in sorted(changes.items(), key=lambda change: change[0]):
            if at > begin:
                parts += [tuple(run), self.columns.part(begin, at)]
                run = []
            run += steps
            begin = at + 1
        return LaneSteps(*parts, tuple(run), self.columns.part(begin, len(self)))

    def __len__(self) -> int:
        return sum(len(part.prototype) if isinstance(part, StepColumns) else len(part) for part in self._parts)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    @overload
    def __getitem__(self, at: int) -> Step: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Step, ...]: ...

    def __getitem__(self, at: int | slice) -> Step | tuple[Step, ...]:
        return self._steps[at]

    def __eq__(self, other: object) -> bool:
        return tuple(other) == self._steps if isinstance(other, LaneSteps | tuple) else NotImplemented

    def __repr__(self) -> str:
        return f"LaneSteps.from_steps({self._steps!r})"


def _columns(part: LaneSteps | StepColumns | tuple[Step, ...]) -> StepColumns:
    if isinstance(part, LaneSteps):
        return part.columns
    return part if isinstance(part, StepColumns) else StepColumns.from_steps(part)


def _numbered(keys: Iterable[Hashable], steps: Sequence[Step]) -> tuple[list[Step], list[int]]:
    """Return the first step with each key, and of every step the index of that with its key."""
    number: dict[Hashable, int] = {}
    numbers = [number.setdefault(key, len(number)) for key in keys]
    first: list[Step] = []
    for at, one in enumerate(numbers):
        if one == len(first):
            first.append(steps[at])
    return first, numbers
