"""Changes of a replay: factors on the times of classes, ranks, hosts and exchanges, and how streams overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from simulator.traces.classes import EXCHANGES
from simulator.traces.trace import TracedCollective

#: ``recorded``: streams run beside each other as they did. ``none``: all streams of a rank are one, in the order of
#: launches. ``full``: no other op waits for communication, a bound on what hiding it can bring.
StreamOverlap = Literal["recorded", "none", "full"]
OVERLAPS: tuple[StreamOverlap, ...] = ("recorded", "none", "full")


def _unchanged(collective: TracedCollective) -> float:
    return 1.0


@dataclass(frozen=True)
class WhatIf:
    """Factors on recorded times, all 1 where they are not listed.

    ``classes``: class of kernels -> factor. ``ranks``: rank -> factor on its kernels, without communication.
    ``host``: factor on the time between calls of all hosts. ``exchange``: factor on a collective once all have come.
    """

    classes: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[int, float] = field(default_factory=dict)
    host: float = 1.0
    exchange: Callable[[TracedCollective], float] = _unchanged
    overlap: StreamOverlap = "recorded"

    def factor(self, rank: int, kernel_class: str, collective: TracedCollective | None) -> float:
        """Return the factor on the time of an op."""
        factor = self.classes.get(kernel_class, 1.0)
        if kernel_class in EXCHANGES:
            return factor * (self.exchange(collective) if collective is not None else 1.0)
        return factor * self.ranks.get(rank, 1.0)


AS_RECORDED = WhatIf()
