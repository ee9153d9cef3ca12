"""Shortened steps: fewer micro-batches, where the passes between filling and draining repeat themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from simulator.config import Workload
from simulator.models import checks_every_pass
from simulator.program import Repetition
from simulator.schedules import Order, Schedule, Slot

#: Periods that are played where the pipeline is full, and micro-batches in them at least: some until it has settled,
#: and two that are compared.
PERIODS, MICROBATCHES = 2.5, 8
#: Micro-batches for each rank that are played where the pipeline is full. What the last rank holds back comes to the
#: first from rank to rank, a pass later at each. Rates of shared links settle for half as long again. In a step of
#: GPT-530B in 35 stages on racks of 72 GPUs the first rank has settled after 41 passes.
SETTLING = 1.5
#: A step is shortened where no more than this share of its micro-batches is left: it costs as much for nothing where no
#: period settles.
MOST = 0.5
#: Fewer passes are not worth the attempt: where no period settles, the shortened step was played for nothing.
LEAST_LEFT_OUT = 5_000


class ShortenedStep(NamedTuple):
    """A ``workload`` with fewer micro-batches than the whole one, and what that leaves out."""

    workload: Workload
    repetition: Repetition


def shortened(workload: Workload) -> ShortenedStep | None:
    """Return the step of ``workload`` with fewer micro-batches; None where it does not repeat itself, or too seldom.

    The order of passes tells the period, and that the whole is the shortened one with periods put in. Orders that
    depend on the seconds of passes, that a file gives, or that go on into the next step are left as they are. So are
    steps that do not settle, and those whose end grows with the number of passes. Background traffic has a period of
    its own. A replica on a changed part of the cluster falls behind the others.
    """
    parallelism, microbatches = workload.parallelism, workload.microbatches
    if checks_every_pass(workload):
        return None
    if workload.cluster.background or (workload.cluster.overrides and parallelism.dp > 1):
        return None
    schedule = parallelism.pipeline_schedule
    fixed = schedule.search is None and schedule.size is None and schedule.drains and not schedule.steady
    # What graphs of split passes keep is given back all at once behind the last pass.
    gives_back_late = schedule.splits and workload.stage_runtime.keeps_graphs
    if not fixed or gives_back_late or schedule.copies > 1 or parallelism.data_parallel == "async":
        return None
    size = _Sizes(schedule, parallelism.pp, parallelism.vpp)
    whole = size.order(microbatches)
    passes = sum(map(len, whole))
    if passes < LEAST_LEFT_OUT:
        return None
    for period in range(1, int(microbatches / (PERIODS + 1)) + 1):
        if not size.is_like(microbatches - period, microbatches):
            continue
        shorter = size.order(microbatches - period)
        fits = _periods(whole, shorter, period)
        if fits:
            times = int(fits - max(PERIODS, max(MICROBATCHES, SETTLING * parallelism.pp) / period))
            fewer = microbatches - times * period
            left_out = times * period / microbatches * passes
            worth_it = times >= 1 and fewer <= MOST * microbatches and left_out >= LEAST_LEFT_OUT
            if not worth_it or not size.is_like(fewer, microbatches):
                return None
            repetition = Repetition(period, times, frozenset(_passes(whole, shorter, period)))
            return ShortenedStep(_with_microbatches(workload, fewer), repetition)
    return None


class _Sizes(NamedTuple):
    """A schedule on so many ranks and chunks, with any number of micro-batches."""

    schedule: Schedule
    ranks: int
    chunks: int

    def order(self, microbatches: int) -> Order:
        return self.schedule.order(self.ranks, microbatches, self.chunks)

    def is_like(self, fewer: int, microbatches: int) -> bool:
        """Return whether the schedule can be built with ``fewer``, and posts its transfers in the same way."""
        schedule, ranks = self.schedule, self.ranks
        legal = schedule.check(ranks, fewer, self.chunks) is None
        return legal and schedule.batching(ranks, fewer) == schedule.batching(ranks, microbatches)


def _with_microbatches(workload: Workload, microbatches: int) -> Workload:
    training = workload.training
    batch = microbatches * training.micro_batch * workload.parallelism.dp
    return workload.model_copy(update={"training": training.model_copy(update={"global_batch": batch})})


def _periods(whole: Order, shorter: Order, microbatches: int) -> float:
    """Return how many periods of ``microbatches`` follow each other on every rank; 0 where the orders differ otherwise.

    ``shorter`` has one period less.
    """
    fits: list[float] = []
    for slots, fewer_slots in zip(whole, shorter, strict=True):
        stride = len(slots) - len(fewer_slots)
        same = _common(slots, fewer_slots, 0)
        late = _common(slots[::-1], fewer_slots[::-1], microbatches)
        if stride < 1 or same + late < len(fewer_slots):
            return 0
        # From the first slot of the common end to the last of the common beginning, slots come again a period later.
        fits.append((same + late - len(fewer_slots)) / stride + 1)
    return min(fits)


def _passes(whole: Order, shorter: Order, microbatches: int) -> Iterator[tuple[int, str, int]]:
    """Yield the passes of the second period on every rank.

    A weight gradient may be a whole backward pass.
    """
    for slots, fewer_slots in zip(whole, shorter, strict=True):
        stride = len(slots) - len(fewer_slots)
        first = len(fewer_slots) - _common(slots[::-1], fewer_slots[::-1], microbatches) + stride
        for action in (action for slot in slots[first : first + stride] for action in slot):
            yield action
            if action.kind == "W":
                yield action._replace(kind="B")


def _common(slots: Sequence[Slot], fewer_slots: Sequence[Slot], later: int) -> int:
    """Return how many slots at the beginning are those of ``fewer_slots``, so many micro-batches ``later``."""
    for number, (slot, like) in enumerate(zip(slots, fewer_slots, strict=False)):
        if slot != (tuple([one._replace(microbatch=one.microbatch + later) for one in like]) if later else like):
            return number
    return min(len(slots), len(fewer_slots))
