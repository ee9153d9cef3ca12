"""Where passes begin to hold activations, turn them into what weight gradients need, and give them back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from simulator.model import Part
from simulator.timeline import Timeline

#: What a pass does to its micro-batch's activations: it takes them (F), begins to turn them and has turned them into
#: inputs and output gradients (I), or gives them back (B, W).
Turn = Literal["takes", "begins", "turns", "gives"]
#: Letter -> what its pass does when its first piece starts, and when its last one ends.
_TURNS: dict[str, tuple[Turn | None, Turn | None]] = {
    "F": ("takes", None),
    "I": ("begins", "turns"),
    "B": (None, "gives"),
    "W": (None, "gives"),
}


def turns(
    timeline: Timeline, spans: Iterable[int], parts: Mapping[int, tuple[Part, ...]]
) -> dict[tuple[int, int], Turn]:
    """(span, whether it starts) -> what that does, of one rank's ``spans`` of stages with known ``parts``; a pass may
    be cut into several."""
    pieces: dict[tuple[str, int, int], list[int]] = {}
    for span in dict.fromkeys(spans):
        phase, stage = str(timeline.phase[span]), int(timeline.stage[span])
        if phase in _TURNS and stage in parts:
            pieces.setdefault((phase, stage, int(timeline.microbatch[span])), []).append(span)
    chosen: dict[tuple[int, int], Turn] = {}
    for (phase, _, _), of_pass in pieces.items():
        ordered = sorted(of_pass, key=lambda span: (timeline.start_s[span], timeline.end_s[span], span))
        for span, starts, turn in zip((ordered[0], ordered[-1]), (1, 0), _TURNS[phase], strict=True):
            if turn is not None:
                chosen[span, starts] = turn
    return chosen
