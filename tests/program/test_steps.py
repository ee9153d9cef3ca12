"""Steps of lanes as columns and as objects: either says all that the other says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest

from simulator.program import (
    Axis,
    Batch,
    Block,
    Collective,
    CollectiveKind,
    LaneSteps,
    PointToPoint,
    PointToPointKind,
    Purpose,
    Step,
    StepColumns,
    StepPhase,
)

WORK, OTHER_WORK = Block("work", ()), Block("work", ())
SUM = Collective("sum", CollectiveKind.ALL_REDUCE, 8.0, Axis.DP, Purpose.DATA)


def transfer(tag: str, op: PointToPointKind = PointToPointKind.RECV) -> PointToPoint:
    return PointToPoint("passed", op, 8.0, Axis.PP, Purpose.PIPELINE, 1, tag)


def passes(*microbatches: int) -> tuple[Step, ...]:
    return tuple(Step(f"0F{n}", WORK, (f"r{n}",), StepPhase.FORWARD, n, 0, alloc_bytes=2.0) for n in microbatches)


def posted(*microbatches: int) -> tuple[Step, ...]:
    """Batches of a receive and a send, whose tags have the micro-batch."""
    batches = [Batch((transfer(f"0F{n}"), transfer(f"1B{n}", PointToPointKind.SEND))) for n in microbatches]
    return tuple(Step(f"b{n}", batch, (f"0F{n}",)) for n, batch in zip(microbatches, batches, strict=True))


#: Two passes and two batches of two kinds, a transfer, and a sum.
MIXED = (*passes(0, 1), *posted(0, 1), Step("r2", transfer("0F2"), microbatch=2), Step("sum", SUM, ("0F1",)))


def from_columns(steps: Iterable[Step]) -> LaneSteps:
    """Return steps of which nothing is known but the columns."""
    return LaneSteps(replace(LaneSteps.from_steps(steps).columns))


def test_columns_say_all_that_steps_say() -> None:
    """Passes are of one kind, batches of another, and the transfer and the sum of a kind each."""
    columns = StepColumns.from_steps(MIXED)
    assert columns.prototype == [0, 0, 1, 1, 2, 3]
    assert columns.prototypes == [MIXED[0], MIXED[2], MIXED[4], MIXED[5]]
    assert columns.tags == [(), (), ("0F0", "1B0"), ("0F1", "1B1"), ("0F2",), ()]
    assert from_columns(MIXED) == MIXED
    assert [columns.step(at) for at in range(len(MIXED))] == list(MIXED)
    assert columns.places(lambda step: isinstance(step.op, Batch)) == [2, 3]
    assert columns.field("alloc_bytes") == [2.0, 2.0, 0.0, 0.0, 0.0, 0.0]


#: Another value of each field of a pass.
OTHER: dict[str, Any] = {
    "label": "0F9",
    "op": OTHER_WORK,
    "after": ("r9",),
    "phase": StepPhase.BACKWARD,
    "microbatch": 9,
    "stage": 9,
    "chunk": 9,
    "part": "9",
    "alloc_bytes": 9.0,
    "free_bytes": 9.0,
    "workspace_bytes": 9.0,
    "hooks": 9,
}


@pytest.mark.parametrize("name", [field.name for field in fields(Step)])
def test_what_steps_of_one_kind_have_in_common(name: str) -> None:
    """A step that differs from its prototype in what columns do not tell would be made without the difference.

    Blocks are told apart by which they are, be they equal: one serves all micro-batches.
    """
    (step,) = passes(0)
    pair = (step, replace(step, **{name: OTHER[name]}))
    assert len(LaneSteps.from_steps(pair).columns.prototypes) == (1 if name in ("label", "after", "microbatch") else 2)
    assert from_columns(pair) == pair


def test_steps_are_made_once() -> None:
    """A lane gives the very same objects again, and so does a longer lane. Steps that came stay the same."""
    lane = from_columns(passes(0, 1))
    whole = lane.followed_by(posted(0))
    assert list(map(id, whole)) == [*map(id, lane), id(whole[2])]
    assert whole[:2] == passes(0, 1)
    assert LaneSteps.from_steps(MIXED)[1] is MIXED[1]


@pytest.mark.parametrize("made", [LaneSteps.from_steps, from_columns])
@pytest.mark.parametrize("places", [(), (0,), (2,), (0, 1), (1, 2, 3), (0, 1, 2, 3, 4, 5), (0, 5), (5,)])
def test_steps_are_replaced_by_any_number(made: Any, places: tuple[int, ...]) -> None:
    """Each place gets as many passes as its number says, the first one none; as with lists, cut and joined."""
    changes = {place: passes(*range(10 * place, 11 * place)) for place in places}
    expected = [one for at, step in enumerate(MIXED) for one in changes.get(at, (step,))]
    replaced = made(MIXED).replaced(changes)
    assert len(replaced) == len(expected)
    # The columns of parts say what the steps of parts say; all passes are alike, and each kind is there once.
    assert from_columns(replaced) == tuple(expected) == replaced
    assert set(replaced.columns.prototype) == set(range(len(replaced.columns.prototypes)))
    assert made(MIXED) == MIXED


def test_no_steps() -> None:
    assert len(LaneSteps()) == 0 == len(LaneSteps().columns.prototypes)
    assert LaneSteps().followed_by(MIXED) == MIXED
