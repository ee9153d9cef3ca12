"""The result of a simulation: flat columns of what ran where and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def covered_s(start: Floats, end: Floats) -> float:
    """Length of the union of the intervals from ``start`` to ``end``."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, latest = start[order], np.maximum.accumulate(end[order])
    gaps = np.maximum(start[1:] - latest[:-1], 0.0)
    return float(latest[-1] - start[0] - gaps.sum())


#: What a moment of a rank's step is spent on, in the priority of the time breakdown.
CATEGORIES = ("compute", "recompute", "optimizer", "tp", "cp", "ep", "pp", "dp", "offload")


@dataclass(frozen=True)
class Template:
    """The rows that every span of one kind expands to.

    Arrays have one entry per op. ``work_s`` is its length at full speed; ``category`` indexes `CATEGORIES`;
    ``lane`` is the lane that the row is drawn on (an in-line collective has its own); ``launch_s`` is when the host
    has launched the op, counted from its start on the span. ``beside``: op -> n, for a collective that goes on beside
    the n kernels after it; what follows them waits for both. Everything else runs in order.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    phases: tuple[str, ...]
    lanes: tuple[str, ...]
    category: Ints
    work_s: Floats
    launch_s: Floats
    nbytes: Floats
    flops: Floats
    beside: Mapping[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def start_s(self) -> Floats:
        """When each op starts at full speed, seconds from the span's start."""
        return self._full_speed[0]

    @cached_property
    def end_s(self) -> Floats:
        """When each op ends at full speed, seconds from the span's start."""
        return self._full_speed[1]

    @cached_property
    def _full_speed(self) -> tuple[Floats, Floats]:
        if self.beside:
            return _play_beside(self, [0.0] * len(self), 0.0, None)
        ends = np.cumsum(self.work_s)
        return np.concatenate(([0.0], ends[:-1])), ends

    def play(self, launched: Floats, start: float) -> tuple[Floats, Floats]:
        """Start and end of its ops, the first not before ``start`` and none before the host has ``launched`` it."""
        if not self.beside:
            return play(self.work_s, launched, start)
        # How far the latest of the launches to come lags behind full speed.
        lag = np.maximum.accumulate((launched - self.start_s)[::-1])[::-1]
        return _play_beside(self, launched.tolist(), start, lag.tolist())

    @cached_property
    def length_s(self) -> float:
        """Length of a span at full speed."""
        return float(self.end_s.max()) if len(self) else 0.0

    @cached_property
    def rest_s(self) -> Floats:
        """From the start of each op to the end of the span at full speed, if nothing but that op and what follows it
        takes time."""
        rest = np.cumsum(self.work_s[::-1])[::-1]
        if self.beside:
            after = [0.0] * (len(self) + 1)
            for op in range(len(self) - 1, -1, -1):
                n = self.beside.get(op, 0)
                after[op] = max(float(self.work_s[op]) + after[op + n + 1], after[op + 1] if n else 0.0)
            rest = np.array(after[:-1])
        return rest

    def shown(self, start: Floats, end: Floats) -> Floats:
        """Seconds of each op, at these times, in which no kernel runs beside it."""
        seconds = end - start
        for op, n in self.beside.items():
            kernels = slice(op + 1, op + 1 + n)
            common = np.minimum(end[kernels], end[op]) - np.maximum(start[kernels], start[op])
            seconds[op] -= np.maximum(common, 0.0).sum()
        return seconds

    @cached_property
    def shown_s(self) -> Floats:
        """Seconds of each op at full speed in which no kernel runs beside it; they add up to the length."""
        return self.shown(self.start_s, self.end_s) if self.beside else self.work_s

    @cached_property
    def by_category(self) -> Floats:
        """Seconds at full speed in each of `CATEGORIES`, of communication those that are `shown`."""
        return np.bincount(self.category, weights=self.shown_s, minlength=len(CATEGORIES)).astype(np.float64)


def play(work: Floats, launched: Floats, start: float) -> tuple[Floats, Floats]:
    """Start and end of ops run in order from ``start``, none before the host has launched it: a running maximum."""
    done = np.cumsum(work)
    ends = done + np.maximum.accumulate(np.maximum(launched, start) - (done - work))
    return ends - work, ends


def _play_beside(
    template: Template, launched: list[float], start: float, lag: list[float] | None
) -> tuple[Floats, Floats]:
    """`Template.play` op by op, until the host is ahead for good (``lag``): what follows runs at full speed."""
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


@dataclass(frozen=True)
class LinkUse:
    """One (class of) link: ``count`` equal links, each of which carried ``nbytes`` through ``capacity_Bps``.

    ``leaves_gpu``: it is the first hop of what a GPU sends. ``by_purpose``: its bytes, by what they were for.
    """

    name: str
    kind: str
    count: int
    nbytes: float
    capacity_Bps: float
    leaves_gpu: bool = False
    by_purpose: Mapping[str, float] = field(default_factory=dict)

    def per(self, steps: int) -> LinkUse:
        """What it carried in each of ``steps`` equal steps."""
        by_purpose = {purpose: nbytes / steps for purpose, nbytes in self.by_purpose.items()}
        return replace(self, nbytes=self.nbytes / steps, by_purpose=by_purpose)


@dataclass(frozen=True)
class Meeting:
    """Transfers of one kind on a link while it was full and held somebody up.

    Whose they are: ``job`` (empty: nobody's, background traffic), the ``axis`` of their groups, what they do.
    ``at_once``: the most of them that crossed it together. ``seconds``: for how long any of them met others, or each
    other, there. ``lost_s``: how much longer one of them took in that time than without others, where this link was
    what held it up; the mean of those that were there at once.
    """

    job: str
    axis: str
    op: str
    at_once: float
    seconds: float
    lost_s: float


@dataclass(frozen=True)
class Contention:
    """Who met on one (class of) link, ``count`` equal ones. A transfer that several links held up alike lost the same
    time on each of them."""

    link: str
    kind: str
    count: int
    flows: tuple[Meeting, ...]

    def per(self, steps: int) -> Contention:
        """What was lost in each of ``steps`` equal steps."""
        return replace(
            self,
            flows=tuple(replace(flow, seconds=flow.seconds / steps, lost_s=flow.lost_s / steps) for flow in self.flows),
        )


@dataclass(frozen=True)
class Timeline:
    """Spans (executed steps, or parts of one) as columns, and the rows (one per kernel) that they expand to.

    Column arrays have one entry per span, ordered by simulated rank, lane and start. ``rank`` is the simulated rank; it
    stands for ``ranks_like[rank]`` real ranks that do the same at the same time (``simulated_as[real rank]``).
    ``lane`` indexes ``lane_names``, ``template`` indexes ``templates``, ``step`` is the position in the lane's program,
    ``phase`` is the step's letter. ``posted_s`` is when it could have begun: its lane had come to it;
    ``launched_s`` when the host had launched its first op; ``start_s`` when it did begin: computation as soon as it was
    launched, a communication when all its members were there.
    ``algorithms``: purpose of communication -> algorithm that sent the most bytes.
    ``stretched``: span index -> exact row start and end times, for spans that did not run straight through at full
    speed. Seconds.
    ``clocks_hz``: simulated rank -> clock of its SMs, where a power limit decides that.
    ``period_s``: of a `cut`, the time between steps that follow each other; each rank has a window of its own.
    ``own_period_s``: that of simulated ranks which do not wait for all others, where they differ.
    """

    n_ranks: int
    ranks_like: dict[int, int]
    lane_names: tuple[str, ...]
    templates: tuple[Template, ...]
    rank: Ints
    lane: Ints
    step: Ints
    template: Ints
    microbatch: Ints
    stage: Ints
    chunk: Ints
    phase: NDArray[np.str_]
    posted_s: Floats
    launched_s: Floats
    start_s: Floats
    end_s: Floats
    labels: tuple[str, ...]
    alloc_bytes: Floats
    free_bytes: Floats
    workspace_bytes: Floats
    stretched: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)
    links: tuple[LinkUse, ...] = ()
    contention: tuple[Contention, ...] = ()
    simulated_as: tuple[int, ...] = ()
    algorithms: dict[str, str] = field(default_factory=dict)
    events: int = 0
    wall_s: float = 0.0
    clocks_hz: dict[int, float] = field(default_factory=dict)
    period_s: float | None = None
    own_period_s: dict[int, float] = field(default_factory=dict)

    @property
    def length_s(self) -> float:
        """From the first op of any rank (time 0) to the end of the last."""
        return float(self.end_s.max()) if len(self.end_s) else 0.0

    @property
    def step_time_s(self) -> float:
        """Of one step alone its length; of a steady state its period."""
        return self.length_s if self.period_s is None else self.period_s

    def windows_s(self) -> Floats:
        """Per simulated rank (ascending), the seconds that its spans fill or leave idle."""
        return np.array([self.own_period_s.get(rank, self.step_time_s) for rank in self.ranks], dtype=np.float64)

    def weight(self, rank: int) -> float:
        """How many real ranks' steps a simulated rank stands for in the period: who does more of them counts more."""
        return self.ranks_like[rank] * self.step_time_s / self.own_period_s.get(rank, self.step_time_s)

    @property
    def ranks(self) -> list[int]:
        """The simulated ranks, ascending."""
        return sorted(self.ranks_like)

    @property
    def n_rows(self) -> int:
        """Rows of the full timeline: one per kernel and communication of every simulated rank."""
        lengths = np.array([len(template) for template in self.templates], dtype=np.int64)
        return int(lengths[self.template].sum()) if len(self.template) else 0

    def of_ranks(self, ranks: Sequence[int]) -> Timeline:
        """The spans of these real ranks, each as the simulated rank played it that stands for it.

        Raises ValueError for a rank that the job does not have.
        """
        wanted = sorted(dict.fromkeys(ranks))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < self.n_ranks:
            raise ValueError(f"ranks are 0 to {self.n_ranks - 1}")
        own = {rank: np.flatnonzero(self.rank == rank) for rank in {self.simulated_as[rank] for rank in wanted}}
        parts = [own[self.simulated_as[rank]] for rank in wanted]
        span = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        like = dict.fromkeys(wanted, 1)
        rank = np.repeat(np.array(wanted, dtype=np.int64), [len(part) for part in parts])
        return replace(self._of_spans(span), ranks_like=like, rank=rank)

    def cut(
        self,
        windows: Mapping[int, tuple[float, float]],
        period_s: float,
        *,
        compute_lane: str,
        steps: int,
        microbatches: int,
    ) -> Timeline:
        """One period of the steady state that ``steps`` equal steps have come to, from time 0.

        ``windows``: per simulated rank from when to when. Spans are clipped there, and have sent their bytes in the
        period that they begin in; what computes is cut row by row. Links have carried a step's share of all. Of
        ``microbatches`` numbered through the steps those of each are numbered anew.
        """
        low, high = (np.array([windows[rank][end] for rank in self.rank.tolist()]) for end in (0, 1))
        compute = np.array([name == compute_lane for name in self.lane_names], dtype=bool)[self.lane]
        came = np.where(compute, self.posted_s, self.start_s)
        # A lane comes to its next step when it has done the one before, to a rounding.
        slack = 1e-12 * self.length_s
        inside, begins = came >= low - slack, came < high - slack
        span = np.flatnonzero(begins & (inside | (self.end_s > low + slack)))
        kept, (low, high) = self._of_spans(span), (low[span], high[span])
        kept = kept._begun_before(low, np.flatnonzero(compute[span] & ~inside[span]))
        inside = inside | compute
        origin = min((window[0] for window in windows.values()), default=0.0)
        late = {
            old: len(kept.templates) + new for new, old in enumerate(np.unique(kept.template[~inside[span]]).tolist())
        }
        silent = tuple(replace(kept.templates[old], nbytes=np.zeros(len(kept.templates[old]))) for old in late)
        begun_before = [late.get(old, old) for old in kept.template.tolist()]
        return replace(
            kept,
            templates=kept.templates + silent,
            template=np.where(inside[span], kept.template, np.array(begun_before, dtype=np.int64)),
            microbatch=np.where(kept.microbatch < 0, -1, kept.microbatch % microbatches),
            posted_s=np.maximum(kept.posted_s, low) - origin,
            launched_s=np.maximum(kept.launched_s, low) - origin,
            start_s=np.maximum(kept.start_s, low) - origin,
            end_s=np.minimum(kept.end_s, high) - origin,
            stretched={at: (start - origin, end - origin) for at, (start, end) in kept.stretched.items()},
            links=tuple(link.per(steps) for link in self.links),
            contention=tuple(met.per(steps) for met in self.contention),
            period_s=period_s,
        )

    def _begun_before(self, low: Floats, spans: Ints) -> Timeline:
        """``spans`` without what they did before ``low`` (one entry per span of the timeline)."""
        templates, template, stretched = list(self.templates), self.template.copy(), dict(self.stretched)
        for span in spans.tolist():
            whole, since = self.templates[template[span]], float(low[span])
            start, end = stretched.get(span, (self.start_s[span] + whole.start_s, self.start_s[span] + whole.end_s))
            counts = start >= since
            templates.append(replace(whole, nbytes=whole.nbytes * counts, flops=whole.flops * counts))
            template[span] = len(templates) - 1
            stretched[span] = np.maximum(start, since), np.maximum(end, since)
        return replace(self, templates=tuple(templates), template=template, stretched=stretched)

    def _of_spans(self, span: Ints) -> Timeline:
        """Only these spans."""
        columns = {
            name: getattr(self, name)[span]
            for name in (
                *("rank", "lane", "step", "template", "microbatch", "stage", "chunk", "phase"),
                *("posted_s", "launched_s", "start_s", "end_s", "alloc_bytes", "free_bytes", "workspace_bytes"),
            )
        }
        return replace(
            self,
            **columns,
            labels=tuple(self.labels[index] for index in span),
            stretched={new: self.stretched[old] for new, old in enumerate(span.tolist()) if old in self.stretched},
        )

    @cached_property
    def _flat(self) -> tuple[Ints, dict[str, NDArray[np.generic]]]:
        """Offset of each template in the concatenated per-op columns, and those columns."""
        lengths = [len(template) for template in self.templates]
        base = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        lane_code = {name: code for code, name in enumerate(self.lane_names)}
        columns: dict[str, NDArray[np.generic]] = {
            "name": np.array([n for t in self.templates for n in t.names], dtype=object),
            "kind": np.array([k for t in self.templates for k in t.kinds], dtype=object),
            "op_phase": np.array([p for t in self.templates for p in t.phases], dtype=object),
            "lane": np.array([lane_code[name] for t in self.templates for name in t.lanes], dtype=np.int64),
        }
        for column in ("category", "start_s", "end_s", "nbytes", "flops"):
            parts = [getattr(t, column) for t in self.templates]
            columns[column] = np.concatenate(parts) if parts else np.zeros(0)
        return base, columns

    def rows(self, ranks: Sequence[int] | None = None) -> dict[str, NDArray[np.generic]]:
        """Expand to one row per op, as arrays: the columns of `frame`, with ``lane`` and ``category`` as codes and
        ``span`` as the index of the span that a row belongs to, in span order.

        ``ranks``: only these simulated ranks.
        """
        spans = np.arange(len(self.rank))
        if ranks is not None:
            spans = spans[np.isin(self.rank, np.asarray(ranks))]
        base, flat = self._flat
        template = self.template[spans]
        lengths = base[template + 1] - base[template]
        first = np.concatenate(([0], np.cumsum(lengths)))
        span = np.repeat(spans, lengths)
        op = np.arange(first[-1]) - np.repeat(first[:-1], lengths) + np.repeat(base[template], lengths)
        start, end = self.start_s[span] + flat["start_s"][op], self.start_s[span] + flat["end_s"][op]
        single = np.repeat(lengths == 1, lengths)  # a communication that the network timed has no work of its own
        start, end = np.where(single, self.start_s[span], start), np.where(single, self.end_s[span], end)
        for position, index in enumerate(spans):
            if int(index) in self.stretched:
                rows = slice(first[position], first[position + 1])
                start[rows], end[rows] = self.stretched[int(index)]
        posted = np.where(np.arange(len(span)) == np.repeat(first[:-1], lengths), self.posted_s[span], start)
        return {
            "span": span,
            "rank": self.rank[span],
            "lane": flat["lane"][op],
            "name": flat["name"][op],
            "kind": flat["kind"][op],
            "category": flat["category"][op],
            "phase": flat["op_phase"][op],
            "stage": self.stage[span],
            "chunk": self.chunk[span],
            "microbatch": self.microbatch[span],
            "posted_s": posted,
            "start_s": start,
            "end_s": end,
            "nbytes": flat["nbytes"][op],
            "flops": flat["flops"][op],
        }

    def frame(self, ranks: Sequence[int] | None = None) -> pd.DataFrame:
        """The rows as a DataFrame: rank, lane, name, kind, category, phase, stage, chunk, microbatch, posted_s,
        start_s, end_s, nbytes, flops; ordered by rank, lane, start."""
        import pandas as pd

        rows = self.rows(ranks)
        order = np.lexsort((rows["start_s"], rows["lane"], rows["rank"]))
        columns = {name: column[order] for name, column in rows.items() if name != "span"}
        columns["lane"] = np.array(self.lane_names, dtype=object)[columns["lane"]]
        columns["category"] = np.array(CATEGORIES, dtype=object)[columns["category"]]
        return pd.DataFrame(columns)
