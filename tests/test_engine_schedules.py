"""Schedules played on the clock: the bubbles and peaks that their papers claim."""

import itertools

import pytest

from simulator.analysis.activity import activity
from simulator.analysis.metrics import bubble
from simulator.build import schedule_program
from simulator.cluster.ideal import ideal_cluster
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.engine.invariants import check
from simulator.schedules import SCHEDULES
from simulator.timeline import Timeline

SWEEP = [
    (name, p, m, v)
    for name in SCHEDULES
    for p, m, v in itertools.product((1, 2, 3, 5, 16), (1, 2, 6, 15, 32, 64), (1, 2, 3, 4))
    if SCHEDULES[name].check(p, m, v) is None
]


def play(name: str, p: int, m: int, v: int, f: float = 1.0, b: float = 2.0, comm: float = 0.0) -> Timeline:
    program = schedule_program(name, p, m, v, f / v, b / v)
    timeline = simulate(program, ideal_cluster(p, comm), Costs.ideal())
    check(program, timeline)
    return timeline


def ratio(timeline: Timeline) -> float:
    return bubble(activity(timeline), [timeline.ranks]).ratio


@pytest.mark.parametrize(
    ("name", "p", "m", "v"), [size for size in SWEEP if size[2] % size[1] == 0 or size[0] != "interleaved"]
)
def test_bubble_is_the_claim(name: str, p: int, m: int, v: int) -> None:
    """Idle over busy: naive p - 1, GPipe and 1F1B (p - 1) / m, interleaved (p - 1) / (v m), whatever F and B are."""
    assert ratio(play(name, p, m, v, 1.0, 1.7)) == pytest.approx(SCHEDULES[name].bubble(p, m, v), rel=1e-9, abs=1e-9)


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
