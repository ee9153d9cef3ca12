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
    reordered,
)
from simulator.program.ops import but_tag, tags_of, with_tags

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
    assert with_tags(other)(("0F2",)) == replace(other, tag="0F2")
    assert tags_of(other) == (other.tag,)


def test_batches_made_of_another_differ_in_tags_alone() -> None:
    """Each transfer has its own tag, all else as before; a block has no tags, and stays the very same."""
    there, back = TRANSFER, replace(TRANSFER, op=PointToPointKind.SEND)
    batch, block = Batch((there, back)), Block("work", ())
    other = with_tags(batch)(("0F2", "1B3"))
    assert other == Batch((replace(there, tag="0F2"), replace(back, tag="1B3")))
    assert (tags_of(batch), tags_of(other), tags_of(block)) == (("0F0", "0F0"), ("0F2", "1B3"), ())
    assert with_tags(block)(()) is block


def test_steps_made_of_another_are_as_dataclasses_replace_makes_them() -> None:
    """All fields are set, so that each one is kept: a field that is forgotten has no value at all."""
    block = Block("work", ())
    step = Step("0F1", block, ("0RECV_F1",), StepPhase.FORWARD, 1, 2, 3, "part", 4.0, 5.0, 6.0)
    assert reordered(step, ("x",), label="0F2", microbatch=2) == replace(step, after=("x",), label="0F2", microbatch=2)
    assert step == Step("0F1", block, ("0RECV_F1",), StepPhase.FORWARD, 1, 2, 3, "part", 4.0, 5.0, 6.0)
