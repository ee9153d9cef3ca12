"""Transfers that differ in their tags alone: programs have many, and tell them by all other fields."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from simulator.program import Axis, PointToPoint, PointToPointKind, Purpose, tagging
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
    assert tagging(other)("0F2") == replace(other, tag="0F2")
