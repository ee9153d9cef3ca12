"""Kernels beside communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulator.costs import Costs
from simulator.program import Program, from_text
from tests.support.quick import ByPurpose
from tests.support.transfers import IDEAL

# Interference: computation beside communication.

BESIDE = """
program name=beside
block 0 name=before
  compute before F fixed seconds=0.5
block 1 name=layers
{kernels}
role all ranks=0-{last}
  lane compute
    step first block=0 phase=F
    step layers block=1 phase=F
  lane dp
{reductions}
group dp {group}
"""


def beside(nodes: int, kernels: Sequence[float], nbytes: float, reductions: Sequence[str] = ("reduce",)) -> Program:
    """A block of 0.5 s, then ``kernels`` in a row beside ``reductions`` in a row, of ``nbytes`` each."""
    lines = [f"  compute k{i} F fixed seconds={seconds}" for i, seconds in enumerate(kernels)]
    steps = [
        f"    step {name}{'' if i else ' after=first'}\n"
        f"      comm grads all_reduce nbytes={nbytes} axis=dp purpose=dp algorithm=ring"
        for i, name in enumerate(reductions)
    ]
    group = ",".join(map(str, range(nodes)))
    text = BESIDE.format(kernels="\n".join(lines), last=nodes - 1, reductions="\n".join(steps), group=group)
    return from_text(text)


def slowed(**speeds: float) -> Costs:
    return replace(IDEAL, interference=ByPurpose(speeds))
