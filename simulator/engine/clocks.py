"""The clock that a power limit leaves each rank: played, added up, and played again at the clocks that follow.

A rank's clock depends on how long it waits for others, and that on everybody's clocks. Ranks of a role share one, from
the mean over all of them, whichever of them are played: what a rank runs is its role's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from simulator.costs import Costs
from simulator.costs.power import CLASSES
from simulator.engine.blocks import TemplateStore
from simulator.engine.placed import Placed
from simulator.engine.recorder import Clocks, Recorder
from simulator.engine.world import Cast
from simulator.program import Block, Program
from simulator.program.ops import kernels_of

if TYPE_CHECKING:
    from simulator.config.profile import LoadClass

#: Clocks that change by less have settled: a product then takes a quarter of a percent more or less.
SETTLED = 0.005
MOST_PLAYS = 8


def first_clocks(program: Program, costs: Costs) -> Clocks:
    """Those of a step without communication and waiting, where ``costs`` know of a power limit."""
    power = costs.power
    if power is None:
        return (None,) * len(program.roles)
    loads_of: dict[int, dict[LoadClass, float]] = {}
    clocks = []
    for role in program.roles:
        seconds: dict[LoadClass, float] = {}
        for _, _, step in role.steps():
            if isinstance(step.op, Block):
                if id(step.op) not in loads_of:
                    loads_of[id(step.op)] = _loads_s(step.op, costs)
                _add(seconds, loads_of[id(step.op)])
        clocks.append(power.clock_hz(seconds, sum(seconds.values()), power.highest_hz))
    return tuple(clocks)


def next_clocks(placed: Placed, cast: Cast, recorder: Recorder, store: TemplateStore, clocks: Clocks) -> Clocks:
    """Those at which what was played at ``clocks`` draws what the limit allows, waiting as long as it did."""
    program, power = placed.program, placed.costs.power
    if power is None:
        return clocks
    of_template = [store.loads_s(template) for template in range(len(store.templates))]
    seconds: list[dict[LoadClass, float]] = [{} for _ in program.roles]
    length_s = recorder.length_s
    for rank, template, span_s in recorder.lengths():
        loads = of_template[template]
        if loads.keys() == {"communication"}:
            loads = {"communication": span_s}
        _add(seconds[program.role_of[rank]], loads, cast.like[rank])
    ranks = np.bincount(program.role_of, minlength=len(program.roles)).tolist()
    found = []
    for clock_hz, loads, count in zip(clocks, seconds, ranks, strict=True):
        assert clock_hz is not None
        found.append(power.clock_hz(loads, length_s * count, clock_hz))
    return tuple(found)


def settled(before: Clocks, after: Clocks) -> bool:
    """Whether no clock has changed enough to tell."""
    return all(a is None or b is None or abs(a - b) <= SETTLED * a for a, b in zip(before, after, strict=True))


def _loads_s(block: Block, costs: Costs) -> dict[LoadClass, float]:
    """Seconds of its kernels at the highest clock, by class."""
    assert costs.power is not None
    loads: dict[LoadClass, float] = {}
    for compute in (compute for op in block.ops for compute in kernels_of(op)):
        kind = CLASSES.get(type(compute.kernel))
        if kind is not None:
            seconds = costs.kernel_s(compute.kernel, costs.gpu, costs.power.highest_hz)
            loads[kind] = loads.get(kind, 0.0) + seconds
    return loads


def _add(total: dict[LoadClass, float], more: Mapping[LoadClass, float], times: int = 1) -> None:
    for kind, seconds in more.items():
        total[kind] = total.get(kind, 0.0) + times * seconds
