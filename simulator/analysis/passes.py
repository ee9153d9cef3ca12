"""Which spans of a rank begin to hold activations, turn them into what weight gradients need, and give them back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from simulator.model import Part
from simulator.timeline import Timeline

#: What a pass does to its micro-batch's activations: at its start it takes them (F), at its end it turns them into
#: inputs and output gradients (I) or gives them back (B, W).
Turn = Literal["takes", "turns", "gives"]
_TURN: dict[str, Turn] = {"F": "takes", "I": "turns", "B": "gives", "W": "gives"}


def turns(timeline: Timeline, spans: Iterable[int], parts: Mapping[int, tuple[Part, ...]]) -> dict[int, Turn]:
    """Span -> what it does, of one rank's ``spans`` of stages with known ``parts``; of a pass that is cut into pieces
    the first one takes, and the last one turns or gives."""
    pieces: dict[tuple[str, int, int], list[int]] = {}
    for span in dict.fromkeys(spans):
        phase, stage = str(timeline.phase[span]), int(timeline.stage[span])
        if phase in _TURN and stage in parts:
            pieces.setdefault((phase, stage, int(timeline.microbatch[span])), []).append(span)
    chosen: dict[int, Turn] = {}
    for (phase, _, _), of_pass in pieces.items():
        ordered = sorted(of_pass, key=lambda span: (timeline.start_s[span], timeline.end_s[span], span))
        chosen[ordered[0 if phase == "F" else -1]] = _TURN[phase]
    return chosen
