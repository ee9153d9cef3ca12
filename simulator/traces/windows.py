"""Parts of traces: one step of a rank, or of all ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simulator.arrays import Bools
from simulator.errors import InputError
from simulator.traces.trace import STEP_MARK, RankTrace, RunTrace, TracedStep


def whole(rank: RankTrace) -> TracedStep:
    """Return the time from the first call or op of a rank to the last end as one step."""
    starts, ends = [rank.ops.start_s], [rank.ops.end_s]
    launching = np.unique(rank.ops.call[rank.ops.call >= 0])
    if len(launching):
        starts.append(rank.calls.start_s[launching])
    return TracedStep(
        "trace",
        min(float(column.min()) for column in starts),
        max(float(column.max()) for column in ends),
        is_marked=False,
    )


def steps_of(rank: RankTrace) -> tuple[TracedStep, ...]:
    """Return the marked steps in which a rank launched anything; without marks, the whole as one.

    A mark without launches is one that a profiler repeats for its own schedule.
    """
    return tuple(step for step in rank.steps if _launched_in(rank, step).any()) or (whole(rank),)


def _launched_in(rank: RankTrace, step: TracedStep) -> Bools:
    """Return which ops were launched in a step; an op without a launch counts to the step in which it starts."""
    if not step.is_marked:
        return np.ones(len(rank.ops), dtype=bool)
    return (rank.begun_s >= step.start_s) & (rank.begun_s < step.end_s)


def step_ops(rank: RankTrace, step: TracedStep) -> RankTrace:
    """Return a rank's trace with the ops of ``step`` alone: those that were launched in it."""
    return replace(rank, ops=rank.ops.select(_launched_in(rank, step)), steps=(step,))


def in_steps(rank: RankTrace) -> RankTrace:
    """Return a rank's trace with the ops of its steps alone, without those before, between and behind them."""
    steps = steps_of(rank)
    chosen = np.zeros(len(rank.ops), dtype=bool)
    for step in steps:  # one by one: a row per step and an entry per op would fill the memory
        chosen |= _launched_in(rank, step)
    return replace(rank, ops=rank.ops.select(chosen), steps=steps)


def length_s(rank: RankTrace, step: TracedStep) -> float:
    """Return the length of a step: from its mark's start to its end, or to the end of the last op launched in it."""
    ops = step_ops(rank, step).ops
    return max(step.end_s, float(ops.end_s.max(initial=step.end_s))) - step.start_s


def one_step(trace: RunTrace, name: str | None) -> RunTrace:
    """Return the step ``name`` of all ranks; without a name the first that all ranks have marked.

    ``name`` may be the number alone, as 552 for ProfilerStep#552. Raises `InputError`.
    """
    by_rank = [{step.name: step for step in reversed(steps_of(rank))} for rank in trace.ranks]
    names = list(reversed(by_rank[0]))
    shared = [text for text in names if all(text in steps for steps in by_rank)]
    if not shared:
        raise InputError("ranks share no step", file=trace.files[0], found=", ".join(names))
    wanted = shared[0] if name is None else name if name in shared else f"{STEP_MARK}#{name}"
    if wanted not in shared:
        raise InputError("there is no such step", key="name", found=name, allowed=", ".join(shared))
    return RunTrace(tuple(step_ops(rank, steps[wanted]) for rank, steps in zip(trace.ranks, by_rank, strict=True)))
