"""Two sides of a comparison, class by class: traces of real runs, or a trace and a simulated step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from simulator.timeline import Timeline
from simulator.traces.classes import CLASSES
from simulator.traces.figures import kernel_figures, rank_figures
from simulator.traces.overlap import busy_time, mean_overlap
from simulator.traces.simulated import class_codes
from simulator.traces.trace import EXCHANGE_CODES, RunTrace
from simulator.traces.windows import in_steps

#: Kernels that are listed of those that one side alone has.
LISTED = 10
#: Jobs alike launch about as many products, whatever their kernels: libraries at most split some of them.
UNLIKE_LAUNCHES = 2.0
#: Names are compared by so many characters, without template arguments.
_NAME_LENGTH = 80


@dataclass(frozen=True)
class Side:
    """One side: per rank and step, each the mean over all ranks and over each rank's steps.

    ``step_s``: length of the step. ``class_s`` and ``launches``: class -> seconds and number of its ops. ``exposed_s``:
    communication that nothing else covers. ``overlap``: share of communication beside computing kernels, mean over the
    ranks that communicate; None where none does. ``kernels``: name -> seconds; None where the names are not those that
    drivers write.
    """

    name: str
    step_s: float
    class_s: Mapping[str, float]
    launches: Mapping[str, float]
    exposed_s: float
    overlap: float | None
    kernels: Mapping[str, float] | None = field(default=None)


@dataclass(frozen=True, slots=True)
class ClassRow:
    """A class on both sides: seconds and launches, None on the side that lacks the class."""

    name: str
    seconds: tuple[float | None, float | None]
    launches: tuple[float | None, float | None]

    @property
    def ratio(self) -> float | None:
        """The second side's seconds over the first's, where both have the class."""
        first, second = self.seconds
        return second / first if first and second is not None else None


@dataclass(frozen=True)
class Comparison:
    """Rows by class, and the kernels that one side alone has, with their seconds, longest first."""

    sides: tuple[Side, Side]
    rows: tuple[ClassRow, ...]
    alone: tuple[tuple[tuple[str, float], ...], tuple[tuple[str, float], ...]]


def compare(first: Side, second: Side) -> Comparison:
    """Return what the sides have, class by class."""
    sides = first, second
    rows = tuple(
        ClassRow(
            name,
            (first.class_s.get(name), second.class_s.get(name)),
            (first.launches.get(name), second.launches.get(name)),
        )
        for name in CLASSES
        if any(name in side.class_s for side in sides)
    )
    return Comparison(sides, rows, (_alone(first, second), _alone(second, first)))


def _alone(side: Side, other: Side) -> tuple[tuple[str, float], ...]:
    if side.kernels is None or other.kernels is None:
        return ()
    missing = [(name, seconds) for name, seconds in side.kernels.items() if name not in other.kernels]
    return tuple(sorted(missing, key=lambda entry: -entry[1])[:LISTED])


def short_name(name: str) -> str:
    """Return the name of a kernel without arguments, template arguments and return type.

    >>> short_name("void at::native::elementwise_kernel<128, 2, at::f<float>>(int, float)")
    'at::native::elementwise_kernel'
    """
    text, depth = [], 0
    for sign in name.removeprefix("void ").replace("(anonymous namespace)", "{anonymous}"):
        if sign == "(" and not depth:
            break
        depth += {"<": 1, ">": -1}.get(sign, 0)
        if not depth and sign != ">":
            text.append(sign)
    return "".join(text)[:_NAME_LENGTH] or name[:_NAME_LENGTH]


def traced_side(trace: RunTrace, name: str) -> Side:
    """Return what a mean rank of ``trace`` does in a mean step; ops outside of marked steps are left out."""
    n = len(trace.ranks)
    step_s, exposed_s, overlaps = 0.0, 0.0, []
    class_s: defaultdict[str, float] = defaultdict(float)
    launches: defaultdict[str, float] = defaultdict(float)
    kernels: defaultdict[str, float] = defaultdict(float)
    for rank in map(in_steps, trace.ranks):
        figures = rank_figures(rank)
        step_s += figures.step_s / n
        exposed_s += figures.exposed_s / n
        overlaps.append(figures.overlap)
        for kernel in kernel_figures(RunTrace((rank,))):
            class_s[kernel.kernel_class] += kernel.seconds / n
            launches[kernel.kernel_class] += kernel.launches / n
            kernels[short_name(kernel.name)] += kernel.seconds / n
    return Side(name, step_s, dict(class_s), dict(launches), exposed_s, mean_overlap(overlaps), dict(kernels))


def simulated_side(timeline: Timeline, name: str) -> Side:
    """Return what a mean rank of a simulated step does.

    Communication counts from when all its ranks have come, as in traces of simulated steps: waits are left out.
    """
    rows = timeline.rows()
    code = class_codes(rows)
    exchanges = np.isin(code, EXCHANGE_CODES)
    start, end = rows["start_s"].astype(np.float64), rows["end_s"].astype(np.float64)
    rank = rows["rank"].astype(np.int64)
    weight = np.array([timeline.ranks_like[number] for number in rank.tolist()], dtype=np.float64)
    n = sum(timeline.ranks_like.values())
    seconds = np.bincount(code, weights=(end - start) * weight, minlength=len(CLASSES)) / n
    counts = np.bincount(code, weights=weight, minlength=len(CLASSES)) / n
    computes = ~exchanges & (code != CLASSES.index("copy"))
    likes = list(timeline.ranks_like.values())
    busy = [
        busy_time(start[mine], end[mine], exchanges[mine], computes[mine])
        for mine in (rank == number for number in timeline.ranks_like)
    ]
    present = np.flatnonzero(counts).tolist()
    return Side(
        name=name,
        step_s=timeline.step_time_s,
        class_s={CLASSES[at]: float(seconds[at]) for at in present},
        launches={CLASSES[at]: float(counts[at]) for at in present},
        exposed_s=sum(like * one.exposed_s for like, one in zip(likes, busy, strict=True)) / n,
        overlap=mean_overlap([one.overlap for one in busy], likes),
    )


def unlike_jobs(comparison: Comparison) -> list[str]:
    """Return a sentence where one side launches so many more products that its job can hardly be the other's."""
    for row in comparison.rows:
        first, second = row.launches
        if row.name == "matmul" and first and second and max(first, second) > UNLIKE_LAUNCHES * min(first, second):
            names = [side.name for side in comparison.sides]
            return [
                f"in a step {names[0]} launches {first:,.6g} kernels of class matmul and {names[1]} {second:,.6g}: "
                "layers or micro-batches differ, and so does the work that is compared"
            ]
    return []


def missing_classes(comparison: Comparison) -> list[str]:
    """Return a sentence per class that one side lacks."""
    first, second = (side.name for side in comparison.sides)
    sentences = []
    for row in comparison.rows:
        for name, seconds in zip((first, second), row.seconds, strict=True):
            if seconds is None:
                sentences.append(f"{name} has no kernels of class {row.name}")
    return sentences
