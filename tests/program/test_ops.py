"""Transfers and steps that differ in a few fields: programs have many, made of one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from simulator.program import (
    Axis,
    Batch,
    Block,
    PointToPoint,
    PointToPointKind,
    Purpose,
    Step,
    StepPhase,
    batch_maker,
    reordered,
    step_maker,
    transfer_maker,
)
from simulator.program.ops import but_tag

TRANSFER = PointToPoint("recv", PointToPointKind.RECV, 8.0, Axis.PP, Purpose.PIPELINE, 1, "0F0", True)
#: Another value of each field.
OTHER: dict[str, Any] = {
    "name": "send",
    "op": PointToPointKind.SEND,
    "nbytes": 9.0,
    "axis": Axis.TP,
    "purpose": Purpose.DATA,
    "peer": 2,
    "tag": "0F1",
    "as_it_comes": False,
}


@pytest.mark.parametrize("name", [field.name for field in fields(PointToPoint)])
def test_a_transfer_is_told_by_every_field_but_its_tag(name: str) -> None:
    other = replace(TRANSFER, **{name: OTHER[name]})
    assert (but_tag(other) == but_tag(TRANSFER)) == (name == "tag")
    # With the other tag, what else differs stays as it is.
    assert transfer_maker(other)("0F2") == replace(other, tag="0F2")


def test_batches_made_of_another_differ_in_tags_alone() -> None:
    """Each transfer has its own tag, all else as before; the key is the very one, which is that of the transfers."""
    there, back = TRANSFER, replace(TRANSFER, op=PointToPointKind.SEND)
    batch = Batch((there, back))
    other = batch_maker(batch)(["0F2", "1B3"])
    assert other == Batch((replace(there, tag="0F2"), replace(back, tag="1B3")))
    assert other.alike is batch.alike
    assert other.alike == tuple(map(but_tag, other.comms))


def test_steps_made_of_another_are_as_dataclasses_replace_makes_them() -> None:
    """All fields are set, so that each one is kept: a field that is forgotten has no value at all."""
    block, other = Block("work", ()), Block("other", ())
    step = Step("0F1", block, ("0RECV_F1",), StepPhase.FORWARD, 1, 2, 3, "part", 4.0, 5.0, 6.0)
    assert reordered(step, ("x",), label="0F2", microbatch=2) == replace(step, after=("x",), label="0F2", microbatch=2)
    numbered = step_maker(step)(7, "0F7", other, ("y",))
    assert numbered == replace(step, microbatch=7, label="0F7", op=other, after=("y",))
    assert step == Step("0F1", block, ("0RECV_F1",), StepPhase.FORWARD, 1, 2, 3, "part", 4.0, 5.0, 6.0)
