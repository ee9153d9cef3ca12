"""Ops that run in order on a GPU whose speed changes: when each starts and ends.

Beside the same communication the ops of a block last as long every time. So their times are worked out once, counted
from 0, and shifted to where a run stands; they are worked out anew where the host is late.
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


class Course(NamedTuple):
    """Of the ops from ``first`` on, ``starts`` and ``ends``, by number of op, counted from ``at_s``; each also as a
    list, of which one is read sooner. ``resumed``: the first had begun before."""

    first: int
    resumed: bool
    at_s: float
    starts: Floats
    ends: Floats
    start: Sequence[float]
    end: Sequence[float]

    def under_way(self, now: float) -> int:
        """The first op that ends after ``now``."""
        return bisect_right(self.end, now - self.at_s, self.first)

    def begun(self, op: int, now: float) -> bool:
        """Whether an op has begun before ``now``."""
        return (self.resumed and op == self.first) or self.at_s + self.start[op] < now


@dataclass(frozen=True, slots=True, eq=False)
class Pace:
    """A template's ops at a ``speed`` each: their ``seconds``, and when they start and end if the host is ahead,
    counted from 0. ``lag``: by how much the latest of the launches from an op on is behind that, counted from 0 too."""

    template: Template
    speed: Sequence[float]
    seconds: Floats
    starts: Floats
    ends: Floats
    start: Sequence[float]
    end: Sequence[float]
    lag: Sequence[float]

    @classmethod
    def of(cls, template: Template, speed: Floats) -> Pace:
        seconds = template.work_s / speed
        ends = np.cumsum(seconds)
        starts = ends - seconds
        lag = np.maximum.accumulate((template.launch_s - starts)[::-1])[::-1].tolist()
        return cls(template, speed.tolist(), seconds, starts, ends, starts.tolist(), ends.tolist(), [*lag, -math.inf])

    def course(self, host_s: float, first: int, left_s: float | None, now: float) -> Course:
        """From ``now`` on, of ops that the host launches from ``host_s`` on; ``left_s``: what is left of the first one
        at full speed, where it has begun."""
        resumed = left_s is not None
        if left_s is None:
            at_s, lag = now - self.start[first], self.lag[first]
        else:
            at_s, lag = now + left_s / self.speed[first] - self.end[first], self.lag[first + 1]
        if host_s + lag <= at_s:
            return Course(first, resumed, at_s, self.starts, self.ends, self.start, self.end)
        starts, ends, work = np.empty_like(self.starts), np.empty_like(self.ends), self.seconds[first:]
        if left_s is not None:
            work = np.concatenate(([left_s / self.speed[first]], work[1:]))
        starts[first:], ends[first:] = play(work, host_s + self.template.launch_s[first:], now)
        return Course(first, resumed, 0.0, starts, ends, starts.tolist(), ends.tolist())


def times_of(courses: Sequence[Course]) -> tuple[Floats, Floats]:
    """Start and end of every op, of which each course was followed until the next began."""
    starts, ends = np.empty_like(courses[0].starts), np.empty_like(courses[0].ends)
    for course in courses:
        new = slice(course.first + course.resumed, None)
        starts[new] = course.starts[new] + course.at_s
        ends[course.first :] = course.ends[course.first :] + course.at_s
    return starts, ends
