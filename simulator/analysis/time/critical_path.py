"""Critical path: the chain of operations, each released by the one before, that ends last."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import Any

import numpy as np

from simulator.arrays import Floats, without_rounding
from simulator.program import COMPUTE_LANE
from simulator.timeline import CATEGORIES, FIRST_COMMUNICATION, Template, Timeline

_OWN_CLASS = ("recompute", "optimizer")
WAITING, LAUNCH = "waiting", "host launch"
#: What is so close to a span was released by it: ten of the engine's instants
#: (`simulator.engine.memory_bandwidth.INSTANT_s`), of which a communication begins two after the kernel before it.
_AT_ONCE_s = 1e-11


def critical_path(timeline: Timeline, window: tuple[float, float] | None = None) -> list[dict[str, Any]]:
    """Return the seconds of the critical path by class of operation, largest first; they sum to the step time.

    ``window``: begin and end (s) of the time that counts, where ``timeline`` is of several steps [all].

    The walk starts at the span that ends last, of several that of the first rank. It goes back from each span to the
    one that released it. A communication that waited for a partner was released on the partner's rank. A communication
    that waited for SMs was released by the computation that still goes on. All others were released by a span of their
    rank that ended when they began, if possible of their lane. Classes are kinds of kernels (matmul, attention, norm
    ...), ``recompute``, ``optimizer``, ``tp communication`` and so on, and ``host launch``. A gap that no record
    explains is ``waiting``.
    """
    low, high = window or (0.0, timeline.length_s)
    seconds = _Walker(timeline, low, high).walk()
    step = high - low
    ranked = sorted(seconds.items(), key=lambda item: (-without_rounding(item[1]), item[0]))
    return [{"class": name, "seconds": value, "share": value / step} for name, value in ranked if value > 0]


def op_class(category: int, kind: str) -> str:
    """Return the class that an op's seconds count in."""
    name = CATEGORIES[category]
    if category >= FIRST_COMMUNICATION:
        return f"{name} communication"
    return name if name in _OWN_CLASS else kind


class _Walker:
    """State of one walk: spans sorted for look-up by end, the visited ones, and seconds by class."""

    def __init__(self, timeline: Timeline, low: float, high: float) -> None:
        self.timeline = timeline
        self.low, self.high = low, high
        self.tolerance = 1e-12 * timeline.length_s + _AT_ONCE_s
        self.visited: set[int] = set()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.compute = np.array([name == COMPUTE_LANE for name in timeline.lane_names], dtype=bool)[timeline.lane]
        # Among spans of a rank that end together, compute is last in order, and first in the search from the end.
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
        now = float(timeline.end_s.max())
        span = int(np.argmax(timeline.end_s >= now - self.tolerance))
        while True:
            self.visited.add(span)
            self._spend(span, now)
            now = min(now, float(timeline.start_s[span]))
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
            if gap > self.tolerance and (beside := self._beside(last, now)) is not None:
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
        """Count the part of an interval that lies in the window."""
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

    def _beside(self, span: int, now: float) -> int | None:
        """Return the span that another one beside it waited for, if it is no span's end that began it.

        A communication may begin while computation goes on: a kernel has ended then, and left it SMs. Kernels beside a
        communication are issued behind it.
        """
        timeline = self.timeline
        first, after = np.searchsorted(timeline.rank, (timeline.rank[span], timeline.rank[span] + 1))
        compute, here = self.compute[first:after], slice(first, after)
        if self.category[span] >= FIRST_COMMUNICATION and not self.compute[span]:
            begun = compute & (timeline.start_s[here] < now - self.tolerance)
            beside = begun & (timeline.end_s[here] > now + self.tolerance)
        else:
            issued = np.abs(timeline.launched_s[here] - now) <= self.tolerance
            beside = issued & ~compute & (timeline.posted_s[here] < now - self.tolerance)
        spans = np.flatnonzero(beside) + first
        return int(spans[0]) if len(spans) and int(spans[0]) not in self.visited else None

    def _last_member(self, span: int, now: float) -> int:
        """Return the last launched of the spans that are one communication, each on another rank; else ``span``.

        Of several that were launched together it is that of the first rank, so that rounding does not decide.
        """
        timeline = self.timeline
        rank, last = int(timeline.rank[span]), span
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
                last = other if last == span else min(last, other)
            index -= 1
        return last

    def _spend(self, span: int, until: float) -> None:
        """Count the span's time up to ``until`` among the classes of its ops."""
        timeline = self.timeline
        start, end = float(timeline.start_s[span]), float(timeline.end_s[span])
        low, high = max(start, self.low), min(until, self.high)
        if high <= low:
            return
        code = int(timeline.template[span])
        template = timeline.templates[code]
        rows = timeline.stretched.get(span)
        if rows is None and template.length_s and (low > start or high < end):
            rows = start + template.start_s, start + template.end_s
        if rows is not None:
            shares = _by_class(template, _on_path(template, *[row.clip(low, high) for row in rows]) / (high - low))
            shares[LAUNCH] = max(1.0 - sum(shares.values()), 0.0)
        else:
            if code not in self.shares:
                self.shares[code] = _shares(template)
            shares = self.shares[code]
        for name, share in shares.items():
            self.seconds[name] += share * (high - low)


def _on_path(template: Template, start: Floats, end: Floats) -> Floats:
    """Return the seconds of each op on the path through a template, given the ops' ``start`` and ``end``.

    Of a communication and the kernels beside it, what ends last is on the path: what comes next waits for that.
    """
    seconds = end - start
    for op, n in template.beside.items():
        kernels = slice(op + 1, op + 1 + n)
        seconds[kernels if end[op] > end[kernels].max() + _AT_ONCE_s else op] = 0.0
    return seconds


def _by_class(template: Template, values: Floats) -> dict[str, float]:
    shares: dict[str, float] = {}
    for category, kind, value in zip(template.category.tolist(), template.kinds, values.tolist(), strict=True):
        name = op_class(category, kind)
        shares[name] = shares.get(name, 0.0) + value
    return shares


def _shares(template: Template) -> dict[str, float]:
    if not template.length_s:  # a transfer that the network times has one op, without work of its own
        return _by_class(template, np.full(len(template), 1 / len(template)))
    return _by_class(template, _on_path(template, template.start_s, template.end_s) / template.length_s)
