"""Schedules alone that are played until their pipeline repeats itself, beside the same ones played whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from simulator import schedule_alone
from simulator.cluster.ideal import ideal_cluster
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.engine.stretched_rows import StretchedRows
from simulator.lowering import schedule_program, shortened_order, shortening
from simulator.schedule_alone import ScheduleResult, schedule
from simulator.schedules import SCHEDULES
from simulator.timeline import Timeline
from tests.support.exact import steady_differences, timeline_differences
from tests.support.random_checks import differences

#: Costs that no sum of others is equal to, so that passes of two ranks seldom end at one time.
UNEVEN: dict[str, Any] = {"forward": 1.1, "backward": 2.3, "weight": 0.9, "comm": 0.13}
#: Schedule -> ranks, micro-batches and chunks.
SIZES: dict[str, tuple[int, int, int]] = {
    "naive": (4, 48, 1),
    "1f1b": (4, 48, 1),
    "interleaved": (4, 48, 2),
    "zb_h1": (4, 48, 1),
    "zb_h2": (4, 48, 1),
    "zb_auto": (4, 48, 1),
    "interleaved_zb": (4, 48, 2),
    "zb_v": (4, 48, 2),
    "dualpipe": (4, 96, 1),
    "dualpipe_v": (4, 48, 2),
}


def played(monkeypatch: pytest.MonkeyPatch, least_left_out: float, name: str, costs: dict[str, Any]) -> ScheduleResult:
    """Return a schedule that is shortened where that leaves out so many passes."""
    monkeypatch.setattr(shortening, "LEAST_LEFT_OUT", least_left_out)
    stages, microbatches, chunks = SIZES[name]
    return schedule(name, stages, microbatches, chunks, **costs)


def all_played(result: ScheduleResult) -> Timeline:
    return result.spans if result.steady is None else result.steady.played


@pytest.mark.parametrize("costs", [{}, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("name", SIZES)
def test_a_schedule_with_periods_put_in_is_the_schedule(
    monkeypatch: pytest.MonkeyPatch, name: str, costs: dict[str, Any]
) -> None:
    short, whole = (played(monkeypatch, least, name, costs) for least in (0, math.inf))
    # Transfers hold up one of every few micro-batches of these, which no period of one micro-batch repeats.
    settles = not costs or name not in ("1f1b", "dualpipe")
    assert (short.spans.events < whole.spans.events) == settles
    assert list(steady_differences(all_played(short), all_played(whole))) == []
    assert list(steady_differences(short.spans, whole.spans)) == []
    assert list(differences(short.to_dict(), whole.to_dict(), whole.spans.step_time_s)) == []


def test_more_microbatches_cost_no_more_events_in_any_of_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortening, "LEAST_LEFT_OUT", 0)
    events = {schedule("zb_h2", 4, microbatches).spans.events for microbatches in (48, 96)}
    assert len(events) == 1


def test_a_schedule_that_settles_late_is_tried_with_more_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    def result(*shares: float) -> ScheduleResult:
        monkeypatch.setattr(schedule_alone, "ATTEMPTS", shares)
        return schedule("zb_h1", 12, 96, comm=0.1)

    monkeypatch.setattr(shortening, "LEAST_LEFT_OUT", 0)
    # Eight micro-batches, the fewest that are played where the pipeline is full, are too few for transfers that hold
    # twelve ranks up, one after another.
    whole, early, late = result(), result(0.25), result(0.25, 1.5)
    assert early.spans.events == whole.spans.events
    assert late.spans.events < whole.spans.events
    assert list(steady_differences(late.spans, whole.spans)) == []


@pytest.mark.parametrize("name", ["zb_h1", "zb_auto"])
def test_the_first_attempt_is_the_shortest_that_suffices_on_sixteen_ranks(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def events(*shares: float) -> int:
        monkeypatch.setattr(schedule_alone, "ATTEMPTS", shares)
        return schedule(name, 16, 64, comm=0.1).spans.events

    first = schedule_alone.ATTEMPTS[0]
    monkeypatch.setattr(shortening, "LEAST_LEFT_OUT", 0)
    whole = events()
    assert events(first) < whole
    # Two micro-batches fewer, of twelve, do not settle.
    assert events(first - 2 / 16) == whole


def test_rows_of_stretched_spans_are_moved_and_compared() -> None:
    # Span 0 has two rows and span 2 one; span 1 ran straight through. Span 3 is span 0 ten seconds later.
    rows = StretchedRows(
        {
            2: (np.array([7.0]), np.array([8.0])),
            0: (np.array([1.0, 2.0]), np.array([2.0, 4.0])),
            3: (np.array([11.0, 12.0]), np.array([12.0, 14.0])),
        },
        4,
    )
    moved = rows.moved(np.array([1, 2, 0]), np.array([0.0, 10.0, 100.0]))
    assert {at: [column.tolist() for column in columns] for at, columns in moved.items()} == {
        1: [[17.0], [18.0]],
        2: [[101.0, 102.0], [102.0, 104.0]],
    }
    # Of spans 1 and 2 one alone has rows, which tells nothing.
    assert rows.are_repeated(np.array([0, 1]), np.array([3, 2]), 10.0, 1e-9)
    assert not rows.are_repeated(np.array([0]), np.array([3]), 10.1, 1e-9)
    assert StretchedRows({}, 2).moved(np.array([0, 1]), np.zeros(2)) == {}


@pytest.mark.parametrize("steps", [1, 3])
def test_both_engines_put_periods_into_each_step(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    monkeypatch.setattr(shortening, "LEAST_LEFT_OUT", 0)
    plan, size = SCHEDULES["zb_h1"], (3, 40, 1)
    short = shortened_order(plan, size)
    assert short is not None
    program = schedule_program(plan, *size, 1.0, 2.0, 1.0, steps=steps, passes=short.order)
    repetition = short.repetition_in(steps)
    compiled, python = (
        simulate(program, ideal_cluster(3, 0.1), Costs.ideal(), repetition=repetition, engine=engine)
        for engine in ("compiled", "python")
    )
    assert list(timeline_differences(compiled, python)) == []
    # Of each micro-batch every rank has a forward pass, an input gradient and a weight gradient.
    assert sum(phase in "FIW" for phase in compiled.phase) == 3 * 3 * 40 * steps
