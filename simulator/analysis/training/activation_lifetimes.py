"""Lifetimes of activations: which spans save, swap and release them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from simulator.analysis.training.static_memory import StaticMemory
from simulator.arrays import Bools, Ints, inverse, run_starts
from simulator.models import by_part
from simulator.timeline import Timeline

#: Effect of a pass on the activations of its micro-batch: F saves them; I begins to swap and has swapped them for
#: inputs and output gradients; B and W release them.
ActivationEffect = Literal["save", "begin swap", "swap", "release"]
EFFECTS: tuple[ActivationEffect, ...] = ("save", "begin swap", "swap", "release")
#: Letter of a pass -> places in `EFFECTS` of its effect when it starts, and when it ends; -1: none.
_EFFECTS = {"F": (0, -1), "I": (1, 2), "B": (-1, 3), "W": (-1, 3)}


class ActivationEvent(NamedTuple):
    """Start or end of a span with its effect on the activations of ``parts`` (indices in the span's stage)."""

    effect: ActivationEffect
    parts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ActivationEvents:
    """Events of starts and ends of a rank's spans: the place of each in ``kinds``, -1 where it has no effect."""

    place: Ints
    kinds: tuple[ActivationEvent, ...]

    @property
    def are_there(self) -> Bools:
        """True of starts and ends that have an effect."""
        there: Bools = self.place >= 0
        return there

    def at(self, entries: Ints) -> list[ActivationEvent | None]:
        """Return the events of some starts and ends."""
        kinds = (*self.kinds, None)  # which is the place -1
        return [kinds[place] for place in self.place[entries].tolist()]


def activation_events(timeline: Timeline, spans: Ints, begins: Ints, static: StaticMemory) -> ActivationEvents:
    """Return the events of one rank: of each of its ``spans`` that starts (``begins`` is 1) or ends (0).

    Where passes are cut by part, each piece has an event of its own for its parts. A piece may be several spans: it
    begins with the first and ends with the last.
    """
    letter = np.full(len(spans), -1, dtype=np.int64)
    for number, name in enumerate(_EFFECTS):
        letter[timeline.phase[spans] == name] = number
    letter[~np.isin(timeline.stage[spans], list(static.parts))] = -1
    start, end = (np.flatnonzero((letter >= 0) & (begins == side)) for side in (1, 0))
    start, end = start[np.argsort(spans[start])], end[np.argsort(spans[end])]
    order = np.lexsort((spans[start], timeline.end_s[spans[start]], timeline.start_s[spans[start]]))
    start, end = start[order], end[order]  # of each span, in order
    span = spans[start]
    stage, microbatch = timeline.stage[span], timeline.microbatch[span]
    passes = _numbered(letter[start], stage, microbatch)
    pieces = _numbered(passes, timeline.part_code[span]) if static.passes_by_part else passes
    _, first = np.unique(pieces, return_index=True)
    last = len(pieces) - 1 - np.unique(pieces[::-1], return_index=True)[1]
    by_start = np.argsort(first)
    first, last = first[by_start], last[by_start]
    kinds: dict[tuple[int, int, int, int], int] = {}
    events: list[ActivationEvent] = []
    place = np.full(len(spans), -1, dtype=np.int64)
    columns = letter[start][first], stage[first], _places_in_runs(passes[first]), start[first], end[last]
    names = tuple(_EFFECTS)
    for code, at_stage, piece, starts, ends in zip(*(column.tolist() for column in columns), strict=True):
        name, parts = names[code], static.parts[at_stage]
        for effect, entry in zip(_EFFECTS[name], (starts, ends), strict=True):
            if effect < 0:
                continue
            key = effect, code, at_stage, piece
            if key not in kinds:
                kinds[key] = len(events)
                group = by_part(parts, name)[piece] if static.passes_by_part else tuple(range(len(parts)))
                events.append(ActivationEvent(EFFECTS[effect], group))
            place[entry] = kinds[key]
    return ActivationEvents(place, tuple(events))


def _numbered(*columns: Ints) -> Ints:
    """Return a number of each row of some columns; equal rows have equal ones."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        low = int(column.min(initial=0))
        number = number * (int(column.max(initial=0)) - low + 1) + column - low
    return number


def _places_in_runs(values: Ints) -> Ints:
    """Return how many equal values stand before each.

    >>> _places_in_runs(np.array([7, 3, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(values, kind="stable")
    starts = run_starts(values[order])
    counts = np.diff(starts, append=len(values))
    places: Ints = (np.arange(len(values)) - np.repeat(starts, counts))[inverse(order)]
    return places
