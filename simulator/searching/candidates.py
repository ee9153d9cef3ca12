"""Candidates of a search: legal layouts with their bounds, in the order in which they are worth simulating."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from simulator.errors import InputError, each, in_one_line
from simulator.searching.bounds import LayoutBound, LayoutBounds
from simulator.searching.space import LayoutSpace

#: Refused layouts of one key that are kept as examples.
_MOST_EXAMPLES = 3


@dataclass(frozen=True)
class Candidate:
    """A legal layout: its keys with their values, and its bounds.

    ``number``: its place in the space. ``is_own``: it is what the file says.
    """

    number: int
    changes: Mapping[str, Any]
    bound: LayoutBound
    is_own: bool = False


@dataclass
class Refusals:
    """Layouts that rules refuse: by key how many, and what is said of some."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[tuple[Mapping[str, Any], str]]] = field(default_factory=dict)

    def add(self, changes: Mapping[str, Any], error: InputError) -> None:
        """Count a layout by the first rule that refuses it."""
        first = each(error)[0][0]
        key = str(first.key)
        self.counts[key] += 1
        kept = self.examples.setdefault(key, [])
        if len(kept) < _MOST_EXAMPLES:
            kept.append((changes, in_one_line(first)))


@dataclass(frozen=True)
class BoundedSpace:
    """The legal layouts of a space with their bounds.

    ``fitting``: those that may fit, the one with the least bound first. ``too_large``: those that need more memory than
    GPUs have, the one that lacks least first. ``complete``: all layouts were looked at.
    """

    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refusals: Refusals
    capacity_bytes: float
    complete: bool

    @property
    def n_legal(self) -> int:
        """Layouts that rules allow."""
        return len(self.fitting) + len(self.too_large)


#: A space of which arithmetic leaves nothing.
NO_LAYOUTS = BoundedSpace((), (), Refusals(), 0.0, True)


def bounded_space(
    space: LayoutSpace,
    bounds: LayoutBounds,
    watch: Callable[[int], object],
    is_over: Callable[[], bool],
) -> BoundedSpace:
    """Return the layouts of a space with their bounds; ``watch`` is told how many, and ``is_over`` ends it early."""
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    refusals, complete, capacity_bytes = Refusals(), True, bounds.capacity_bytes
    for number, changes in enumerate(space.layouts()):
        if is_over():
            complete = False
            break
        watch(number + 1)
        try:
            workload = space.variants.variant(changes)
        except InputError as error:
            refusals.add(changes, error)
            continue
        base = space.variants.workload
        is_own = workload.parallelism == base.parallelism and workload.training == base.training
        candidate = Candidate(number, changes, bounds.bound(changes, workload), is_own)
        (fitting if candidate.bound.memory_bytes <= capacity_bytes else too_large).append(candidate)
    fitting.sort(key=lambda one: (one.bound.step_time_s, one.number))
    too_large.sort(key=lambda one: (one.bound.memory_bytes, one.number))
    return BoundedSpace(tuple(fitting), tuple(too_large), refusals, capacity_bytes, complete)
