"""Lanes as texts, to try passes of lowering on."""

from __future__ import annotations

from typing import Any

from simulator.lowering.lanes import Lanes
from tests.support.lanes import write

#: Two layers, so that texts are short.
SHORT: dict[str, Any] = {"model": {"layers": 2}, "training": {"global_batch": 2, "grad_clip": None}}

#: Two pipeline ranks of a layer each, with two micro-batches; the table is tied and at both ends.
TWO_RANKS: dict[str, Any] = {
    "model": {"layers": 2},
    "training": {"global_batch": 4, "grad_clip": None},
    "pp": 2,
    "dp": 2,
}

AT_THE_END = {"grad_reduce": False, "param_gather": False}

FORWARD_AND_BACKWARD = """
  lane compute
    step 0F0 block=0 phase=F microbatch=0 stage=0
    step 0B0 block=0 phase=B microbatch=0 stage=0
"""

ALL_REDUCED = f"""{FORWARD_AND_BACKWARD}
  lane dp
    step "reduce grads" after=0B0
      comm "dp.all_reduce grads" all_reduce nbytes=1024 axis=dp purpose=dp
"""


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def same(lanes: Lanes, text: str) -> bool:
    """Return True where the lanes are as in the text, whose places of passes and bytes held are left out."""
    assert lines(write(lanes)) == lines(text)
    return True
