"""A trace's step, played: first as it was recorded, then under other conditions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.arrays import Floats
from simulator.cluster.ideal import ideal_cluster
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.errors import DeadlockError, InputError
from simulator.traces.classes import CLASSES
from simulator.traces.overlap import busy_time, mean_overlap
from simulator.traces.program import OrderedTrace, ordered, replay_program
from simulator.traces.trace import RankTrace, RunTrace
from simulator.traces.what_if import AS_RECORDED, WhatIf
from simulator.traces.windows import length_s


@dataclass(frozen=True)
class PlayedStep:
    """A step as it was recorded or played.

    ``step_s``: from the first rank's begin to the last end of any. ``overlap``: share of communication beside computing
    kernels, mean over ranks that communicate; None where none does. ``exposed_s``: communication of a rank that nothing
    else covers, mean over all ranks. ``class_s``: seconds of a rank's ops by class, mean over all ranks.
    """

    step_s: float
    overlap: float | None
    exposed_s: float
    class_s: dict[str, float]


@dataclass(frozen=True)
class Replay:
    """A step as recorded, as played, and as played under a change (None: there is none).

    ``unexplained_s``: delays of kernels, mean over ranks, that neither launches nor streams explain. Changes leave
    them as they are.
    """

    step: str
    recorded: PlayedStep
    played: PlayedStep
    changed: PlayedStep | None
    unexplained_s: float

    @property
    def error(self) -> float:
        """How much longer the played step is than the recorded one, relative to it."""
        return self.played.step_s / self.recorded.step_s - 1


def replay(trace: RunTrace, change: WhatIf | None = None) -> Replay:
    """Play the one step that ``trace`` holds. Raises `InputError` where a change names a rank that it lacks."""
    step = ordered(trace)
    ranks = {rank.rank for rank in trace.ranks}
    for number in (change or AS_RECORDED).ranks:
        if number not in ranks:
            raise InputError("is no rank of the trace", key="ranks", found=number, allowed=", ".join(map(str, ranks)))
    return Replay(
        step=trace.ranks[0].steps[0].name,
        recorded=_recorded(step),
        played=_played(step, AS_RECORDED),
        changed=None if change is None else _played(step, change),
        unexplained_s=sum(order.unexplained_s for order in step.orders) / len(step.orders),
    )


def _recorded(step: OrderedTrace) -> PlayedStep:
    """Return the step by the times of the trace."""
    ends = [
        begin_s + length_s(rank, rank.steps[0]) for begin_s, rank in zip(step.begins_s, step.trace.ranks, strict=True)
    ]
    times = [(rank.ops.start_s, rank.ops.end_s) for rank in step.trace.ranks]
    return _summary(step.trace.ranks, times, max(ends))


def _played(step: OrderedTrace, change: WhatIf) -> PlayedStep:
    """Return the step as the engine plays it."""
    program = replay_program(step, change)
    try:
        timeline = simulate(program, ideal_cluster(program.n_ranks), Costs.ideal())
    except DeadlockError:
        raise InputError(
            "traces of ranks do not fit together: they call communication in orders that would wait for ever",
            file=step.trace.files[0],
            fix="the trace of one rank alone, or another step",
        ) from None
    times = []
    end_of = {
        (rank, label): end
        for rank, label, end in zip(timeline.rank.tolist(), timeline.labels, timeline.end_s.tolist(), strict=True)
    }
    for at, rank in enumerate(step.trace.ranks):
        n = len(rank.ops)
        end = np.array([end_of[at, f"o{op}"] for op in range(n)], dtype=np.float64)
        work = np.array([ordered_op.work_s for ordered_op in step.orders[at].ops])
        begin = end - work * _factors(rank, change)
        for op in range(n):
            if (at, op) in step.places:
                begin[op] = end_of[at, f"a{op}"]
        times.append((begin, end))
    return _summary(step.trace.ranks, times, timeline.length_s)


def _factors(rank: RankTrace, change: WhatIf) -> Floats:
    ops = rank.ops
    return np.array(
        [
            change.factor(rank.rank, CLASSES[code], rank.collectives[number] if number >= 0 else None)
            for code, number in zip(ops.code.tolist(), ops.collective.tolist(), strict=True)
        ]
    )


def _summary(ranks: tuple[RankTrace, ...], times: list[tuple[Floats, Floats]], step_s: float) -> PlayedStep:
    busy, sums = [], np.zeros(len(CLASSES))
    for rank, (start, end) in zip(ranks, times, strict=True):
        busy.append(busy_time(start, end, rank.ops.communicates, rank.ops.computes))
        sums += np.bincount(rank.ops.code, weights=end - start, minlength=len(CLASSES))
    n = len(ranks)
    return PlayedStep(
        step_s=step_s,
        overlap=mean_overlap([one.overlap for one in busy]),
        exposed_s=sum(one.exposed_s for one in busy) / n,
        class_s={name: float(sums[code] / n) for code, name in enumerate(CLASSES) if sums[code]},
    )
