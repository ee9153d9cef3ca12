"""Python entry point of a pipeline schedule without a model: `schedule`."""

from __future__ import annotations

import numbers
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from simulator.analysis.time.activity import activity
from simulator.analysis.training.bubble import bubble
from simulator.analysis.training.in_flight import peak_activations
from simulator.analysis.training.steady_state import STEPS, UNSTEADY, SteadyState, until_steady
from simulator.cluster.ideal import ideal_cluster
from simulator.config.pipelines import find_schedule, is_file
from simulator.config.section import is_whole
from simulator.costs import Costs
from simulator.engine import UnsteadyError, simulate
from simulator.errors import InputError, raise_all
from simulator.input_files import brief, closest
from simulator.lowering import PipelineSize, ShortenedStep, schedule_program, shortened_order, shortening
from simulator.program import Program, Repetition
from simulator.results import TimelineResult
from simulator.schedules import SCHEDULES, Schedule, Times, to_csv
from simulator.timeline import Timeline
from simulator.units import counted

#: Most passes, which play in about a minute.
MAX_PASSES = 500_000
#: Largest share of 1F1B's memory and of a forward's activations.
MAX_SHARE = 1e6
#: Micro-batches for each rank that are played where the pipeline is full, in a first attempt and a second one.
#: Where a transfer takes a tenth of a forward pass, zb_h1 and zb_auto need 0.75 on 12 and 16 ranks, and less on 32.
#: Where it takes a fifth they need more on 12 ranks, which the second attempt has.
ATTEMPTS = (0.75, shortening.SETTLING)
#: Largest cost of a pass, in any unit: sums of costs stay finite.
MAX_COST = 1e12


@dataclass(frozen=True, repr=False)
class ScheduleResult(TimelineResult):
    """Result of a pipeline schedule played with unit costs.

    ``spans``: the step's Timeline; where steps were played in a row, one period of their ``steady`` state.
    ``bubble_ratio_claimed``: closed form of the schedule's file with free communication, None where it has none.
    """

    command: ClassVar[str] = "schedule"
    time_unit: ClassVar[str] = "units of cost"

    name: str
    stages: int
    microbatches: int
    chunks: int
    order: list[list[str]]
    spans: Timeline
    bubble_ratio_claimed: float | None
    plan: Schedule
    steady: SteadyState | None = None

    @property
    def job_name(self) -> str:
        """Name of the schedule, or path of its file."""
        return self.name

    @cached_property
    def warnings(self) -> list[str]:
        """Notes that a user should read before trusting the figures."""
        return [] if self.steady is None or self.steady.stable else [UNSTEADY]

    def __repr__(self) -> str:
        """Return sizes, makespan and bubble in a line."""
        return (
            f"{self.name}: {counted(self.stages, 'stage')} of {counted(self.chunks, 'chunk')}, "
            f"{counted(self.microbatches, 'micro-batch', 'es')}: "
            f"makespan {self.report['makespan']:g}, bubble ratio {self.report['bubble_ratio']:.3f}"
        )

    def content(self) -> dict[str, Any]:
        """Return the figures under the names of the JSON output; times in the unit of the costs.

        ``order``: text actions per rank. ``peak_activations``: micro-batch chunks per rank. ``steady_period``: makespan
        and bubble are those of the period between steps that follow one another.
        """
        idle = bubble(activity(self.spans), [self.spans.ranks])
        in_flight = peak_activations(self.steady.played if self.steady else self.spans)
        return {
            "name": self.name,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "chunks": self.chunks,
            "order": self.order,
            "makespan": self.spans.step_time_s,
            "bubble_ratio": idle.ratio,
            "bubble_fraction": idle.fraction,
            "bubble_ratio_claimed": self.bubble_ratio_claimed,
            "steady_period": self.plan.steady,
            "peak_activations": [in_flight[rank] for rank in self.spans.ranks],
        }

    def to_csv(self) -> str:
        """Return the order in the text form of ``torch.distributed.pipelining``: a row per rank, an action per cell."""
        rows = self.plan.rows or self.plan.order(self.stages, self.microbatches, self.chunks)
        return to_csv(rows, joined=self.plan.joined)


def _whole_number(key: str, value: object) -> int:
    """Return a whole number from 1 on. Raises `InputError`."""
    if not is_whole(value):
        raise InputError("must be a whole number", key=key, found=brief(value), allowed="1 and more")
    if value < 1:
        raise InputError("too small", key=key, found=int(value), allowed="1 and more")
    return int(value)


def _real_number(key: str, value: Any, problem: str, most: float, allowed: str = "", *, zero: bool = False) -> float:
    """Return a number above 0, or from 0 on with ``zero``. Raises `InputError` with the text ``problem``."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0 <= value <= most or (value == 0 and not zero):
        allowed = allowed or f"{'0' if zero else 'above 0'}, up to {most:g}"
        raise InputError(problem, key=key, found=brief(value), allowed=allowed)
    return float(value)


def _named_schedule(name: object) -> Schedule:
    """Return the shipped schedule, or that of a CSV file. Raises `InputError` for any other name."""
    if not isinstance(name, str) or (name not in SCHEDULES and not is_file(name)):
        allowed = f"{', '.join(SCHEDULES)}, or the path of a .csv file"
        fix = closest(name, SCHEDULES)
        raise InputError("unknown schedule", key="schedule", found=brief(name), allowed=allowed, fix=fix)
    return find_schedule(name, key="schedule")


def _sizes(plan: Schedule, stages: int | None, microbatches: int | None, chunks: int | None) -> PipelineSize:
    """Return stages, micro-batches and chunks per rank. Raises `InputError` where they are missing or no sizes."""
    if plan.size is not None:
        stages = plan.size[0] if stages is None else stages
        microbatches = plan.size[1] if microbatches is None else microbatches
    allowed = "1 and more; only a file has sizes of its own"
    raise_all(
        InputError("is missing", key=key, allowed=allowed, fix=f"a number, such as {usual}")
        for key, size, usual in (("stages", stages, 4), ("microbatches", microbatches, 8))
        if size is None
    )
    stages, microbatches = _whole_number("stages", stages), _whole_number("microbatches", microbatches)
    return stages, microbatches, (plan.chunks or 2) if chunks is None else _whole_number("chunks", chunks)


def _check_sizes(name: str, plan: Schedule, stages: int, microbatches: int, chunks: int) -> None:
    """Raise `InputError` where the schedule does not allow the sizes, or has too many passes to play."""
    if problem := plan.check(stages, microbatches, chunks):
        raise InputError(problem, key=f"schedule {name}")
    steps = STEPS if plan.steady else 1
    if steps * stages * microbatches * chunks > MAX_PASSES:
        raise InputError(
            f"{stages:,} ranks x {microbatches:,} micro-batches x {chunks:,} chunks are too many to play",
            key=f"schedule {name}",
            allowed=f"a product of at most {MAX_PASSES // steps:,}",
        )


def _first_steady(
    plan: Schedule, sizes: PipelineSize, costs: tuple[float, float, float], comm: float
) -> tuple[Timeline, SteadyState | None]:
    """Return the Timeline of the first shortened step that settles; that of the whole step where none does.

    Beside it is the steady state of steps in a row, for a schedule that claims one. ``costs``: of a chunk's forward
    pass, of its backward pass, and of the weight gradient in it.
    """
    tried: set[Repetition] = set()
    for short in (shortened_order(plan, sizes, settling=share) for share in ATTEMPTS):
        if short is not None and short.repetition not in tried:
            tried.add(short.repetition)
            with suppress(UnsteadyError):
                return _played(plan, sizes, costs, comm, short)
    return _played(plan, sizes, costs, comm, None)


def _played(
    plan: Schedule, sizes: PipelineSize, costs: tuple[float, float, float], comm: float, short: ShortenedStep | None
) -> tuple[Timeline, SteadyState | None]:
    """Return what a step, or a ``short`` one, is played to, or a period of several and their steady state."""
    passes = None if short is None else short.order

    def build(steps: int) -> Program:
        return schedule_program(plan, *sizes, *costs, steps=steps, passes=passes)

    def play(program: Program, steps: int) -> Timeline:
        repetition = None if short is None else short.repetition_in(steps)
        return simulate(program, ideal_cluster(sizes[0], comm), Costs.ideal(), repetition=repetition)

    if not plan.steady:
        return play(build(1), 1), None
    _, steady = until_steady(build, play, sizes[1])
    return steady.period, steady


def schedule(
    name: str | Path,
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float | None = None,
    comm: float = 0.0,
    zb_memory_limit: float = 1.0,
    kept: float = 1.0,
) -> ScheduleResult:
    """Play pipeline schedule ``name``, or that of a CSV file, on ``stages`` ranks without a model.

    ``forward`` and ``backward`` (whole) are the costs of a micro-batch on a rank's whole share of the model, of which
    each chunk takes an equal part. ``comm`` is the cost of a transfer, in the same unit of time. So schedules with more
    chunks do the same work. Schedules that split the backward pass take ``weight`` (the weight gradient) out of it
    [half of it].
    ``zb_memory_limit`` and ``kept`` are for zb_auto. The first is the memory of a rank as a multiple of 1f1b's peak.
    The second is the share of a forward's activations that its input gradient leaves to the weight gradient (arXiv
    2401.10241, table 1). ``chunks`` per rank: [1, or 2 where there are several]. A file has sizes of its own. Raises
    `InputError`, and `DeadlockError` on a file whose order cannot be run.
    """
    name = str(name) if isinstance(name, Path) else name
    plan = _named_schedule(name)
    stages, microbatches, chunks = _sizes(plan, stages, microbatches, chunks)
    forward = _real_number("F", forward, "not a cost", MAX_COST)
    backward = _real_number("B", backward, "not a cost", MAX_COST)
    comm = _real_number("comm", comm, "not a cost", MAX_COST, zero=True)
    part = "the weight gradient is part of the backward pass"
    allowed = f"0 to {backward:g} (B), I = B - W"
    weight = backward / 2 if weight is None else _real_number("W", weight, part, backward, allowed, zero=True)
    _check_sizes(name, plan, stages, microbatches, chunks)
    sizes = stages, microbatches, chunks
    zb_memory_limit = _real_number("zb_memory_limit", zb_memory_limit, "no share", MAX_SHARE)
    kept = _real_number("kept", kept, "no share", MAX_SHARE)
    if zb_memory_limit != 1 and plan.search is None:
        searched = ", ".join(which for which, schedule in SCHEDULES.items() if schedule.search)
        what, fix = f"has no meaning with the schedule {name}", f"schedule {searched}"
        raise InputError(what, key="zb_memory_limit", found=zb_memory_limit, fix=fix)
    forward, backward, weight = forward / chunks, backward / chunks, weight / chunks  # of a chunk from here on
    times = Times.equal(stages * chunks, forward, backward - weight, weight, comm, zb_memory_limit, kept)
    try:
        plan = plan.tuned(times)
        order = [
            [str(action) for slot in slots for action in slot] for slots in plan.order(stages, microbatches, chunks)
        ]
    except ValueError as problem:
        raise InputError(str(problem), key="zb_memory_limit", found=zb_memory_limit) from None
    spans, steady = _first_steady(plan, sizes, (forward, backward, weight), comm)
    claim = plan.bubble(*sizes, forward, backward - weight, weight)
    return ScheduleResult(name, *sizes, order, spans, claim, plan, steady)
