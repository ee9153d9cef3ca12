"""The clock that a power limit leaves each rank: played, added up, and played again at the clocks that follow.

A rank's clock depends on how long it waits for others, and that on everybody's clocks. Ranks of a role, on GPUs of a
type, share one, from the mean over all of them, whichever of them are played: what a rank runs is its role's.
"""

from __future__ import annotations

from collections import Counter

from simulator.cluster import Cluster
from simulator.costs import Costs
from simulator.costs.power import Drawn, Loads, load_class
from simulator.engine.blocks import TemplateStore
from simulator.engine.placed import Placed
from simulator.engine.recorder import Clocks, Recorder
from simulator.engine.world import Cast
from simulator.program import Block
from simulator.program.ops import kernels_of

#: Clocks that change by less have settled: a product then takes a quarter of a percent more or less.
SETTLED = 0.005
MOST_PLAYS = 8


def first_clocks(placed: Placed, cluster: Cluster) -> Clocks:
    """Those of a step without communication and waiting, where costs know of a power limit."""
    loads_of: dict[tuple[int, str], Loads] = {}
    clocks: dict[tuple[int, str], float | None] = {}
    for role, gpu in dict.fromkeys(placed.kinds(cluster)):
        costs = placed.costs.of(gpu)
        power = costs.power
        if power is None:
            clocks[role, gpu] = None
            continue
        loads = Loads()
        for _, _, step in placed.program.roles[role].steps():
            if isinstance(step.op, Block):
                key = id(step.op), gpu
                if key not in loads_of:
                    loads_of[key] = _loads(step.op, costs, power.highest_hz)
                loads.add_all(loads_of[key])
        length_s = sum(loads.seconds.values())
        clocks[role, gpu] = power.clock_hz(power.trace([Drawn(0.0, length_s, loads)], length_s), power.highest_hz)
    return clocks


def next_clocks(
    placed: Placed, cluster: Cluster, cast: Cast, recorder: Recorder, store: TemplateStore, clocks: Clocks
) -> Clocks:
    """Those at which what was played at ``clocks`` draws what the limit allows, waiting as long as it did."""
    if not any(clocks.values()):
        return clocks
    kinds = placed.kinds(cluster)
    of_template = [store.loads(template) for template in range(len(store.templates))]
    # Of whole steps, in-line communication and all: into how many spans one is cut is a matter of how it is played.
    steps: dict[tuple[int, str], Drawn] = {}
    for step, template, start, end in recorder.times():
        loads = of_template[template]
        if loads.seconds.keys() == {"communication"}:
            loads = Loads({"communication": end - start}, {"communication": end - start})
        if step not in steps:
            steps[step] = Drawn(start, end, Loads(), cast.like[step[0]])
        known = steps[step]
        known.loads.add_all(loads)
        steps[step] = known._replace(start_s=min(known.start_s, start), end_s=max(known.end_s, end))
    spans: dict[tuple[int, str], list[Drawn]] = {kind: [] for kind in clocks}
    for (rank, _), drawn in steps.items():
        spans[kinds[rank]].append(drawn)
    found = dict(clocks)
    for kind, count in Counter(kinds).items():
        power, clock_hz = placed.costs.of(kind[1]).power, clocks[kind]
        if power is not None and clock_hz is not None:
            found[kind] = power.clock_hz(power.trace(spans[kind], recorder.length_s, count), clock_hz)
    return found


def settled(before: Clocks, after: Clocks) -> bool:
    """Whether no clock has changed enough to tell."""
    pairs = [(before[kind], after[kind]) for kind in before]
    return all(a is None or b is None or abs(a - b) <= SETTLED * a for a, b in pairs)


def _loads(block: Block, costs: Costs, clock_hz: float) -> Loads:
    """What its kernels draw at a clock."""
    loads = Loads()
    for compute in (compute for op in block.ops for compute in kernels_of(op)):
        if (kind := load_class(compute.kernel)) is not None:
            seconds = costs.kernel_s(compute.kernel, costs.gpu, clock_hz)
            loads.add(kind, seconds, seconds * costs.intensity(compute.kernel))
    return loads
