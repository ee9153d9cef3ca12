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


class _PassEffects(NamedTuple):
    """Effects of a piece of a pass when it starts, and when it ends."""

    at_start: ActivationEffect | None
    at_end: ActivationEffect | None


_EFFECTS = {
    "F": _PassEffects("save", None),
    "I": _PassEffects("begin swap", "swap"),
    "B": _PassEffects(None, "release"),
    "W": _PassEffects(None, "release"),
}
_LETTERS = tuple(_EFFECTS)


class _Pieces(NamedTuple):
    """Pieces of passes of one rank in the order in which they start, a row of each column for a piece.

    ``letter``: place of the pass's letter in `_LETTERS`. ``stage``: that of the pass. ``pass_number``: equal for pieces
    of one pass. ``start``, ``end``: entries of the curve with which the piece starts, and ends.
    """

    letter: Ints
    stage: Ints
    pass_number: Ints
    start: Ints
    end: Ints


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
    begins with the first and ends with the last. Raises `ValueError` where a pass has other pieces than its parts say.
    """
    pieces = _pieces(timeline, spans, begins, static)
    number, count = _among_equals(pieces.pass_number)
    place = np.full(len(spans), -1, dtype=np.int64)
    kinds: list[ActivationEvent] = []
    places_of: dict[tuple[int, int, int, int], tuple[int, int]] = {}
    columns = pieces.letter, pieces.stage, number, count, pieces.start, pieces.end
    for letter, stage, which, n_pieces, start, end in zip(*(column.tolist() for column in columns), strict=True):
        kind = letter, stage, which, n_pieces
        if kind not in places_of:
            groups = _groups(static, stage, _LETTERS[letter])
            if n_pieces != len(groups):
                raise ValueError(f"{n_pieces} pieces of a pass {_LETTERS[letter]} of stage {stage}, not {len(groups)}")
            places_of[kind] = _places(kinds, _EFFECTS[_LETTERS[letter]], groups[which])
        place[start], place[end] = places_of[kind]
    return ActivationEvents(place, tuple(kinds))


def _groups(static: StaticMemory, stage: int, letter: str) -> list[tuple[int, ...]]:
    """Return the parts of each piece of a pass through a stage: indices in the stage."""
    parts = static.parts[stage]
    return by_part(parts, letter) if static.passes_by_part else [tuple(range(len(parts)))]


def _places(kinds: list[ActivationEvent], effects: _PassEffects, parts: tuple[int, ...]) -> tuple[int, int]:
    """Add the events of a piece of ``parts`` to ``kinds``; return the places of its start and its end, -1 for none."""
    places = [-1, -1]
    for side, effect in enumerate(effects):
        if effect is not None:
            places[side] = len(kinds)
            kinds.append(ActivationEvent(effect, parts))
    return places[0], places[1]


def _pieces(timeline: Timeline, spans: Ints, begins: Ints, static: StaticMemory) -> _Pieces:
    """Return the pieces of passes among the starts and ends of ``spans``; whole passes where they are not cut by part.

    Of a piece that is several spans it is the start of the first and the end of the last.
    """
    letter = np.full(len(spans), -1, dtype=np.int64)
    for number, name in enumerate(_LETTERS):
        letter[timeline.phase[spans] == name] = number
    letter[~np.isin(timeline.stage[spans], list(static.parts))] = -1
    start, end = (np.flatnonzero((letter >= 0) & (begins == side)) for side in (1, 0))
    start, end = start[np.argsort(spans[start])], end[np.argsort(spans[end])]
    order = np.lexsort((spans[start], timeline.end_s[spans[start]], timeline.start_s[spans[start]]))
    start, end = start[order], end[order]  # of each span, in order
    span = spans[start]
    pass_number = _row_numbers(letter[start], timeline.stage[span], timeline.microbatch[span])
    piece = _row_numbers(pass_number, timeline.part_code[span]) if static.passes_by_part else pass_number
    _, first = np.unique(piece, return_index=True)
    last = len(piece) - 1 - np.unique(piece[::-1], return_index=True)[1]
    by_start = np.argsort(first)
    first, last = first[by_start], last[by_start]
    return _Pieces(letter[start[first]], timeline.stage[span[first]], pass_number[first], start[first], end[last])


def _row_numbers(*columns: Ints) -> Ints:
    """Return a number of each row of some columns; equal rows have equal ones."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        low = int(column.min(initial=0))
        number = number * (int(column.max(initial=0)) - low + 1) + column - low
    return number


def _among_equals(values: Ints) -> tuple[Ints, Ints]:
    """Return how many equal values stand before each, and how many there are in all.

    >>> [column.tolist() for column in _among_equals(np.array([7, 3, 7, 7]))]
    [[0, 0, 1, 2], [3, 1, 3, 3]]
    """
    order = np.argsort(values, kind="stable")
    starts = run_starts(values[order])
    lengths = np.diff(starts, append=len(values))
    place = inverse(order)
    before: Ints = (np.arange(len(values)) - np.repeat(starts, lengths))[place]
    count: Ints = np.repeat(lengths, lengths)[place]
    return before, count
