"""Shortened steps: fewer micro-batches, where the passes between filling and draining repeat themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from simulator.arrays import Ints
from simulator.config import Workload
from simulator.models import checks_every_pass
from simulator.program import Repetition
from simulator.schedules import Action, Order, Schedule, Slot

#: Pipeline ranks, micro-batches, and chunks per rank.
PipelineSize = tuple[int, int, int]

#: Periods that are played where the pipeline is full, and micro-batches in them at least: some until it has settled,
#: and two that are compared.
PERIODS, MICROBATCHES = 2.5, 8
#: Micro-batches for each rank that are played where the pipeline is full. What the last rank holds back comes to the
#: first from rank to rank, a pass later at each. Rates of shared links settle for half as long again. In a step of
#: GPT-530B in 35 stages on racks of 72 GPUs the first rank has settled after 41 passes.
SETTLING = 1.5
#: A step is shortened where at most this share of its micro-batches is played. An attempt that fails costs about the
#: share that it played. Where the limit is best was not measured.
MOST_PLAYED = 0.5
#: The same where experts exchange tokens. Their transfers share network cards with those of the pipeline. Some of these
#: jobs never settle, and others take dozens of periods, so that little is risked. Where the limit is best was not
#: measured.
MOST_PLAYED_WITH_EXPERTS = 0.125
#: A period is one of the step where at least this share of each rank's passes repeats with it. The others fill and
#: drain the pipeline, where other periods may come.
LEAST_REPEATED = 0.5
#: Fewer passes are not worth the attempt: where no period settles, the shortened step was played for nothing.
LEAST_LEFT_OUT = 5_000


class ShortenedStep(NamedTuple):
    """The ``order`` of passes of a step with fewer micro-batches than it has, and what that leaves out.

    Passes before the periods left out are numbered as in the whole step, which has ``whole_microbatches``.
    """

    order: Order
    repetition: Repetition
    whole_microbatches: int

    def repetition_in(self, steps: int) -> Repetition:
        """Return what is left out of so many ``steps`` in a row, each shortened alike.

        Their micro-batches are numbered through, as many for each step as the whole one has.
        """
        one = self.repetition
        passes = frozenset(
            (stage, kind, microbatch + step * self.whole_microbatches)
            for step in range(steps)
            for stage, kind, microbatch in one.passes
        )
        return one._replace(passes=passes, steps=steps)


def shortened(workload: Workload) -> ShortenedStep | None:
    """Return the step of ``workload`` with fewer micro-batches; None where it does not repeat itself, or too seldom.

    Orders that depend on the seconds of passes are left as they are. So are steps in a row, whose hosts run farther
    ahead from period to period, and steps that do not settle. Background traffic has a period of its own. A replica on
    a changed part of the cluster falls behind the others.
    """
    parallelism = workload.parallelism
    if checks_every_pass(workload):
        return None
    if workload.cluster.background or (workload.cluster.overrides and parallelism.dp > 1):
        return None
    schedule = parallelism.pipeline_schedule
    # What graphs of split passes keep is given back all at once behind the last pass.
    gives_back_late = schedule.splits and workload.stage_runtime.keeps_graphs
    if gives_back_late or parallelism.data_parallel == "async" or schedule.search is not None or schedule.steady:
        return None
    most = MOST_PLAYED_WITH_EXPERTS if parallelism.ep > 1 else MOST_PLAYED
    return shortened_order(schedule, (parallelism.pp, workload.microbatches, parallelism.vpp), most)


def shortened_order(
    schedule: Schedule, size: PipelineSize, most: float = MOST_PLAYED, settling: float = SETTLING
) -> ShortenedStep | None:
    """Return a step of ``schedule`` with at most the share ``most`` of its micro-batches; None where that is no gain.

    Orders that a file gives, or that go on into the next step, are left as they are. ``settling``: micro-batches for
    each rank that are played where the pipeline is full. The order of passes tells the period, and the shortened order
    is that of the whole without some periods of each rank.
    """
    ranks, microbatches, chunks = size
    copies = schedule.copies
    if schedule.size is not None or not schedule.drains:
        return None
    if microbatches * ranks * chunks * (3 if schedule.splits else 2) < LEAST_LEFT_OUT:
        return None
    whole = [_Row(slots) for slots in schedule.order(*size)]
    passes = sum(len(row.passes) for row in whole)
    for period in range(1, int(microbatches / copies / (PERIODS + 1)) + 1):
        spells = _spells(whole, period) if _is_like(schedule, size, microbatches - copies * period) else []
        if spells:
            fits = min(spell.length / spell.stride + 1 for spell in spells)
            times = int(fits - max(PERIODS, max(MICROBATCHES, settling * ranks) / period))
            fewer = microbatches - copies * times * period
            left_out = (microbatches - fewer) / microbatches * passes
            worth_it = times >= 1 and fewer <= most * microbatches and left_out >= LEAST_LEFT_OUT
            if not worth_it or not _is_like(schedule, size, fewer):
                return None
            order = [row.without(spell, times, period) for row, spell in zip(whole, spells, strict=True)]
            return ShortenedStep(order, Repetition(period, times, frozenset(_passes(whole, spells))), microbatches)
    return None


def _is_like(schedule: Schedule, size: PipelineSize, fewer: int) -> bool:
    """Return whether the schedule can be built with ``fewer`` micro-batches, and posts transfers in the same way."""
    ranks, microbatches, chunks = size
    legal = schedule.check(ranks, fewer, chunks) is None
    return legal and schedule.batching(ranks, fewer) == schedule.batching(ranks, microbatches)


class _Spell(NamedTuple):
    """The passes of a rank that come again ``stride`` passes later: so many, from the ``first`` on."""

    first: int
    length: int
    stride: int


class _Row:
    """The passes of a rank in their order.

    ``kind``: their stages, letters, numbers of passes in their slots and places there, a row each. ``microbatch``: of
    each pass.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self.passes = [action for slot in slots for action in slot]
        stage, letter, microbatch = zip(*self.passes, strict=True)
        sizes = np.fromiter(map(len, slots), np.int64, len(slots))
        self._starts = np.cumsum(sizes) - sizes
        in_slot = np.repeat(sizes, sizes)
        place = np.arange(len(in_slot)) - np.repeat(self._starts, sizes)
        stages, letters, self.microbatch = (
            np.fromiter(numbers, np.int64, len(in_slot)) for numbers in (stage, map(ord, letter), microbatch)
        )
        self.kind: Ints = np.array([stages, letters, in_slot, place])

    def spell(self, period: int) -> _Spell | None:
        """Return the passes around the middle that come again ``period`` micro-batches later; None unless most do."""
        kind, microbatch = self.kind, self.microbatch
        middle = len(microbatch) // 2 - 1
        later = np.flatnonzero(microbatch[middle:] == microbatch[middle] + period)
        later = later[(kind[:, middle + later] == kind[:, middle : middle + 1]).all(axis=0)]
        if not len(later) or later[0] == 0:
            return None
        stride = int(later[0])
        again = (kind[:, stride:] == kind[:, :-stride]).all(axis=0)
        again &= microbatch[stride:] == microbatch[:-stride] + period
        ends = np.flatnonzero(~np.concatenate(([False], again, [False])))
        at = int(np.searchsorted(ends, middle + 1))
        first, length = int(ends[at - 1]), int(ends[at] - ends[at - 1] - 1)
        return _Spell(first, length, stride) if length + stride >= LEAST_REPEATED * len(microbatch) else None

    def without(self, spell: _Spell, times: int, period: int) -> list[Slot]:
        """Return the slots of the row without the first ``times`` strides of a spell.

        Micro-batches behind them are numbered ``period`` lower for each stride.
        """
        first = int(np.searchsorted(self._starts, spell.first))
        behind = int(np.searchsorted(self._starts, self._starts[first] + times * spell.stride))
        later = [
            tuple([action._replace(microbatch=action.microbatch - times * period) for action in slot])
            for slot in self._slots[behind:]
        ]
        return [*self._slots[:first], *later]


def _spells(rows: Sequence[_Row], period: int) -> list[_Spell]:
    """Return the spell of each row; none where a row has none."""
    spells: list[_Spell] = []
    for row in rows:
        spell = row.spell(period)
        if spell is None:
            return []
        spells.append(spell)
    return spells


def _passes(rows: Sequence[_Row], spells: Sequence[_Spell]) -> Iterator[Action]:
    """Yield the passes of the second period on every rank.

    A weight gradient may be a whole backward pass.
    """
    for row, spell in zip(rows, spells, strict=True):
        second = spell.first + spell.stride
        for action in row.passes[second : second + spell.stride]:
            yield action
            if action.kind == "W":
                yield action._replace(kind="B")
