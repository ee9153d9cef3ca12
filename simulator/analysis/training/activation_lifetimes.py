"""Lifetimes of activations: which spans save, swap and release them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from simulator.analysis.time.memory_curve import MemoryHistory, joined_entries
from simulator.analysis.training.stage_numbers import StageNumbers
from simulator.analysis.training.static_memory import StaticMemory
from simulator.arrays import Bools, Ints, inverse, row_numbers, run_starts
from simulator.models import Part, by_part
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
    """Pieces of passes of each rank in the order in which they start, a row of each column for a piece.

    ``owner``: place of the rank among all. ``letter``: place of the pass's letter in `_LETTERS`. ``stage``: that of the
    pass. ``pass_number``: equal for pieces of one pass. ``start``, ``end``: entries of all curves, one behind the
    other, with which the piece starts, and ends.
    """

    owner: Ints
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


def activation_events(timeline: Timeline, curve: MemoryHistory, static: StaticMemory) -> ActivationEvents:
    """Return the events of one rank; see `events_of_ranks`."""
    return events_of_ranks(timeline, [curve], [static])[0]


def events_of_ranks(
    timeline: Timeline, curves: Sequence[MemoryHistory], static: Sequence[StaticMemory]
) -> list[ActivationEvents]:
    """Return the events of some ranks: of each start and end of a span in their ``curves``.

    Where passes are cut by part, each piece has an event of its own for its parts. A piece may be several spans: it
    begins with the first and ends with the last. Raises `ValueError` where a pass has other pieces than its parts say.
    """
    pieces = _pieces(timeline, curves, static)
    number, count = _among_equals(pieces.pass_number)
    starts = np.cumsum([0, *[len(curve.span) for curve in curves]])
    place = np.full(starts[-1], -1, dtype=np.int64)
    numbered = StageNumbers(static)
    is_cut = np.array([one.passes_by_part for one in static], dtype=np.int64)[pieces.owner]
    columns = numbered.numbers_at(pieces.owner, pieces.stage), is_cut, pieces.letter, number, count
    _, first, kind_of_piece = np.unique(row_numbers(*columns), return_index=True, return_inverse=True)
    kinds: dict[ActivationEvent, int] = {}
    places = np.full((len(first), 2), -1)
    for kind, (stage, is_cut_there, letter, which, n_pieces) in enumerate(np.stack(columns)[:, first].T.tolist()):
        groups = _groups(numbered.parts[stage], _LETTERS[letter], is_cut=bool(is_cut_there))
        if n_pieces != len(groups):
            stage = int(pieces.stage[first[kind]])
            raise ValueError(f"{n_pieces} pieces of a pass {_LETTERS[letter]} of stage {stage}, not {len(groups)}")
        for side, effect in enumerate(_EFFECTS[_LETTERS[letter]]):
            if effect is not None:
                places[kind, side] = kinds.setdefault(ActivationEvent(effect, groups[which]), len(kinds))
    place[pieces.start], place[pieces.end] = places[kind_of_piece].T
    all_kinds = tuple(kinds)
    return [ActivationEvents(places_of_rank, all_kinds) for places_of_rank in np.split(place, starts[1:-1])]


def _groups(parts: tuple[Part, ...], letter: str, *, is_cut: bool) -> list[tuple[int, ...]]:
    """Return the parts of each piece of a pass through a stage of ``parts``: indices in the stage."""
    return by_part(parts, letter) if is_cut else [tuple(range(len(parts)))]


def _pieces(timeline: Timeline, curves: Sequence[MemoryHistory], static: Sequence[StaticMemory]) -> _Pieces:
    """Return the pieces of passes among the starts and ends of spans; whole passes where they are not cut by part.

    Of a piece that is several spans it is the start of the first and the end of the last.
    """
    owner, spans, begins = joined_entries(curves)
    letter = np.full(len(spans), -1, dtype=np.int64)
    phase, stage = timeline.phase[spans], timeline.stage[spans]
    for number, name in enumerate(_LETTERS):
        letter[phase == name] = number
    letter[StageNumbers(static).numbers_at(owner, stage) < 0] = -1
    start, end = (np.flatnonzero((letter >= 0) & (begins == side)) for side in (1, 0))
    start, end = start[np.argsort(spans[start])], end[np.argsort(spans[end])]
    order = np.lexsort((spans[start], timeline.end_s[spans[start]], timeline.start_s[spans[start]], owner[start]))
    start, end = start[order], end[order]  # of each span, in order
    span = spans[start]
    pass_number = row_numbers(owner[start], letter[start], timeline.stage[span], timeline.microbatch[span])
    is_cut = np.array([one.passes_by_part for one in static], dtype=np.bool_)[owner[start]]
    piece = row_numbers(pass_number, np.where(is_cut, timeline.part_code[span], 0)) if is_cut.any() else pass_number
    _, first = np.unique(piece, return_index=True)
    last = len(piece) - 1 - np.unique(piece[::-1], return_index=True)[1]
    by_start = np.argsort(first)
    first, last = first[by_start], last[by_start]
    pieces = start[first]
    return _Pieces(owner[pieces], letter[pieces], stage[pieces], pass_number[first], pieces, end[last])


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
