"""The clock that a power limit leaves each rank: played, added up, and played again at the clocks that follow.

A rank's clock depends on how long it waits for others, and that on everybody's clocks. Ranks of a kind share one, from
the mean over all of them, whichever of them are played; a GPU that is slower or faster than others has its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.cluster import Cluster
from simulator.costs import Costs
from simulator.costs.power import Drawn, Loads, load_class
from simulator.engine.blocks import TemplateStore
from simulator.engine.placement import Placed
from simulator.engine.recorder import Clocks, Recorder
from simulator.engine.representatives import Cast
from simulator.program import Block, kernels_of

#: Clocks that change by less have settled: a product then takes a quarter of a percent more or less.
SETTLED = 0.005
MOST_PLAYS = 8


def first_clocks(placed: Placed, cluster: Cluster) -> Clocks:
    """Those of a step without communication and waiting, where costs know of a power limit."""
    loads_of: dict[tuple[int, str], Loads] = {}

    def clock_hz(role: int, gpu: str) -> float | None:
        costs = placed.costs.of(gpu)
        power = costs.power
        if power is None:
            return None
        loads = Loads()
        for _, _, step in placed.program.roles[role].steps():
            if isinstance(step.op, Block):
                key = id(step.op), gpu
                if key not in loads_of:
                    loads_of[key] = _loads(step.op, costs, power.highest_hz)
                loads.add_all(loads_of[key])
        length_s = sum(loads.seconds.values())
        drawn = Drawn(0.0, length_s, loads.seconds, loads.drawing_s)
        return power.clock_hz(power.trace([drawn], length_s), power.highest_hz)

    kinds = dict.fromkeys(placed.kinds(cluster))
    found = {key: clock_hz(*key) for key in {(kind.role, kind.gpu): None for kind in kinds}}
    return {kind: found[kind.role, kind.gpu] for kind in kinds}


def next_clocks(
    placed: Placed, cluster: Cluster, cast: Cast, recorder: Recorder, store: TemplateStore, clocks: Clocks
) -> Clocks:
    """Those at which what was played at ``clocks`` draws what the limit allows, waiting as long as it did."""
    if not any(clocks.values()):
        return clocks
    kinds, length_s = placed.kinds(cluster), recorder.length_s
    rank, drawn = _drawn(cast, recorder, store)
    found = dict(clocks)
    for kind, count in Counter(kinds).items():
        power, clock_hz = placed.costs.of(kind.gpu).power, clocks[kind]
        if power is not None and clock_hz is not None:
            own = np.isin(rank, [number for number in cast.like if kinds[number] == kind])
            found[kind] = power.clock_hz(power.trace([drawn.only(own)], length_s, count), clock_hz)
    return found


def _drawn(cast: Cast, recorder: Recorder, store: TemplateStore) -> tuple[Ints, Drawn]:
    """The rank of every step, and what it drew: of whole steps, in-line communication and all, as into how many spans
    one is cut is a matter of how it is played."""
    spans = recorder.times()
    n = len(spans.rank)
    start_s, end_s = np.full(n, np.inf), np.full(n, -np.inf)
    np.minimum.at(start_s, spans.step, spans.start_s)
    np.maximum.at(end_s, spans.step, spans.end_s)
    of_template = [store.loads(template) for template in range(len(store.templates))]
    # Communication that met others lasted as long as it did.
    met = np.array([loads.seconds.keys() == {"communication"} for loads in of_template])[spans.template]
    lasted_s = spans.end_s - spans.start_s

    def added_up(kind: str, seconds: Sequence[float]) -> Floats:
        of_span = np.array(seconds)[spans.template]
        of_span = np.where(met, lasted_s, of_span) if kind == "communication" else of_span
        return np.bincount(spans.step, of_span, n).astype(float, copy=False)

    kinds = dict.fromkeys(kind for loads in of_template for kind in loads.seconds)
    return spans.rank, Drawn(
        start_s,
        end_s,
        {kind: added_up(kind, [loads.seconds.get(kind, 0.0) for loads in of_template]) for kind in kinds},
        {kind: added_up(kind, [loads.drawing_s.get(kind, 0.0) for loads in of_template]) for kind in kinds},
        np.array([cast.like[rank] for rank in spans.rank.tolist()]),
    )


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
