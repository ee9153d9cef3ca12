"""What the step's length is made of: the chain of operations, each released by the one before, that ends last."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import Any

import numpy as np

from simulator.program import COMPUTE_LANE
from simulator.timeline import CATEGORIES, FIRST_COMMUNICATION, Template, Timeline

_OWN_CLASS = ("recompute", "optimizer")
WAITING, LAUNCH = "waiting", "host launch"
#: What begins behind a kernel has looked for one for two of the engine's instants (`simulator.engine.rank.INSTANT_s`).
_AT_ONCE_s = 1e-11


def critical_path(timeline: Timeline, window: tuple[float, float] | None = None) -> list[dict[str, Any]]:
    """Seconds of the step by class of operation along its critical path, largest first; they sum to the step time.

    ``window``: what of the path counts (s), where ``timeline`` is of several steps; default: all of it.

    The walk starts at the span that ends last and goes back through whatever released each span: for a communication
    that waited for a partner, the partner's rank; else the span of the same rank that ended when this one began, on the
    same lane where there is one; for a communication that waited for SMs, the computation that goes on. Classes are
    kernel kinds (matmul, attention, norm ...), ``recompute``, ``optimizer``, ``tp communication`` and so on,
    ``host launch``, and ``waiting`` where nothing that was recorded explains a gap.
    """
    low, high = window or (0.0, timeline.length_s)
    seconds = _Walker(timeline, low, high).walk()
    step = high - low
    ranked = sorted(seconds.items(), key=lambda item: (-item[1], item[0]))
    return [{"class": name, "seconds": value, "share": value / step} for name, value in ranked if value > 0]


def op_class(category: int, kind: str) -> str:
    """The class that an op's seconds are counted in."""
    name = CATEGORIES[category]
    if category >= FIRST_COMMUNICATION:
        return f"{name} communication"
    return name if name in _OWN_CLASS else kind


class _Walker:
    """The state of one walk: spans sorted for look-up by end, and what has been visited."""

    def __init__(self, timeline: Timeline, low: float, high: float) -> None:
        self.timeline = timeline
        self.low, self.high = low, high
        self.tolerance = 1e-12 * timeline.length_s + _AT_ONCE_s
        self.visited: set[int] = set()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.compute = np.array([name == COMPUTE_LANE for name in timeline.lane_names], dtype=bool)[timeline.lane]
        # Among spans of a rank that end together, compute comes last and so is found first.
        order = np.lexsort((self.compute, timeline.end_s))
        self.by_end: dict[int, tuple[list[float], list[int]]] = {}
        for rank in timeline.ranks:
            spans = order[timeline.rank[order] == rank]
            self.by_end[rank] = (timeline.end_s[spans].tolist(), spans.tolist())
        first_category = np.array([int(t.category[0]) if len(t) else 0 for t in timeline.templates], dtype=np.int64)
        self.category = first_category[timeline.template]
        communicates = np.flatnonzero(self.category >= FIRST_COMMUNICATION)
        self.by_start = communicates[np.argsort(timeline.start_s[communicates], kind="stable")]
        self.starts = timeline.start_s[self.by_start].tolist()
        self.shares: dict[int, dict[str, float]] = {}

    def walk(self) -> dict[str, float]:
        timeline = self.timeline
        if not len(timeline.rank):
            return {}
        span = int(np.argmax(timeline.end_s))
        now = float(timeline.end_s[span])
        while True:
            self.visited.add(span)
            self._spend(span, now)
            now = float(timeline.start_s[span])
            last = self._last_member(span, now)
            self.visited.add(last)
            if timeline.posted_s[last] < timeline.launched_s[last]:
                self._count(LAUNCH, float(timeline.posted_s[last]), now)
                now = float(timeline.posted_s[last])
            if now <= self.low + self.tolerance:
                break
            released_by = self._released_by(last, now)
            if released_by is None:
                break
            gap = now - float(timeline.end_s[released_by])
            if gap > self.tolerance and (beside := self._under_way(last, now)) is not None:
                span = beside
                continue
            if gap > self.tolerance:
                self._count(WAITING, now - gap, now)
                now -= gap
            span = released_by
        if now > self.low + self.tolerance:
            self._count(WAITING, self.low, now)
        return dict(self.seconds)

    def _count(self, name: str, start: float, end: float) -> None:
        """What of an interval lies in the window."""
        self.seconds[name] += max(min(end, self.high) - max(start, self.low), 0.0)

    def _released_by(self, span: int, now: float) -> int | None:
        timeline = self.timeline
        rank = int(timeline.rank[span])
        if (
            span > 0
            and timeline.rank[span - 1] == rank
            and timeline.lane[span - 1] == timeline.lane[span]
            and timeline.end_s[span - 1] >= now - self.tolerance
            and span - 1 not in self.visited
        ):
            return span - 1
        ends, spans = self.by_end[rank]
        for index in range(bisect_right(ends, now + self.tolerance) - 1, -1, -1):
            if spans[index] not in self.visited:
                return spans[index]
        return None

    def _under_way(self, span: int, now: float) -> int | None:
        """For a communication that begins where nothing ends: the computation of its rank that goes on then, one of
        whose kernels has ended and given it SMs."""
        if self.category[span] < FIRST_COMMUNICATION or self.compute[span]:
            return None
        timeline = self.timeline
        first, after = np.searchsorted(timeline.rank, (timeline.rank[span], timeline.rank[span] + 1))
        own = np.flatnonzero(self.compute[first:after] & (timeline.start_s[first:after] < now - self.tolerance)) + first
        there = own[timeline.end_s[own] > now + self.tolerance]
        return int(there[0]) if len(there) and int(there[0]) not in self.visited else None

    def _last_member(self, span: int, now: float) -> int:
        """The span, or where it is one member's view of a communication, that of the last member to launch it."""
        timeline = self.timeline
        rank = int(timeline.rank[span])
        if self.category[span] < FIRST_COMMUNICATION or timeline.launched_s[span] >= now - self.tolerance:
            return span
        index = bisect_right(self.starts, now + self.tolerance) - 1
        while index >= 0 and self.starts[index] >= now - self.tolerance:
            other = int(self.by_start[index])
            if (
                timeline.rank[other] != rank
                and self.category[other] == self.category[span]
                and abs(timeline.end_s[other] - timeline.end_s[span]) <= self.tolerance
                and timeline.launched_s[other] >= now - self.tolerance
            ):
                return other
            index -= 1
        return span

    def _spend(self, span: int, until: float) -> None:
        """Count the span's time up to ``until`` among the classes of its ops."""
        timeline = self.timeline
        start = float(timeline.start_s[span])
        length = min(until, self.high) - max(start, self.low)
        if length <= 0:
            return
        if span in timeline.stretched:
            shares = self._stretched_shares(span, until)
        else:
            code = int(timeline.template[span])
            if code not in self.shares:
                self.shares[code] = _shares(timeline.templates[code])
            shares = self.shares[code]
        for name, share in shares.items():
            self.seconds[name] += share * length

    def _stretched_shares(self, span: int, until: float) -> dict[str, float]:
        template = self.timeline.templates[self.timeline.template[span]]
        start, end = self.timeline.stretched[span]
        spent = template.shown(np.minimum(start, until), np.minimum(end, until))
        length = until - float(self.timeline.start_s[span])
        shares = _by_class(template, spent / length)
        shares[LAUNCH] = max(1.0 - sum(shares.values()), 0.0)
        return shares


def _by_class(template: Template, values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for category, kind, value in zip(template.category.tolist(), template.kinds, values.tolist(), strict=True):
        name = op_class(category, kind)
        shares[name] = shares.get(name, 0.0) + value
    return shares


def _shares(template: Template) -> dict[str, float]:
    total = float(template.shown_s.sum())
    # What the network times has no work of its own; it is one op.
    return _by_class(template, template.shown_s / total if total else np.full(len(template), 1 / len(template)))
