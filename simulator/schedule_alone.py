"""A pipeline `schedule` played without a model: passes of given costs, on a cluster without properties of its own."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.analysis.time.activity import activity
from simulator.analysis.training.bubble import bubble
from simulator.analysis.training.in_flight import peak_activations
from simulator.analysis.training.steady_state import STEPS, UNSTEADY, Steady, until_steady
from simulator.cluster.ideal import ideal_cluster
from simulator.config.pipelines import find_schedule, is_file
from simulator.config.section import is_whole
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.errors import InputError
from simulator.input_files import brief, closest
from simulator.lowering import schedule_program
from simulator.program import Program
from simulator.schedules import SCHEDULES, Schedule, Times, to_csv
from simulator.timeline import Timeline
from simulator.units import counted

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Passes that play in about a minute.
MAX_PASSES = 500_000
#: Shares of 1F1B's memory and of a forward's activations.
MAX_SHARE = 1e6
#: Costs of passes, in any unit: sums of them stay finite.
MAX_COST = 1e12


@dataclass(frozen=True, repr=False)
class ScheduleResult:
    """A pipeline schedule played with unit costs: ``spans`` is a step, or of schedules whose claim is of steps that
    follow one another a period between them; ``steady`` is what that was cut out of."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    order: list[list[str]]
    spans: Timeline
    bubble_ratio_claimed: float | None
    plan: Schedule
    steady: Steady | None = None

    @cached_property
    def warnings(self) -> list[str]:
        """What the user should know before trusting the figures."""
        return [] if self.steady is None or self.steady.stable else [UNSTEADY]

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """One row per pass and transfer of every rank (see `Timeline.frame`)."""
        return self.spans.frame()

    def __repr__(self) -> str:
        known = self.to_dict()
        return (
            f"{self.name}: {counted(self.stages, 'stage')} of {counted(self.chunks, 'chunk')}, "
            f"{counted(self.microbatches, 'micro-batch', 'es')}: "
            f"makespan {known['makespan']:g}, bubble ratio {known['bubble_ratio']:.3f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """order (text actions per rank), makespan, bubble_ratio, bubble_fraction, peak_activations (micro-batch chunks
        per rank); times in the unit of the costs. bubble_ratio_claimed: the closed form of the schedule's file
        with free communication (its authors', or one that follows from its pattern), null where it has none.
        steady_period: whether makespan and bubble are of the period between steps that follow one another."""
        idle, held = (
            bubble(activity(self.spans), [self.spans.ranks]),
            peak_activations(self.steady.played if self.steady else self.spans),
        )
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
            "peak_activations": [held[rank] for rank in self.spans.ranks],
        }

    def to_csv(self) -> str:
        """The order in the text form of ``torch.distributed.pipelining``: a row per rank, an action per cell."""
        rows = self.plan.rows or self.plan.order(self.stages, self.microbatches, self.chunks)
        return to_csv(rows, joined=self.plan.joined)

    def gantt(self, ax: Axes | None = None) -> Figure:
        """A picture of the schedule; into ``ax`` where given."""
        from simulator.output.gantt import gantt

        return gantt(self.spans, ax, title=self.name, unit="units of cost")


def _count(key: str, value: object) -> int:
    """How many of something, from 1 on. Raises `InputError`."""
    if not is_whole(value):
        raise InputError("must be a whole number", key=key, found=brief(value), allowed="1 and more")
    if value < 1:
        raise InputError("too small", key=key, found=int(value), allowed="1 and more")
    return int(value)


def _number(key: str, value: Any, problem: str, most: float, allowed: str = "", *, zero: bool = False) -> float:
    """A number above 0, or from there on with ``zero``. Raises `InputError` that says ``problem``."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0 <= value <= most or (value == 0 and not zero):
        allowed = allowed or f"{'0' if zero else 'above 0'}, up to {most:g}"
        raise InputError(problem, key=key, found=brief(value), allowed=allowed)
    return float(value)


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

    ``forward`` and ``backward`` (whole) are the costs of a chunk, ``comm`` of a transfer, in any one unit of time;
    schedules that split the backward pass take ``weight`` (the weight gradient, half of it where not given) out of it.
    ``zb_memory_limit`` and ``kept`` are for zb_auto: what a rank may hold as a multiple of 1f1b's peak, and the share
    of a forward's activations that its input gradient leaves to the weight gradient (arXiv 2401.10241, table 1).
    ``chunks`` per rank: 1, or 2 where there are several, unless given. A file has sizes of its own.
    Raises `InputError`, and `DeadlockError` on a file whose order cannot be run.
    """
    name = str(name) if isinstance(name, Path) else name
    if not isinstance(name, str) or (name not in SCHEDULES and not is_file(name)):
        allowed = f"{', '.join(SCHEDULES)}, or the path of a .csv file"
        fix = closest(name, SCHEDULES)
        raise InputError("unknown schedule", key="schedule", found=brief(name), allowed=allowed, fix=fix)
    chosen = find_schedule(name, key="schedule")
    if chosen.size is not None:
        stages = chosen.size[0] if stages is None else stages
        microbatches = chosen.size[1] if microbatches is None else microbatches
    if stages is None or microbatches is None:
        missing = "stages" if stages is None else "microbatches"
        raise InputError("is missing", key=missing, allowed="1 and more; only a file has sizes of its own")
    stages, microbatches = _count("stages", stages), _count("microbatches", microbatches)
    forward, backward = _number("F", forward, "not a cost", MAX_COST), _number("B", backward, "not a cost", MAX_COST)
    comm = _number("comm", comm, "not a cost", MAX_COST, zero=True)
    part = "the weight gradient is part of the backward pass"
    allowed = f"0 to {backward:g} (B), I = B - W"
    weight = backward / 2 if weight is None else _number("W", weight, part, backward, allowed, zero=True)
    v = (chosen.chunks or 2) if chunks is None else _count("chunks", chunks)
    if problem := chosen.check(stages, microbatches, v):
        raise InputError(problem, key=f"schedule {name}")
    steps = STEPS if chosen.steady else 1
    if steps * stages * microbatches * v > MAX_PASSES:
        raise InputError(
            f"{stages:,} ranks x {microbatches:,} micro-batches x {v:,} chunks are too many to play",
            key=f"schedule {name}",
            allowed=f"a product of at most {MAX_PASSES // steps:,}",
        )
    zb_memory_limit = _number("zb_memory_limit", zb_memory_limit, "no share", MAX_SHARE)
    kept = _number("kept", kept, "no share", MAX_SHARE)
    if zb_memory_limit != 1 and chosen.search is None:
        searched = ", ".join(which for which, schedule in SCHEDULES.items() if schedule.search)
        what, fix = f"has no meaning with the schedule {name}", f"schedule {searched}"
        raise InputError(what, key="zb_memory_limit", found=zb_memory_limit, fix=fix)
    times = Times.equal(stages * v, forward, backward - weight, weight, comm, zb_memory_limit, kept)
    try:
        tuned = chosen.tuned(times)
        order = [[str(action) for slot in slots for action in slot] for slots in tuned.order(stages, microbatches, v)]
    except ValueError as problem:
        raise InputError(str(problem), key="zb_memory_limit", found=zb_memory_limit) from None

    def build(steps: int) -> Program:
        return schedule_program(tuned, stages, microbatches, v, forward, backward, weight, steps=steps)

    def play(program: Program) -> Timeline:
        return simulate(program, ideal_cluster(stages, comm), Costs.ideal())

    period = until_steady(build, play, microbatches)[1] if chosen.steady else None
    spans = period.period if period else play(build(1))
    claimed = chosen.bubble(stages, microbatches, v, forward, backward - weight, weight)
    return ScheduleResult(name, stages, microbatches, v, order, spans, claimed, tuned, period)
