"""Periods of a pipeline that were left out of a play, put into what was recorded.

Between filling and draining a pipeline does the same again and again. Where its whole state is that of a period before,
everything that follows is so too, and need not be played.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.engine.marks import Marks, PeriodMark
from simulator.engine.placement import Placed
from simulator.engine.recorder import RecordedSpans, Repeats
from simulator.engine.stretched_rows import StretchedRows
from simulator.errors import SimulatorError
from simulator.program import COMPUTE_LANE, Comm, Program, Repetition, Step, later_label

K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound=Hashable)

#: Times are those of a period before where they differ from them by less than this share of the period.
TOLERANCE = 1e-11
#: What is reached this share of a period before a mark is reached at it.
SLACK = 1e-9
#: The step a period later has not been looked for.
UNKNOWN = -2
_TIMES = ("posted_s", "launched_s", "start_s", "end_s")


class UnsteadyError(SimulatorError):
    """A shortened program whose play never came to the state of a period before; the whole has to be played."""


@dataclass(frozen=True)
class Period(Generic[K, S]):
    """The period of a play from mark ``before`` to mark ``after``, which is put in ``times`` more."""

    before: PeriodMark[K, S]
    after: PeriodMark[K, S]
    times: int

    @property
    def length_s(self) -> float:
        """Seconds of the period."""
        return self.after.time_s - self.before.time_s

    def more_counts(self) -> dict[K, int]:
        """Return how often each communication was made in the periods left out."""
        before, after = self.before.counts, self.after.counts
        return {key: self.times * (count - before.get(key, 0)) for key, count in after.items()}

    def more_runs(self) -> list[int]:
        """Return how often each prepared block was run in the periods left out."""
        earlier = [*self.before.runs, *[0] * (len(self.after.runs) - len(self.before.runs))]
        return [self.times * (after - before) for before, after in zip(earlier, self.after.runs, strict=True)]

    def more_seconds(self) -> dict[S, float]:
        """Return the seconds of each state of a full link in the periods left out."""
        before, after = self.before.saturated_s, self.after.saturated_s
        return {state: self.times * (seconds - before.get(state, 0.0)) for state, seconds in after.items()}


class RepeatedSteps:
    """The steps of a program in ``spans``, and the same steps some ``microbatches`` later.

    ``lane`` and ``position``: of each step, the number of its lane, and its place there.
    """

    def __init__(self, program: Program, roles: Sequence[int], spans: RecordedSpans, microbatches: int) -> None:
        self._steps, self._microbatches = spans.steps, microbatches
        n_steps = len(spans.steps)
        identity = _identities(spans.steps)
        order = np.argsort(identity)
        self.lane, self.position = np.full(n_steps, -1, np.int64), np.zeros(n_steps, np.int64)
        self._following = np.full(n_steps, UNKNOWN, np.int64)
        self._lanes: list[Sequence[Step]] = []
        self._number_at: list[list[int]] = []  # by lane and place there
        self._stride: dict[int, int] = {}
        self._computation: list[_Computation] = []  # that of each lane's role
        for role in roles:
            computation = _Computation(program.roles[role].lanes.get(COMPUTE_LANE, ()))
            for steps in program.roles[role].lanes.values():
                number = _places(_identities(steps), identity[order], order)
                played = np.flatnonzero(number >= 0)
                self._number_at.append(number.tolist())
                self.lane[number[played]] = len(self._lanes)
                self.position[number[played]] = played
                self._lanes.append(steps)
                self._computation.append(computation)
        self.lengths = list(map(len, self._lanes))

    def following(self, steps: Ints) -> Ints:
        """Return the same step a period later of each of ``steps``; -1 where there is none."""
        for step in np.unique(steps[self._following[steps] == UNKNOWN]).tolist():
            self._following[step] = self._step_later(step)
        return self._following[steps]

    def _step_later(self, number: int) -> int:
        """Return the number of the step of the same label a period later; -1 where there is none.

        Both are on one lane. It is tried at the distance that such steps had the last time on that lane, and searched
        for if it is not there.
        """
        step, lane, position = self._steps[number], int(self.lane[number]), int(self.position[number])
        label, steps = later_label(step.label, self._microbatches), self._lanes[lane]
        at = position + self._stride.get(lane, len(steps))
        if at >= len(steps) or steps[at].label != label:
            at = next((at for at in range(position + 1, len(steps)) if steps[at].label == label), -1)
        if at < 0 or type(steps[at].op) is not type(step.op):
            return -1
        self._stride[lane] = at - position
        return self._number_at[lane][at]

    def strides(self, steps: Ints) -> Ints | None:
        """Return by lane how many of its steps are in a period, from ``steps``; None where they do not agree."""
        distinct = np.unique(steps)
        apart = self.position[self.following(distinct)] - self.position[distinct]
        strides = np.zeros(len(self.lengths), np.int64)
        strides[self.lane[distinct]] = apart
        agree = (strides[self.lane[distinct]] == apart).all() and (apart > 0).all()
        return strides if agree and self._are_issued_alike(distinct) else None

    def _are_issued_alike(self, steps: Ints) -> bool:
        """Return whether hosts issue each of ``steps`` a period after the same step of the period before.

        What waits for computation is issued behind it (`issue_order`). The rest is issued before the first computation
        that waits for it. For the two steps that has to be the same computation, a period apart.
        """
        for step in steps.tolist():
            one, other = self._steps[step], self._steps[self._following[step]]
            computation = self._computation[self.lane[step]]
            if not isinstance(one.op, Comm) or not computation.labels.isdisjoint(one.after):
                continue
            waiting = [computation.first_waiting.get(comm.label, "") for comm in (one, other)]
            if waiting[0] == waiting[1] or later_label(waiting[0], self._microbatches) != waiting[1]:
                return False
        return True


class _Computation:
    """Labels of the steps of a role's compute lane, and labels for which these steps wait."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    @cached_property
    def labels(self) -> frozenset[str]:
        """Labels of the steps."""
        return frozenset(step.label for step in self._steps)

    @cached_property
    def first_waiting(self) -> Mapping[str, str]:
        """Label that is waited for -> label of the first step that does."""
        first: dict[str, str] = {}
        for step in self._steps:
            for label in step.after:
                first.setdefault(label, step.label)
        return first


def _identities(steps: Sequence[Step]) -> Ints:
    """Return the ``id`` of each step."""
    return np.fromiter(map(id, steps), np.int64, len(steps))


def _places(values: Ints, ordered: Ints, order: Ints) -> Ints:
    """Return the index of each of ``values`` in an array; -1 where there is none.

    ``order``: indices that sort the array (`numpy.argsort`). ``ordered``: the array in that order.

    >>> _places(np.array([30, 40, 10]), np.array([10, 20, 30]), np.array([2, 0, 1])).tolist()
    [1, -1, 2]
    """
    if not len(ordered):
        return np.full(len(values), -1)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.where(ordered[at] == values, order[at], -1)


class SpansByStep:
    """Spans in the order of their ranks and steps, and of the pieces of a step; ``rows`` of those that have any."""

    def __init__(self, spans: RecordedSpans) -> None:
        self._spans, self._n_steps = spans, max(len(spans.steps), 1)
        self.rows = StretchedRows(spans.stretched, len(spans.rank))
        key = spans.rank * self._n_steps + spans.step
        self._order = np.argsort(key, kind="stable")
        self._in_order = key[self._order]
        self._piece = np.empty(len(key), np.int64)
        self._piece[self._order] = np.arange(len(key)) - np.searchsorted(self._in_order, self._in_order)

    def at_steps(self, span: Ints, step: Ints) -> Ints | None:
        """Return the spans that are to other steps what each ``span`` is to its own; None where one has none."""
        spans = self._spans
        if (step < 0).any():
            return None
        key = spans.rank[span] * self._n_steps + step
        at = np.searchsorted(self._in_order, key) + self._piece[span]
        within = np.minimum(at, len(self._in_order) - 1)
        other = self._order[within]
        same = (at == within) & (self._in_order[within] == key)
        same &= (spans.template[other] == spans.template[span]) & (spans.lane[other] == spans.lane[span])
        return other if same.all() else None


def steady_period(
    spans: RecordedSpans,
    by_step: SpansByStep,
    marks: Sequence[PeriodMark[K, S]],
    hosts_s: Floats,
    steps: RepeatedSteps,
    times: int,
) -> tuple[Period[K, S], Ints]:
    """Return the last period between ``marks`` that ends as it began, and the strides of lanes in it.

    Everything that two periods in a row touch is at the same times in both. No host is less far ahead at the end. One
    that is farther ahead has issued all of its work by then, so that nothing waits for it any more. ``hosts_s``: when
    each host had issued all of its work. Raises `UnsteadyError` where there is no such period.
    """
    for first, second, third in reversed(list(zip(marks, marks[1:], marks[2:], strict=False))):
        period = Period(second, third, times)
        if _hosts_keep_up(first, period, hosts_s):
            strides = _strides_if_repeated(spans, by_step, steps, first, period)
            if strides is not None:
                return period, strides
    raise UnsteadyError("no period of the pipeline is as the one before")


def stop_unsteady(marks: Marks[K, S]) -> None:
    """Raise `UnsteadyError` where a training step has all its marks, and no two periods in a row are equally long.

    The pipeline then drains, and no period will be found: see `steady_period`.
    """
    ended = marks.at_ended_step()
    if not ended:
        return
    lengths_s = [after.time_s - before.time_s for before, after in pairwise(ended)]
    if not any(map(_are_alike, lengths_s, lengths_s[1:])):
        raise UnsteadyError("no two periods of the pipeline in a row are equally long")


def _are_alike(before_s: float, after_s: float) -> bool:
    """Return whether two periods in a row are equally long."""
    return abs(before_s - after_s) <= TOLERANCE * after_s


def _hosts_keep_up(first: PeriodMark[K, S], period: Period[K, S], hosts_s: Floats) -> bool:
    """Return whether hosts are as far ahead at each mark as a period before, or farther and not waited for again."""
    slack_s = TOLERANCE * period.length_s
    leads = [mark.time_s - mark.hosts_s for mark in (first, period.before, period.after)]
    if any((after < before - slack_s).any() for before, after in pairwise(leads)):
        return False
    gains = (leads[2] > leads[1] + slack_s) | (leads[1] > leads[0] + slack_s)
    return bool((hosts_s[gains] <= period.after.time_s).all())


def _strides_if_repeated(
    spans: RecordedSpans, by_step: SpansByStep, steps: RepeatedSteps, first: PeriodMark[K, S], period: Period[K, S]
) -> Ints | None:
    """Return the strides of lanes in a period; None unless all from ``first`` to its beginning comes again in it."""
    length_s = period.length_s
    slack_s, tolerance_s = SLACK * length_s, TOLERANCE * length_s
    if not _are_alike(period.before.time_s - first.time_s, length_s):
        return None
    begin_s, middle_s, end_s = (mark.time_s - slack_s for mark in (first, period.before, period.after))
    touched = np.flatnonzero((spans.end_s >= begin_s) & (spans.posted_s < middle_s))
    windows = pairwise((begin_s, middle_s, end_s))
    begun = [int(((spans.posted_s >= low) & (spans.posted_s < high)).sum()) for low, high in windows]
    other = by_step.at_steps(touched, steps.following(spans.step[touched])) if begun[0] == begun[1] else None
    if other is None:
        return None
    for name in _TIMES:
        times_s = getattr(spans, name)
        if (np.abs(times_s[other] - times_s[touched] - length_s) > tolerance_s).any():
            return None
    if not by_step.rows.are_repeated(touched, other, length_s, tolerance_s):
        return None
    return steps.strides(spans.step[touched])


def whole_spans(
    spans: RecordedSpans, marks: Marks[K, S], hosts_s: Floats, placed: Placed, roles: Sequence[int]
) -> tuple[RecordedSpans, Sequence[Period[K, S]]]:
    """Return the spans of the whole program, and the period that each training step repeats.

    ``roles``: those of simulated ranks. Raises as `steady_period`.
    """
    repetition = placed.repetition
    assert repetition is not None
    steps, by_step = RepeatedSteps(placed.program, roles, spans, repetition.microbatches), SpansByStep(spans)
    periods, strides = zip(
        *[
            steady_period(spans, by_step, marks_of_step, hosts_s, steps, repetition.times)
            for marks_of_step in marks.by_training_step()
        ],
        strict=True,
    )
    span, before = _with_periods(spans, periods)
    lengths_s = [period.length_s for period in periods]
    return _moved(spans, span, before, lengths_s, steps, np.array(strides), by_step.rows, repetition), periods


def _with_periods(spans: RecordedSpans, periods: Sequence[Period[K, S]]) -> tuple[Ints, Ints]:
    """Return spans by index, those of each period as often as it is put in.

    A row of the second array has for each of them how many periods of each training step are put in before it.
    """
    parts, before = list[Ints](), list[Ints]()
    rest, put_in = np.arange(len(spans.rank)), np.zeros(len(periods), np.int64)
    for number, period in enumerate(periods):
        slack_s = SLACK * period.length_s
        posted_s = spans.posted_s[rest]
        late = posted_s >= period.after.time_s - slack_s
        again = rest[(posted_s >= period.before.time_s - slack_s) & ~late]
        for times, part in enumerate((rest[~late], *[again] * period.times)):
            put_in[number] = times
            parts.append(part)
            before.append(np.tile(put_in, (len(part), 1)))
        rest = rest[late]
    return np.concatenate([*parts, rest]), np.concatenate([*before, np.tile(put_in, (len(rest), 1))])


def _moved(
    spans: RecordedSpans,
    span: Ints,
    before: Ints,
    lengths_s: Sequence[float],
    steps: RepeatedSteps,
    strides: Ints,
    rows: StretchedRows,
    repetition: Repetition,
) -> RecordedSpans:
    """Return the spans with the indices ``span``, each moved by the periods that are put in before it.

    A row of ``before`` has their number for each training step, and ``lengths_s`` the length of one period of each.
    A row of ``strides`` has for a training step how many steps of each lane are in a period.
    """
    step, later_s = spans.step[span], before @ np.array(lengths_s)
    lane, played = steps.lane[step], steps.position[step]
    position = played + (strides.T[lane] * before).sum(axis=1)
    whole_lengths = np.array(steps.lengths) + repetition.times * strides.sum(axis=0)
    first = np.cumsum(whole_lengths) - whole_lengths
    # Steps of a training step are equally many in each lane (`Repetition`): their position says of which it is.
    own_step = played * repetition.steps // np.array(steps.lengths)[lane]
    periods = before[np.arange(len(before)), own_step]
    kept = ("rank", "lane", "template", "is_first", "is_last", "in_row")
    return replace(
        spans,
        **{name: getattr(spans, name)[span] for name in kept},
        **{name: getattr(spans, name)[span] + later_s for name in _TIMES},
        step=step,
        position_in_lane=position,
        stretched=rows.moved(span, later_s),
        repeats=Repeats(periods * repetition.microbatches, first[lane] + position),
    )
