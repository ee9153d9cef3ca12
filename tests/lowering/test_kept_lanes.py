"""Lanes of transfers are kept: what is lowered behind other orders is what is lowered alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from simulator.lowering import pipeline
from simulator.lowering.lanes import Lanes
from simulator.lowering.pipeline import lower
from simulator.program import Block, Compute, Fixed, Step, StepPhase
from simulator.recent import RecentValues
from simulator.schedules import SCHEDULES, Action, Order

NOTHING, LAST = (Block(name, (Compute(name, Fixed(0.0), StepPhase.FORWARD),)) for name in ("nothing", "last"))


def step(action: Action, after: tuple[str, ...]) -> Step:
    op = LAST if action[::2] == (0, 1) else NOTHING
    return Step(str(action), op, after, microbatch=action.microbatch, stage=action.stage)


def order(name: str, p: int, m: int, v: int) -> Order:
    return SCHEDULES[name].order(p, m, v)


BASE: dict[str, Any] = {
    "order": order("dualpipe_v", 2, 4, 2),
    "schedule": SCHEDULES["dualpipe_v"],
    "n_stages": 4,
    "nbytes": 8.0,
    "overlap": False,
    "batched": False,
    "apart": False,
}
#: One argument that differs, where need be beside another one, without which it changes nothing.
CHANGES: dict[str, dict[str, Any]] = {
    "order": {"order": order("dualpipe_v", 2, 6, 2)},
    "schedule": {"schedule": replace(SCHEDULES["dualpipe_v"], joined=False)},
    "n_stages": {"n_stages": 3},
    "nbytes": {"nbytes": 16.0},
    "overlap": {"overlap": True},
    "batched": {"overlap": True, "batched": True},
    "apart": {"overlap": True, "apart": True},
    "turns": {"turns": {(0, 1): "last"}},
}


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_recent", RecentValues(pipeline.MOST_ACTIONS))


def lowered(**changes: Any) -> list[Lanes]:
    return lower(**{**BASE, "step_of": step, **changes})


@pytest.mark.parametrize("name", CHANGES)
def test_each_argument_tells_lanes_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change has other lanes than the same arguments without it, be these kept or not."""
    forget(monkeypatch)
    change: Mapping[str, Any] = CHANGES[name]
    without = {key: value for key, value in change.items() if key != name}
    before, behind = lowered(**without), lowered(**change)
    forget(monkeypatch)
    assert behind == lowered(**change)
    assert behind != before


def test_kept_lanes_are_given_again_with_other_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers are the very same steps, passes those of the function that is given."""
    forget(monkeypatch)
    first = lowered()
    second = lowered(step_of=lambda action, after: replace(step(action, after), alloc_bytes=1.0))
    assert second[0]["pp"][0] is first[0]["pp"][0]
    assert {one.alloc_bytes for one in first[0]["compute"]} == {0.0}
    assert {one.alloc_bytes for one in second[0]["compute"]} == {1.0}
    assert lowered() == first
