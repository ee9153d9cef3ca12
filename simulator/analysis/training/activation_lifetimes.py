"""Lifetimes of activations: which spans save, swap and release them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from simulator.analysis.training.static_memory import StaticMemory
from simulator.arrays import Bools, Ints
from simulator.models import by_part
from simulator.timeline import Timeline

#: Effect of a pass on the activations of its micro-batch: F saves them; I begins to swap and has swapped them for
#: inputs and output gradients; B and W release them.
ActivationEffect = Literal["save", "begin swap", "swap", "release"]
#: Letter of a pass -> its effect when it starts, and when it ends.
_EFFECTS: dict[str, tuple[ActivationEffect | None, ActivationEffect | None]] = {
    "F": ("save", None),
    "I": ("begin swap", "swap"),
    "B": (None, "release"),
    "W": (None, "release"),
}


class ActivationEvent(NamedTuple):
    """Start or end of a span with its effect on the activations of ``parts`` (indices in the span's stage)."""

    effect: ActivationEffect
    parts: tuple[int, ...]


#: (Span, 1 for its start or 0 for its end) -> event.
ActivationEvents = dict[tuple[int, int], ActivationEvent]


def activation_events(timeline: Timeline, spans: Ints, static: StaticMemory) -> ActivationEvents:
    """Return the events of one rank's ``spans``: (span, 1 for its start or 0 for its end) -> event.

    Where passes are cut by part, each piece has an event of its own for its parts.
    """
    passes = np.unique(spans)
    has_effect = np.isin(timeline.phase[passes], list(_EFFECTS)) & np.isin(timeline.stage[passes], list(static.parts))
    passes = passes[has_effect]
    passes = passes[np.lexsort((passes, timeline.end_s[passes], timeline.start_s[passes]))]
    pieces_of: dict[tuple[str, int, int], list[int]] = {}
    columns = (timeline.phase[passes].tolist(), timeline.stage[passes].tolist(), timeline.microbatch[passes].tolist())
    for span, phase, stage, microbatch in zip(passes.tolist(), *columns, strict=True):
        pieces_of.setdefault((phase, stage, microbatch), []).append(span)
    events: ActivationEvents = {}
    for (phase, stage, _), ordered in pieces_of.items():
        parts = static.parts[stage]
        pieces = {"": ordered}
        groups = [tuple(range(len(parts)))]
        if static.passes_by_part:
            pieces = {}
            for span in ordered:
                pieces.setdefault(timeline.parts[span], []).append(span)
            groups = by_part(parts, phase)
        for piece, group in zip(pieces.values(), groups, strict=True):
            for span, starts, effect in zip((piece[0], piece[-1]), (1, 0), _EFFECTS[phase], strict=True):
                if effect is not None:
                    events[span, starts] = ActivationEvent(effect, group)
    return events


def have_events(events: Iterable[tuple[int, int]], spans: Ints, begins: Ints) -> Bools:
    """Tell which starts (``begins`` is 1) and ends (0) of ``spans`` are among ``events``."""
    return np.isin(2 * spans + begins, [2 * span + starts for span, starts in events])
