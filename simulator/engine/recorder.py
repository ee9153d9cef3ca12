"""Collects spans while the clock runs, and turns them into a Timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Floats, Ints
from simulator.engine.placement import Kind
from simulator.engine.representatives import Cast
from simulator.program import Program, Step
from simulator.timeline import Contention, LinkUse, Template, Timeline

#: Clocks of ranks in Hz; None: kernels take what they take alone.
Clocks = Mapping[Kind, float | None]


class Ends(NamedTuple):
    """Whether a span is the first and the last piece of its step, as a block may be cut at rendezvous; and whether it
    is one of those in a row that hold the step's workspace (what runs beside them is not)."""

    first: bool
    last: bool
    in_row: bool = True


class Called(NamedTuple):
    """When a lane came to a piece of work, and when the host had launched its first op, which is the same where a
    lane's host thread has nothing else to do (s)."""

    posted_s: float
    launched_s: float


class Spans(NamedTuple):
    """Columns: of every step that was played its ``rank``, and of every span the number of its ``step``."""

    rank: Ints
    step: Ints
    template: Ints
    start_s: Floats
    end_s: Floats


WHOLE = Ends(True, True)
BESIDE = Ends(False, False, False)


class Recorder:
    """Append-only columns: one append per span, so that recording costs little beside the event itself."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, str, int, Step, Ends, int, Called, float, float]] = []
        self._stretched: dict[int, tuple[Floats, Floats]] = {}

    def span(
        self,
        rank: int,
        lane: str,
        index: int,
        step: Step,
        ends: Ends,
        template: int,
        called: Called,
        start: float,
        end: float,
    ) -> int:
        """Record one span; its number, for `stretch`."""
        self._spans.append((rank, lane, index, step, ends, template, called, start, end))
        return len(self._spans) - 1

    @property
    def length_s(self) -> float:
        """When the last span ends."""
        return max((end for *_, end in self._spans), default=0.0)

    def times(self) -> Spans:
        """When everything began and ended."""
        steps: dict[tuple[int, str], int] = {}
        number = [steps.setdefault((rank, step.label), len(steps)) for rank, _, _, step, *_ in self._spans]
        template = np.array([span[5] for span in self._spans], dtype=np.int64)
        start, end = (np.array([span[column] for span in self._spans], dtype=np.float64) for column in (7, 8))
        ranks = np.array([rank for rank, _ in steps], dtype=np.int64)
        return Spans(ranks, np.array(number, dtype=np.int64), template, start, end)

    def stretch(self, span: int, starts_s: Floats, ends_s: Floats) -> None:
        """Say when each row of a span that did not run straight through at full speed starts and ends."""
        self._stretched[span] = starts_s, ends_s

    def timeline(
        self,
        *,
        program: Program,
        cast: Cast,
        templates: list[Template],
        clocks_hz: dict[int, float],
        links: tuple[LinkUse, ...],
        algorithms: dict[str, str],
        contention: tuple[Contention, ...],
        events: int,
        wall_s: float,
    ) -> Timeline:
        """The spans as columns, ordered by rank, lane and start."""
        lanes = sorted({lane for _, lane, *_ in self._spans} | {lane for t in templates for lane in t.lanes})
        code = {lane: number for number, lane in enumerate(lanes)}
        columns = list(zip(*self._spans, strict=True)) if self._spans else [()] * 9
        rank, lane_name, index, steps, ends, template, called, start, end = columns
        lane = np.array([code[name] for name in lane_name], dtype=np.int64)
        start_s = np.array(start, dtype=np.float64)
        rank_number = np.array(rank, dtype=np.int64)
        order = np.lexsort((start_s, lane, rank_number))
        # Memory belongs to a step, not to each of its pieces: held from the first piece, given back after the last.
        posted, launched = np.array(called, dtype=np.float64).reshape(-1, 2)[order].T
        first, last, in_row = np.array(ends, dtype=bool).reshape(-1, 3)[order].T

        def column(values: Sequence[float], dtype: type) -> NDArray[Any]:
            return np.array(values, dtype=dtype)[order]

        position = {int(old): new for new, old in enumerate(order)}
        return Timeline(
            n_ranks=program.n_ranks,
            ranks_like=dict(cast.like),
            clocks_hz=clocks_hz,
            lane_names=tuple(lanes),
            templates=tuple(templates),
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
            stretched={position[span]: times for span, times in self._stretched.items()},
            links=links,
            contention=contention,
            simulated_as=cast.simulated_as,
            algorithms=algorithms,
            events=events,
            wall_s=wall_s,
        )
