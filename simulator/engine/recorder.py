"""The recorder of spans: it collects them while the clock runs, and turns them into a Timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Floats, Ints
from simulator.engine.placement import RankKind
from simulator.engine.representatives import Representatives
from simulator.engine.templates import TemplateStore
from simulator.program import Program, Step
from simulator.timeline import Contention, LinkUse, Timeline

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

    @property
    def length_s(self) -> float:
        """The end of the last span."""
        return max((span.end_s for span in self._spans), default=0.0)

    def times(self) -> SpanTimes:
        """Return when every span began and ended."""
        steps: dict[tuple[int, str], int] = {}
        number = [steps.setdefault((span.rank, span.step.label), len(steps)) for span in self._spans]
        return SpanTimes(
            rank=np.array([rank for rank, _ in steps], dtype=np.int64),
            step=np.array(number, dtype=np.int64),
            template=np.array([span.template for span in self._spans], dtype=np.int64),
            start_s=np.array([span.start_s for span in self._spans], dtype=np.float64),
            end_s=np.array([span.end_s for span in self._spans], dtype=np.float64),
        )

    def stretch(self, span: int, starts_s: Floats, ends_s: Floats) -> None:
        """Set start and end of each row of a span that did not run straight through at full speed."""
        self._stretched[span] = starts_s, ends_s

    def timeline(
        self,
        *,
        program: Program,
        representatives: Representatives,
        clocks_hz: dict[int, float],
        links: tuple[LinkUse, ...],
        algorithms: dict[str, str],
        contention: tuple[Contention, ...],
        events: int,
        wall_s: float,
    ) -> Timeline:
        """Return the spans as columns, ordered by rank, lane and start."""
        lanes = sorted({span.lane for span in self._spans} | {lane for t in self.store.templates for lane in t.lanes})
        code = {lane: number for number, lane in enumerate(lanes)}
        columns = list(zip(*self._spans, strict=True)) if self._spans else [()] * len(Span._fields)
        rank, lane_name, index, steps, positions, template, times, start, end = columns
        lane = np.array([code[name] for name in lane_name], dtype=np.int64)
        start_s, rank_number = np.array(start, dtype=np.float64), np.array(rank, dtype=np.int64)
        order = np.lexsort((start_s, lane, rank_number))
        # Memory belongs to a step, not to each of its pieces: held from the first piece, given back after the last.
        posted, launched = np.array(times, dtype=np.float64).reshape(-1, 2)[order].T
        first, last, in_row = np.array(positions, dtype=bool).reshape(-1, 3)[order].T

        def column(values: Sequence[float], dtype: type) -> NDArray[Any]:
            return np.array(values, dtype=dtype)[order]

        number = {int(old): new for new, old in enumerate(order)}
        return Timeline(
            n_ranks=program.n_ranks,
            ranks_like=dict(representatives.multiplicity),
            clocks_hz=clocks_hz,
            lane_names=tuple(lanes),
            templates=tuple(self.store.templates),
            rank=rank_number[order],
            lane=lane[order],
            step=column(index, np.int64),
            template=column(template, np.int64),
            microbatch=column([step.microbatch for step in steps], np.int64),
            stage=column([step.stage for step in steps], np.int64),
            chunk=column([step.chunk for step in steps], np.int64),
            phase=np.array([step.phase for step in steps], dtype="U1")[order],
            posted_s=posted,
            launched_s=launched,
            start_s=start_s[order],
            end_s=column(end, np.float64),
            labels=tuple(steps[i].label for i in order),
            parts=tuple(steps[i].part for i in order),
            alloc_bytes=np.where(first, column([step.alloc_bytes for step in steps], np.float64), 0.0),
            free_bytes=np.where(last, column([step.free_bytes for step in steps], np.float64), 0.0),
            workspace_bytes=np.where(in_row, column([step.workspace_bytes for step in steps], np.float64), 0.0),
            stretched={number[span]: row_times for span, row_times in self._stretched.items()},
            links=links,
            contention=contention,
            simulated_as=representatives.simulated_as,
            algorithms=algorithms,
            events=events,
            wall_s=wall_s,
        )
