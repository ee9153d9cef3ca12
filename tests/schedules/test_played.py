"""Schedules played on the clock: the bubbles and peaks that their papers claim."""

import itertools
import math

import pytest

from simulator.analysis.time.activity import activity
from simulator.analysis.training.bubble import bubble
from simulator.analysis.training.in_flight import peak_activations
from simulator.analysis.training.steady_state import steady
from simulator.cluster.ideal import ideal_cluster
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.engine.invariants import check
from simulator.lowering import schedule_program
from simulator.lowering.pipeline import lower
from simulator.program import Block, Compute, Fixed, Program, Role, Step
from simulator.schedules import SCHEDULES, Action
from simulator.timeline import Timeline
from tests.support.grids import one_in, thinned

SWEEP = [
    (name, p, m, v)
    for name in SCHEDULES
    for p, m, v in itertools.product((1, 2, 3, 5, 16), (1, 2, 6, 15, 32, 64), (1, 2, 3, 4))
    if SCHEDULES[name].check(p, m, v) is None and p * m * v <= (256 if SCHEDULES[name].steady else 1024)
]


def play(
    name: str, p: int, m: int, v: int, f: float = 1.0, b: float = 2.0, comm: float = 0.0, w: float = 0.0, steps: int = 1
) -> Timeline:
    """Stages of equal length; ``f`` and ``b`` are a rank's for one micro-batch, of which W takes half or ``w``."""
    program = schedule_program(SCHEDULES[name], p, m, v, f / v, b / v, (w or b / 2) / v, steps=steps)
    timeline = simulate(program, ideal_cluster(p, comm), Costs.ideal())
    check(program, timeline)
    return timeline


def played(name: str, p: int, m: int, v: int, f: float, b: float) -> tuple[Timeline, Timeline]:
    """Return what the claim is of, a step or a period between steps, and all that was played for it."""
    schedule = SCHEDULES[name]
    if not schedule.steady:
        timeline = play(name, p, m, v, f, b)
        return timeline, timeline
    steps = 4 if schedule.drains else 4 + 2 * math.ceil(p / m)
    found = steady(play(name, p, m, v, f, b, steps=steps), steps, m)
    assert found.stable
    return found.period, found.played


def ratio(timeline: Timeline) -> float:
    return bubble(activity(timeline), [timeline.ranks]).ratio


@pytest.mark.parametrize(("name", "p", "m", "v"), thinned(SWEEP, 24))
def test_bubble_and_peak_are_the_claims(name: str, p: int, m: int, v: int) -> None:
    """Idle over busy: naive p - 1, GPipe and 1F1B (p - 1) / m, interleaved (p - 1) / (v m), whatever F and B are;
    zb_h1 (p - 1) / 3m, zb_h2, zb_v and async_1f1b none between steps, dualpipe
    (p/2 - 1)(F&B + B - 3W) / 3m, and the others that split B at F = I = W."""
    schedule = SCHEDULES[name]
    f, b = (1.0, 2.0) if schedule.splits else (1.0, 1.7)
    timeline, everything = played(name, p, m, v, f, b)
    claim = schedule.bubble(p, m, v, f, b / 2, b / 2)
    if claim is not None:
        assert ratio(timeline) == pytest.approx(claim, rel=1e-9, abs=1e-9)
    for rank, held in peak_activations(everything).items():
        assert schedule.peak(p, m, v, rank) in (held, None)


def test_closed_forms_of_zero_bubble_schedules() -> None:
    """Hand-written, p 4, m 12, F = I = W: zb_h1 (p - 1) / 3m = 3 / 36. dualpipe (4/2 - 1)(3 + 2 - 3) = 2 beside 36 of
    work, p + 1 = 5 held. zb_v's 8 half chunks are the memory of 4 whole ones."""
    assert ratio(play("zb_h1", 4, 12, 1)) == pytest.approx(3 / 36)
    assert ratio(play("dualpipe", 4, 12, 1)) == pytest.approx(2 / 36)
    assert set(peak_activations(play("dualpipe", 4, 12, 1)).values()) == {5}
    assert set(peak_activations(play("zb_v", 4, 12, 2)).values()) == {8}


@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 2.0, 0.8), (1.0, 2.5, 1.0), (2.0, 2.0, 1.0)])
def test_zb_h1_at_other_costs(f: float, b: float, w: float) -> None:
    """(p - 1)(F + I - W) of table 1, while W is not longer than F and I are."""
    assert ratio(play("zb_h1", 4, 12, 1, f, b, w=w)) == pytest.approx(3 * (f + b - 2 * w) / (12 * (f + b)))


@pytest.mark.parametrize("name", one_in(2, SCHEDULES))
def test_blocking_transfers_do_not_deadlock(name: str) -> None:
    """Whatever the placement: each schedule with its own way of posting, computation waiting for all of it."""
    schedule = SCHEDULES[name]
    work = Block("work", (Compute("work", Fixed(1.0), "F"),))

    def step(action: Action, after: tuple[str, ...]) -> Step:
        return Step(str(action), work, after, phase=action.kind, microbatch=action.microbatch, stage=action.stage)

    for (p, m), v in itertools.product(((2, 3), (2, 8), (3, 3), (3, 10), (4, 8)), (1, 2, 3)):
        if schedule.check(p, m, v) is not None:
            continue
        for overlap in (False, True)[: 1 + (p + v) % 2]:
            lanes = lower(schedule.order(p, m, v), schedule, p * v, 0.0, step, overlap=overlap)
            roles = tuple(
                Role(str(rank), {lane: tuple(steps) for lane, steps in of.items()}) for rank, of in enumerate(lanes)
            )
            program = Program(roles, tuple(range(p)), {"pp": (tuple(range(p)),)})
            check(program, simulate(program, ideal_cluster(p, 0.1), Costs.ideal()))


def test_gpipe_and_1f1b_idle_alike_and_hold_differently() -> None:
    """R10: p 8, m 32, F = B: idle (p-1) / (m+p-1) = 7/39 of the step: 17.95 %. Stage 0 holds 32 against 8."""
    for name in ("gpipe", "1f1b"):
        fraction = bubble(activity(play(name, 8, 32, 1, 1.0, 1.0)), [list(range(8))]).fraction
        assert fraction == pytest.approx(7 / 39, rel=1e-9)


def test_communication_delays_the_fill_and_the_drain() -> None:
    """1F1B, p 2, m 1: F on rank 0, a transfer, F and B on rank 1, a transfer, B on rank 0: 1 + c + 1 + 2 + c + 2."""
    assert play("1f1b", 2, 1, 1, comm=0.25).step_time_s == pytest.approx(6.5, rel=1e-12)


def test_more_microbatches_shrink_the_bubble() -> None:
    """R11, the other way round: fewer micro-batches at fixed work, larger bubble."""
    bubbles = [ratio(play("1f1b", 4, m, 1)) for m in (4, 8, 16, 32)]
    assert bubbles == sorted(bubbles, reverse=True)
