"""Templates: the rows that spans of one kind expand to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Floats, Ints


def covered_s(start: Floats, end: Floats) -> float:
    """Return the length of the union of the intervals from ``start`` to ``end``."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, latest = start[order], np.maximum.accumulate(end[order])
    gaps = np.maximum(start[1:] - latest[:-1], 0.0)
    return float(latest[-1] - start[0] - gaps.sum())


#: Uses of a rank's time, in the priority of the time breakdown.
COMPUTATION = ("compute", "recompute", "optimizer")
COMMUNICATION = ("tp", "cp", "ep", "pp", "dp", "offload")
CATEGORIES = (*COMPUTATION, *COMMUNICATION)
#: Index in `CATEGORIES` of the first kind of communication.
FIRST_COMMUNICATION = len(COMPUTATION)


@dataclass(frozen=True)
class Template:
    """Rows that every span of one kind expands to.

    Arrays have one entry per op. ``work_s`` is its length at full speed; ``category`` indexes `CATEGORIES`;
    ``lanes`` are the lanes of the rows (an in-line collective has its own). ``launched_s`` is when the host has
    launched the op, counted from the host's start on the span.

    ``beside``: op -> n, for a collective that goes on beside the n kernels after it. The op after them waits for both.
    All others run in order.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    phases: tuple[str, ...]
    lanes: tuple[str, ...]
    category: Ints
    work_s: Floats
    launched_s: Floats
    nbytes: Floats
    flops: Floats
    beside: Mapping[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    def select_rows(self, keep: NDArray[np.bool_]) -> Template:
        """Return the template of the rows that ``keep`` tells, one entry per row."""
        number = np.cumsum(keep) - 1
        beside = {op: int(keep[op + 1 : op + 1 + n].sum()) for op, n in self.beside.items() if keep[op]}

        def texts(column: tuple[str, ...]) -> tuple[str, ...]:
            return tuple([column[row] for row in np.flatnonzero(keep)])

        return Template(
            names=texts(self.names),
            kinds=texts(self.kinds),
            phases=texts(self.phases),
            lanes=texts(self.lanes),
            category=self.category[keep],
            work_s=self.work_s[keep],
            launched_s=self.launched_s[keep],
            nbytes=self.nbytes[keep],
            flops=self.flops[keep],
            beside={int(number[op]): n for op, n in beside.items() if n},
        )

    @cached_property
    def start_s(self) -> Floats:
        """Start of each op at full speed, seconds from the span's start."""
        return self._full_speed[0]

    @cached_property
    def end_s(self) -> Floats:
        """End of each op at full speed, seconds from the span's start."""
        return self._full_speed[1]

    @cached_property
    def _full_speed(self) -> tuple[Floats, Floats]:
        if self.beside:
            return _play_beside(self, [0.0] * len(self), 0.0, None)
        ends = np.cumsum(self.work_s)
        return np.concatenate(([0.0], ends[:-1])), ends

    def play(self, launched: Floats, start: float) -> tuple[Floats, Floats]:
        """Return start and end of each op: none begins before ``start``, nor before the host has ``launched`` it."""
        if not self.beside:
            return play(self.work_s, launched, start)
        # Delay of the latest launch to come, against full speed.
        lag = np.maximum.accumulate((launched - self.start_s)[::-1])[::-1]
        return _play_beside(self, launched.tolist(), start, lag.tolist())

    @cached_property
    def length_s(self) -> float:
        """Length of a span at full speed."""
        return float(self.end_s.max()) if len(self) else 0.0

    @cached_property
    def rest_s(self) -> Floats:
        """Seconds at full speed from the start of each op to the end of the span, if ops before it take no time."""
        rest = np.cumsum(self.work_s[::-1])[::-1]
        if self.beside:
            after = [0.0] * (len(self) + 1)
            for op in range(len(self) - 1, -1, -1):
                n = self.beside.get(op, 0)
                after[op] = max(float(self.work_s[op]) + after[op + n + 1], after[op + 1] if n else 0.0)
            rest = np.array(after[:-1])
        return rest

    def exposed(self, start: Floats, end: Floats) -> Floats:
        """Return the seconds of each op in which no kernel runs beside it, given the ops' ``start`` and ``end``."""
        seconds = end - start
        for op, n in self.beside.items():
            kernels = slice(op + 1, op + 1 + n)
            common = np.minimum(end[kernels], end[op]) - np.maximum(start[kernels], start[op])
            seconds[op] -= np.maximum(common, 0.0).sum()
        return seconds

    @cached_property
    def exposed_s(self) -> Floats:
        """Seconds of each op at full speed in which no kernel runs beside it; they add up to the length."""
        return self.exposed(self.start_s, self.end_s) if self.beside else self.work_s

    @cached_property
    def by_category(self) -> Floats:
        """Exposed seconds at full speed in each of `CATEGORIES`."""
        return np.bincount(self.category, weights=self.exposed_s, minlength=len(CATEGORIES)).astype(np.float64)


def play(work: Floats, launched: Floats, start: float) -> tuple[Floats, Floats]:
    """Return start and end of ops run in order from ``start``, none before its launch: a running maximum."""
    done = np.cumsum(work)
    ends = done + np.maximum.accumulate(np.maximum(launched, start) - (done - work))
    return ends - work, ends


def _play_beside(
    template: Template, launched: list[float], start: float, lag: list[float] | None
) -> tuple[Floats, Floats]:
    """Play a template op by op; once the host is ahead for good (``lag``), the remaining ops run at full speed."""
    times: list[tuple[float, float]] = []
    now = until = start
    left = 0
    for op, (seconds, ready) in enumerate(zip(template.work_s.tolist(), launched, strict=True)):
        if lag is not None and not left and lag[op] <= (shift := now - float(template.start_s[op])):
            done = np.array(times).reshape(-1, 2)
            rest = np.stack((template.start_s[op:], template.end_s[op:]), axis=1) + shift
            starts, ends = np.concatenate((done, rest)).T
            return starts, ends
        begin = max(now, ready)
        times.append((begin, begin + seconds))
        if op in template.beside:
            now, until, left = begin, begin + seconds, template.beside[op]
            continue
        now = begin + seconds
        if left:
            left -= 1
            now = now if left else max(now, until)
    starts, ends = np.array(times).reshape(-1, 2).T
    return starts, ends


def row_counts(templates: Sequence[Template]) -> Ints:
    """Return how many rows a span of each template has."""
    return np.array([len(template) for template in templates], dtype=np.int64)
