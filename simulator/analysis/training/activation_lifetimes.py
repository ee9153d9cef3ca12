"""Where passes begin to hold activations, turn them into what weight gradients need, and give them back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.analysis.training.static_memory import Holdings
from simulator.models import by_part
from simulator.timeline import Ints, Timeline

#: What a pass does to its micro-batch's activations: it takes them (F), begins to turn them and has turned them into
#: inputs and output gradients (I), or gives them back (B, W).
Turn = Literal["takes", "begins", "turns", "gives"]
#: Letter -> what its pass does when it starts, and when it ends.
_TURNS: dict[str, tuple[Turn | None, Turn | None]] = {
    "F": ("takes", None),
    "I": ("begins", "turns"),
    "B": (None, "gives"),
    "W": (None, "gives"),
}


class Turning(NamedTuple):
    """What the start or the end of a span does to the activations of ``parts``, by index, of its stage."""

    turn: Turn
    parts: tuple[int, ...]


def turns(timeline: Timeline, spans: Ints, holdings: Holdings) -> dict[tuple[int, int], Turning]:
    """(span, whether it starts) -> what that does, of one rank's ``spans`` of stages whose parts are known; a pass may
    be cut into several, of which each has parts of its own where activations come and go by part."""
    own = np.unique(spans)
    own = own[np.isin(timeline.phase[own], list(_TURNS)) & np.isin(timeline.stage[own], list(holdings.parts))]
    own = own[np.lexsort((own, timeline.end_s[own], timeline.start_s[own]))]
    passes: dict[tuple[str, int, int], list[int]] = {}
    columns = (timeline.phase[own].tolist(), timeline.stage[own].tolist(), timeline.microbatch[own].tolist())
    for span, phase, stage, microbatch in zip(own.tolist(), *columns, strict=True):
        passes.setdefault((phase, stage, microbatch), []).append(span)
    chosen: dict[tuple[int, int], Turning] = {}
    for (phase, stage, _), ordered in passes.items():
        parts = holdings.parts[stage]
        pieces = {"": ordered}
        groups = [tuple(range(len(parts)))]
        if holdings.by_part:
            pieces = {}
            for span in ordered:
                pieces.setdefault(timeline.parts[span], []).append(span)
            groups = by_part(parts, phase)
        for piece, group in zip(pieces.values(), groups, strict=True):
            for span, starts, turn in zip((piece[0], piece[-1]), (1, 0), _TURNS[phase], strict=True):
                if turn is not None:
                    chosen[span, starts] = Turning(turn, group)
    return chosen


def among(turning: Iterable[tuple[int, int]], spans: Ints, begins: Ints) -> NDArray[np.bool_]:
    """Which starts (``begins``) and ends of ``spans`` are among those that turn something."""
    return np.isin(2 * spans + begins, [2 * span + starts for span, starts in turning])
