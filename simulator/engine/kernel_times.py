"""Start and end of ops that run in order on a GPU whose speed changes.

Beside the same communication the ops of a block last as long every time. Their times are therefore worked out once,
counted from 0, and shifted to where a run stands; they are worked out anew only where the host is late.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simulator.arrays import Floats
from simulator.timeline import Template, play


class KernelTimes(NamedTuple):
    """Start and end of each op from ``first`` on, by number of op, counted from ``at_s``.

    ``start`` and ``end`` are ``starts_s`` and ``ends_s`` as lists, of which single values are read faster.
    ``resumed``: the first op had begun before.
    """

    first: int
    resumed: bool
    at_s: float
    starts_s: Floats
    ends_s: Floats
    start: Sequence[float]
    end: Sequence[float]

    def op_at(self, time_s: float) -> int:
        """Return the first op that ends after ``time_s``."""
        return bisect_right(self.end, time_s - self.at_s, self.first)

    def has_begun(self, op: int, time_s: float) -> bool:
        """Tell whether an op has begun before ``time_s``."""
        return (self.resumed and op == self.first) or self.at_s + self.start[op] < time_s


@dataclass(frozen=True, slots=True, eq=False)
class PacedTemplate:
    """A template whose ops run at a ``speed`` each, over full speed: their ``seconds``, starts and ends.

    Starts and ends are those of a host that is ahead, counted from 0. ``lag`` is how far the latest launch from an op
    on is behind them, counted from 0 too.
    """

    template: Template
    speed: Sequence[float]
    seconds: Floats
    starts_s: Floats
    ends_s: Floats
    start: Sequence[float]
    end: Sequence[float]
    lag: Sequence[float]

    @classmethod
    def from_speeds(cls, template: Template, speed: Floats) -> PacedTemplate:
        """Work out when the ops of ``template`` start and end at these speeds."""
        seconds = template.work_s / speed
        ends_s = np.cumsum(seconds)
        starts_s = ends_s - seconds
        lag = np.maximum.accumulate((template.launched_s - starts_s)[::-1])[::-1].tolist()
        lists = speed.tolist(), seconds, starts_s, ends_s, starts_s.tolist(), ends_s.tolist()
        return cls(template, *lists, [*lag, -math.inf])

    def times(self, host_s: float, first: int, left_s: float | None, now: float) -> KernelTimes:
        """Return the times of the ops from ``first`` on, from ``now`` on.

        The host launches the template from ``host_s`` on. ``left_s`` is what is left of the first op at full speed,
        where it has begun.
        """
        resumed = left_s is not None
        if left_s is None:
            at_s, lag = now - self.start[first], self.lag[first]
        else:
            at_s, lag = now + left_s / self.speed[first] - self.end[first], self.lag[first + 1]
        if host_s + lag <= at_s:
            return KernelTimes(first, resumed, at_s, self.starts_s, self.ends_s, self.start, self.end)
        starts_s, ends_s, work = np.empty_like(self.starts_s), np.empty_like(self.ends_s), self.seconds[first:]
        if left_s is not None:
            work = np.concatenate(([left_s / self.speed[first]], work[1:]))
        starts_s[first:], ends_s[first:] = play(work, host_s + self.template.launched_s[first:], now)
        return KernelTimes(first, resumed, 0.0, starts_s, ends_s, starts_s.tolist(), ends_s.tolist())


def joined_times(history: Sequence[KernelTimes]) -> tuple[Floats, Floats]:
    """Return start and end of every op, where each of ``history`` held until the next began."""
    starts_s, ends_s = np.empty_like(history[0].starts_s), np.empty_like(history[0].ends_s)
    for times in history:
        begun_since = slice(times.first + times.resumed, None)
        starts_s[begun_since] = times.starts_s[begun_since] + times.at_s
        ends_s[times.first :] = times.ends_s[times.first :] + times.at_s
    return starts_s, ends_s
