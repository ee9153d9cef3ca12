"""Timelines: flat columns of what ran where and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Floats, Ints
from simulator.timeline.links import Contention, LinkUse
from simulator.timeline.rows import TimelineRows
from simulator.timeline.span_labels import SpanLabels
from simulator.timeline.template import Template, row_counts

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Timeline:
    """Spans (executed steps, or parts of one) as columns, and the rows (one per kernel) that they expand to.

    Column arrays have one entry per span, ordered by simulated rank, lane and start.

    ``rank``: the simulated rank. It stands for ``ranks_like[rank]`` real ranks that do the same at the same time;
    ``simulated_as[real rank]`` is the reverse.
    ``lane`` indexes ``lane_names``, ``template`` indexes ``templates``, ``step`` is the position in the lane's program.
    ``phase``: the step's letter. ``parts``: the step's part. ``labels``: the step's name in the program.
    ``posted_s``: when the lane came to the span. ``launched_s``: when the host had launched its first op.
    ``start_s``: when it began; a communication begins when all members have come.
    ``algorithms``: purpose of communication -> algorithm that sent the most bytes.
    ``stretched``: span index -> exact row start and end times (s), for spans that did not run straight through at full
    speed.
    ``clocks_hz``: simulated rank -> clock of its SMs, where a power limit decides it. ``clocks_settled``: whether the
    power that the step draws at these clocks is that of the limit.
    ``period_s``: time between steps that follow one another, of a Timeline made by `cut`.
    ``own_period_s``: simulated rank -> the rank's own period, where ranks do not wait for each other.
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
    labels: SpanLabels
    parts: tuple[str, ...]
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
    clocks_settled: bool = True
    period_s: float | None = None
    own_period_s: dict[int, float] = field(default_factory=dict)

    @property
    def length_s(self) -> float:
        """Seconds from the first op of any rank (time 0) to the end of the last."""
        return float(self.end_s.max()) if len(self.end_s) else 0.0

    @property
    def step_time_s(self) -> float:
        """Length of a single step, or period of a steady state."""
        return self.length_s if self.period_s is None else self.period_s

    def windows_s(self) -> Floats:
        """Return the period of each simulated rank, ascending; its spans fill it or leave it idle."""
        return np.array([self.own_period_s.get(rank, self.step_time_s) for rank in self.ranks], dtype=np.float64)

    def weight(self, rank: int) -> float:
        """Return how many real ranks' steps a simulated rank stands for in the period; faster ranks count more."""
        return self.ranks_like[rank] * self.step_time_s / self.own_period_s.get(rank, self.step_time_s)

    @property
    def ranks(self) -> list[int]:
        """Simulated ranks, ascending."""
        return sorted(self.ranks_like)

    @property
    def n_rows(self) -> int:
        """Rows of the full timeline: one per kernel and communication of every simulated rank."""
        return int(row_counts(self.templates)[self.template].sum())

    def select_ranks(self, ranks: Sequence[int]) -> Timeline:
        """Return the spans of these real ranks, copied from the simulated ranks that stand for them.

        Raises ValueError for a rank that the job does not have.
        """
        real = sorted(dict.fromkeys(ranks))
        if real and not 0 <= real[0] <= real[-1] < self.n_ranks:
            raise ValueError(f"ranks are 0 to {self.n_ranks - 1}")
        played = {rank: self.spans_of(rank) for rank in {self.simulated_as[rank] for rank in real}}
        parts = [played[self.simulated_as[rank]] for rank in real]
        span = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        like = dict.fromkeys(real, 1)
        rank = np.repeat(np.array(real, dtype=np.int64), [len(part) for part in parts])
        return replace(self.select_spans(span), ranks_like=like, rank=rank)

    def cut(
        self,
        windows: Mapping[int, tuple[float, float]],
        period_s: float,
        *,
        compute_lane: str,
        steps: int,
        microbatches: int,
    ) -> Timeline:
        """Return one period of the steady state that ``steps`` equal steps have come to, from time 0.

        ``windows``: simulated rank -> begin and end of its period. Spans are clipped there; computation is cut row by
        row. A transfer's bytes count in the period that it begins in. Links have carried a step's share of all bytes.
        ``microbatches``: number per step; those of each step are numbered from 0.
        """
        ranks, place = np.unique(self.rank, return_inverse=True)
        low, high = np.array([windows[rank] for rank in ranks.tolist()]).reshape(-1, 2)[place].T
        compute = np.array([name == compute_lane for name in self.lane_names], dtype=bool)[self.lane]
        reached = np.where(compute, self.posted_s, self.start_s)
        # A lane reaches its next step when the one before has ended, to a rounding.
        slack = 1e-12 * self.length_s
        inside, begins = reached >= low - slack, reached < high - slack
        span = np.flatnonzero(begins & (inside | (self.end_s > low + slack)))
        period, (low, high) = self.select_spans(span), (low[span], high[span])
        period = period._without_rows_before(low, np.flatnonzero(compute[span] & ~inside[span]))
        inside = inside | compute
        origin = min((window[0] for window in windows.values()), default=0.0)
        # Transfers that began before have sent their bytes then.
        late = {
            old: len(period.templates) + new
            for new, old in enumerate(np.unique(period.template[~inside[span]]).tolist())
        }
        silent = tuple(replace(period.templates[old], nbytes=np.zeros(len(period.templates[old]))) for old in late)
        silenced = np.arange(len(period.templates))
        silenced[list(late)] = list(late.values())
        return replace(
            period,
            templates=period.templates + silent,
            template=np.where(inside[span], period.template, silenced[period.template]),
            microbatch=np.where(period.microbatch < 0, -1, period.microbatch % microbatches),
            posted_s=np.maximum(period.posted_s, low) - origin,
            launched_s=np.maximum(period.launched_s, low) - origin,
            start_s=np.maximum(period.start_s, low) - origin,
            end_s=np.minimum(period.end_s, high) - origin,
            stretched={at: (start - origin, end - origin) for at, (start, end) in period.stretched.items()},
            links=tuple(link.per_step(steps) for link in self.links),
            contention=tuple(contention.per_step(steps) for contention in self.contention),
            period_s=period_s,
        )

    def _without_rows_before(self, low: Floats, spans: Ints) -> Timeline:
        """Return the Timeline with the rows of ``spans`` clipped to ``low`` (s, one entry per span), or left out."""
        slack = 1e-12 * self.length_s
        templates, template, stretched = list(self.templates), self.template.copy(), dict(self.stretched)
        for span in spans.tolist():
            whole, since = self.templates[template[span]], float(low[span])
            start, end = stretched.get(span, (self.start_s[span] + whole.start_s, self.start_s[span] + whole.end_s))
            counts = start >= since
            keep = counts | (end > since + slack)
            templates.append(replace(whole, nbytes=whole.nbytes * counts, flops=whole.flops * counts).select_rows(keep))
            template[span] = len(templates) - 1
            stretched[span] = np.maximum(start, since)[keep], np.maximum(end, since)[keep]
        return replace(self, templates=tuple(templates), template=template, stretched=stretched)

    def select_spans(self, span: Ints) -> Timeline:
        """Return the Timeline of these spans (by index) alone."""
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
            labels=self.labels.select(span),
            parts=tuple(self.parts[index] for index in span),
            stretched={new: self.stretched[old] for new, old in enumerate(span.tolist()) if old in self.stretched},
        )

    @cached_property
    def label_code(self) -> Ints:
        """Number of each span's label: equal numbers are equal labels."""
        return _codes(self.labels)

    @cached_property
    def part_code(self) -> Ints:
        """Number of each span's part: equal numbers are equal parts."""
        return _codes(self.parts)

    def spans_of(self, rank: int) -> Ints:
        """Return the indices of a simulated rank's spans, ascending."""
        first, last = np.searchsorted(self.rank, (rank, rank + 1))
        return np.arange(first, last)

    def rows(self) -> TimelineRows:
        """Return one row per op, in the order of spans."""
        return TimelineRows(self)

    def frame(self) -> pd.DataFrame:
        """Return the rows as a DataFrame, ordered by rank, lane and start.

        Columns: rank, lane, name, kind, category, phase, stage, chunk, microbatch, posted_s, start_s, end_s, nbytes,
        flops. Those of texts are categoricals.
        """
        return self.rows().frame()


def _codes(texts: Sequence[str]) -> Ints:
    """Return a number for each text, in the order in which different ones come first."""
    codes = {text: code for code, text in enumerate(dict.fromkeys(texts))}
    return np.array([codes[text] for text in texts], dtype=np.int64)
