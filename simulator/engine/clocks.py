"""The clock that a power limit leaves each rank: played, added up, and played again at the clocks that follow.

A rank's clock depends on how long it waits for others, and that on everybody's clocks. Ranks of a role, on GPUs of a
type, share one, from the mean over all of them, whichever of them are played: what a rank runs is its role's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from simulator.cluster import Cluster
from simulator.costs import Costs
from simulator.costs.power import load_class
from simulator.engine.blocks import TemplateStore
from simulator.engine.placed import Placed
from simulator.engine.recorder import Clocks, Recorder
from simulator.engine.world import Cast
from simulator.program import Block
from simulator.program.ops import kernels_of

if TYPE_CHECKING:
    from simulator.config.profile import LoadClass

#: Clocks that change by less have settled: a product then takes a quarter of a percent more or less.
SETTLED = 0.005
MOST_PLAYS = 8


def first_clocks(placed: Placed, cluster: Cluster) -> Clocks:
    """Those of a step without communication and waiting, where costs know of a power limit."""
    loads_of: dict[tuple[int, str], dict[LoadClass, float]] = {}
    clocks: dict[tuple[int, str], float | None] = {}
    for role, gpu in dict.fromkeys(placed.kinds(cluster)):
        costs = placed.costs.of(gpu)
        power = costs.power
        if power is None:
            clocks[role, gpu] = None
            continue
        seconds: dict[LoadClass, float] = {}
        for _, _, step in placed.program.roles[role].steps():
            if isinstance(step.op, Block):
                key = id(step.op), gpu
                if key not in loads_of:
                    loads_of[key] = _loads_s(step.op, costs)
                _add(seconds, loads_of[key])
        clocks[role, gpu] = power.clock_hz(seconds, sum(seconds.values()), power.highest_hz)
    return clocks


def next_clocks(
    placed: Placed, cluster: Cluster, cast: Cast, recorder: Recorder, store: TemplateStore, clocks: Clocks
) -> Clocks:
    """Those at which what was played at ``clocks`` draws what the limit allows, waiting as long as it did."""
    if not any(clocks.values()):
        return clocks
    kinds = placed.kinds(cluster)
    of_template = [store.loads_s(template) for template in range(len(store.templates))]
    seconds: dict[tuple[int, str], dict[LoadClass, float]] = {kind: {} for kind in clocks}
    length_s = recorder.length_s
    for rank, template, span_s in recorder.lengths():
        loads = of_template[template]
        if loads.keys() == {"communication"}:
            loads = {"communication": span_s}
        _add(seconds[kinds[rank]], loads, cast.like[rank])
    found = dict(clocks)
    for kind, count in Counter(kinds).items():
        power, clock_hz = placed.costs.of(kind[1]).power, clocks[kind]
        if power is not None and clock_hz is not None:
            found[kind] = power.clock_hz(seconds[kind], length_s * count, clock_hz)
    return found


def settled(before: Clocks, after: Clocks) -> bool:
    """Whether no clock has changed enough to tell."""
    pairs = [(before[kind], after[kind]) for kind in before]
    return all(a is None or b is None or abs(a - b) <= SETTLED * a for a, b in pairs)


def _loads_s(block: Block, costs: Costs) -> dict[LoadClass, float]:
    """Seconds of its kernels at the highest clock, by class."""
    assert costs.power is not None
    loads: dict[LoadClass, float] = {}
    for compute in (compute for op in block.ops for compute in kernels_of(op)):
        kind = load_class(compute.kernel)
        if kind is not None:
            seconds = costs.kernel_s(compute.kernel, costs.gpu, costs.power.highest_hz)
            loads[kind] = loads.get(kind, 0.0) + seconds
    return loads


def _add(total: dict[LoadClass, float], more: Mapping[LoadClass, float], times: int = 1) -> None:
    for kind, seconds in more.items():
        total[kind] = total.get(kind, 0.0) + times * seconds
