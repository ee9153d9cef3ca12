"""Spans: what is recorded of them while the clock runs, and how they become a Timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Bools, Floats, Ints, by_appearance, inverse
from simulator.engine.placement import RankKind
from simulator.engine.representatives import Representatives
from simulator.engine.templates import TemplateStore
from simulator.program import LaneSteps, Program, Step, later_label
from simulator.timeline import Contention, LinkUse, SpanLabels, Timeline

#: Clocks of the GPUs of ranks in Hz; None: each kernel runs at the clock of its price.
GpuClocks = Mapping[RankKind, float | None]


class PiecePosition(NamedTuple):
    """Position of a piece in its step, which may be cut at collectives.

    ``in_row``: it is one of the pieces in a row that hold the step's workspace; what runs beside them is not.
    """

    first: bool
    last: bool
    in_row: bool = True


class CallTimes(NamedTuple):
    """When a lane came to a piece of work, and when the host had launched its first op (s).

    Both are the same where the host has nothing else to do.
    """

    posted_s: float
    launched_s: float


class Span(NamedTuple):
    """A piece of ``step``, number ``position_in_lane`` of its lane, as ``rank`` has run it; it is drawn on ``lane``."""

    rank: int
    lane: str
    position_in_lane: int
    step: Step
    position: PiecePosition
    template: int
    times: CallTimes
    start_s: float
    end_s: float


class SpanTimes(NamedTuple):
    """Columns of steps and spans: the ``rank`` of every step; of every span the number of its ``step``, and times."""

    rank: Ints
    step: Ints
    template: Ints
    start_s: Floats
    end_s: Floats


WHOLE = PiecePosition(True, True)
BESIDE = PiecePosition(False, False, False)


class Repeats(NamedTuple):
    """Places of spans in the whole program, of which a part was played and repeated.

    ``later``: micro-batches between a span and the recorded step of it. ``run``: number of its step.
    """

    later: Ints
    run: Ints


@dataclass(frozen=True)
class RecordedSpans:
    """All spans of a job as columns, in the order in which they ended.

    ``lane`` indexes ``lane_names``, and ``step`` indexes ``steps``. ``position_in_lane`` is the place of the step in
    its lane. ``is_first``, ``is_last`` and ``in_row`` are those of `PiecePosition`. ``stretched``: index of a span ->
    start and end of each of its rows, where it did not run straight through at full speed.
    """

    lane_names: Sequence[str]
    steps: LaneSteps
    rank: Ints
    lane: Ints
    position_in_lane: Ints
    step: Ints
    template: Ints
    is_first: Bools
    is_last: Bools
    in_row: Bools
    posted_s: Floats
    launched_s: Floats
    start_s: Floats
    end_s: Floats
    stretched: Mapping[int, tuple[Floats, Floats]] = field(default_factory=dict)
    repeats: Repeats | None = None

    @property
    def length_s(self) -> float:
        """The end of the last span."""
        return float(self.end_s.max(initial=0.0))

    def times(self) -> SpanTimes:
        """Return when every span began and ended; steps are in the order of their first spans."""
        run = self.step if self.repeats is None else self.repeats.run
        pairs = self.rank * (int(run.max(initial=0)) + 1) + run
        first, number = by_appearance(pairs)
        return SpanTimes(self.rank[first], number, self.template, self.start_s, self.end_s)

    def timeline(
        self,
        *,
        store: TemplateStore,
        program: Program,
        representatives: Representatives,
        clocks_hz: Mapping[int, float],
        clocks_settled: bool,
        links: tuple[LinkUse, ...],
        algorithms: dict[str, str],
        contention: tuple[Contention, ...],
        events: int,
        wall_s: float,
    ) -> Timeline:
        """Return the spans, which are of templates in ``store``, ordered by rank, lane and start."""
        lanes, lane = self._lanes(store)
        order = np.lexsort((self.start_s, lane, self.rank))
        columns = self.steps.columns
        prototype = np.array(columns.prototype, dtype=np.int64)[self.step[order]]

        def step_column(name: str, dtype: type | str) -> NDArray[Any]:
            return np.array([getattr(step, name) for step in columns.prototypes], dtype=dtype)[prototype]

        def memory(pieces: Bools, name: str) -> Floats:
            return np.where(pieces[order], step_column(name, np.float64), 0.0)

        # Memory belongs to a step, not to each of its pieces: held from the first piece, given back after the last.
        number = inverse(order) if self.stretched else order
        return Timeline(
            n_ranks=program.n_ranks,
            ranks_like=dict(representatives.multiplicity),
            clocks_hz=dict(clocks_hz),
            clocks_settled=clocks_settled,
            lane_names=lanes,
            templates=tuple(store.templates),
            rank=self.rank[order],
            lane=lane[order],
            step=self.position_in_lane[order],
            template=self.template[order],
            microbatch=self._microbatches()[order],
            stage=step_column("stage", np.int64),
            chunk=step_column("chunk", np.int64),
            phase=step_column("phase", "U1"),
            posted_s=self.posted_s[order],
            launched_s=self.launched_s[order],
            start_s=self.start_s[order],
            end_s=self.end_s[order],
            labels=self._labels(order),
            parts=tuple(step_column("part", object).tolist()),
            alloc_bytes=memory(self.is_first, "alloc_bytes"),
            free_bytes=memory(self.is_last, "free_bytes"),
            workspace_bytes=memory(self.in_row, "workspace_bytes"),
            stretched={int(number[span]): rows_s for span, rows_s in self.stretched.items()},
            links=links,
            contention=contention,
            simulated_as=representatives.simulated_as,
            algorithms=algorithms,
            events=events,
            wall_s=wall_s,
        )

    def _microbatches(self) -> Ints:
        """Return the micro-batch of each span; -1 where it has none."""
        microbatch = np.array(self.steps.columns.microbatch, dtype=np.int64)[self.step]
        return microbatch if self.repeats is None else np.where(microbatch < 0, -1, microbatch + self.repeats.later)

    def _labels(self, order: Ints) -> SpanLabels:
        """Return the labels of the steps of spans in an ``order``."""
        later = None if self.repeats is None else self.repeats.later[order]
        return SpanLabels(self.steps.columns.label, self.step[order], later, later_label)

    def _lanes(self, store: TemplateStore) -> tuple[tuple[str, ...], Ints]:
        """Return the names of all lanes of spans and of their rows, sorted, and the number of each span's lane."""
        used = {self.lane_names[code] for code in np.unique(self.lane).tolist()}
        lanes = sorted(used | {lane for template in store.templates for lane in template.lanes})
        place = {name: number for number, name in enumerate(lanes)}
        codes = np.array([place.get(name, -1) for name in self.lane_names], dtype=np.int64)
        return tuple(lanes), codes[self.lane]


class Recorder:
    """Append-only columns: one append per span, so that recording costs little beside the event itself.

    Spans are of templates in ``store``.
    """

    def __init__(self, store: TemplateStore) -> None:
        self.store = store
        self._spans: list[Span] = []
        self._stretched: dict[int, tuple[Floats, Floats]] = {}

    def add(self, span: Span) -> int:
        """Record one span; return its number, for `stretch`."""
        self._spans.append(span)
        return len(self._spans) - 1

    def stretch(self, span: int, starts_s: Floats, ends_s: Floats) -> None:
        """Set start and end of each row of a span that did not run straight through at full speed."""
        self._stretched[span] = starts_s, ends_s

    def spans(self) -> RecordedSpans:
        """Return all spans so far as columns."""
        columns = list(zip(*self._spans, strict=True)) if self._spans else [()] * len(Span._fields)
        rank, lane, position_in_lane, step, position, template, times, start_s, end_s = columns
        lanes = {name: code for code, name in enumerate(dict.fromkeys(lane))}
        steps = {id(one): one for one in step}
        number = {one: index for index, one in enumerate(steps)}
        is_first, is_last, in_row = np.array(position, dtype=bool).reshape(-1, 3).T
        posted_s, launched_s = np.array(times, dtype=np.float64).reshape(-1, 2).T
        return RecordedSpans(
            lane_names=tuple(lanes),
            steps=LaneSteps.from_steps(steps.values()),
            rank=np.array(rank, dtype=np.int64),
            lane=np.array([lanes[name] for name in lane], dtype=np.int64),
            position_in_lane=np.array(position_in_lane, dtype=np.int64),
            step=np.array([number[id(one)] for one in step], dtype=np.int64),
            template=np.array(template, dtype=np.int64),
            is_first=is_first,
            is_last=is_last,
            in_row=in_row,
            posted_s=posted_s,
            launched_s=launched_s,
            start_s=np.array(start_s, dtype=np.float64),
            end_s=np.array(end_s, dtype=np.float64),
            stretched=self._stretched,
        )
