"""The clocks that a power limit leaves GPUs: play, add up the power, play again at the clocks that follow.

A rank's clock depends on how long it waits for others, and that on everybody's clocks. Ranks of a kind share one clock,
from the mean over all of them. A GPU that is slower or faster than others has a clock for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.cluster import Cluster
from simulator.costs import Costs
from simulator.costs.power import Drawn, Loads, load_class
from simulator.engine.placement import Placed
from simulator.engine.recorder import GpuClocks, RecordedSpans, SpanTimes
from simulator.engine.representatives import Representatives
from simulator.engine.templates import TemplateStore
from simulator.program import Block, Kernel, kernels_of

#: Clocks that change by less have settled: a product then takes a quarter of a percent more or less.
SETTLED = 0.005
#: Plays after which clocks that still change are taken as they are, and the user is told. Those of jobs of 4 and of 16
#: wide layers settle in 2 to 4, on one H200 and on four (tensor, pipeline and data parallel).
MOST_PLAYS = 8
#: What the user is told then.
UNSETTLED = (
    f"the clocks that the power limit leaves GPUs still change after {MOST_PLAYS} plays of the step: "
    "its figures are those of the last one"
)


def first_clocks(placed: Placed, cluster: Cluster) -> GpuClocks:
    """Return the clocks of a step without communication and waiting, where costs know of a power limit."""
    loads_of_block: dict[tuple[int, str], Loads] = {}
    loads_of_kernel: dict[tuple[int, str], Loads] = {}
    repetition = placed.repetition

    def clock_hz(role: int, gpu: str) -> float | None:
        costs = placed.costs.for_gpu(gpu)
        power = costs.power
        if power is None:
            return None
        loads, times = Loads(), Counter[int]()
        blocks: dict[int, Block] = {}
        for _, _, step in placed.program.roles[role].steps():
            if isinstance(step.op, Block):
                blocks[id(step.op)] = step.op
                times[id(step.op)] += 1 if repetition is None else repetition.runs(step)
        for number, block in blocks.items():
            key = number, gpu
            if key not in loads_of_block:
                loads_of_block[key] = _loads(block, costs, power.highest_hz, loads_of_kernel)
            loads.add_all(loads_of_block[key], times[number])
        length_s = sum(loads.seconds.values())
        drawn = Drawn(0.0, length_s, loads.seconds, loads.drawing_s)
        return power.clock_hz(power.trace([drawn], length_s), power.highest_hz)

    kinds = placed.kinds(cluster)
    clocks = {key: clock_hz(*key) for key in {(kind.role, kind.gpu): None for kind in kinds}}
    return {kind: clocks[kind.role, kind.gpu] for kind in kinds}


def next_clocks(
    placed: Placed,
    cluster: Cluster,
    representatives: Representatives,
    spans: RecordedSpans,
    store: TemplateStore,
    clocks: GpuClocks,
) -> GpuClocks:
    """Return the clocks at which what was played at ``clocks`` draws the power limit, if all wait as long as before."""
    if not any(clocks.values()):
        return clocks
    kinds, length_s = placed.rank_kinds(cluster), spans.length_s
    rank, drawn = _drawn(representatives, spans.times(), store)
    following = dict(clocks)
    for kind, count in Counter(kinds).items():
        power, clock_hz = placed.costs.for_gpu(kind.gpu).power, clocks[kind]
        if power is not None and clock_hz is not None:
            is_kind = np.isin(rank, [number for number in representatives.multiplicity if kinds[number] == kind])
            following[kind] = power.clock_hz(power.trace([drawn.only(is_kind)], length_s, count), clock_hz)
    return following


def _drawn(representatives: Representatives, spans: SpanTimes, store: TemplateStore) -> tuple[Ints, Drawn]:
    """Return the rank of every step, and what the step drew with all of its in-line communication.

    Steps and not spans are counted, as the number of spans of a step depends on how it is played.
    """
    n = len(spans.rank)
    start_s, end_s = np.full(n, np.inf), np.full(n, -np.inf)
    np.minimum.at(start_s, spans.step, spans.start_s)
    np.maximum.at(end_s, spans.step, spans.end_s)
    loads_of_template = [store.loads(template) for template in range(len(store.templates))]
    # Communication that the network timed has drawn for as long as it lasted.
    is_timed = [loads.seconds.keys() == {"communication"} for loads in loads_of_template]
    was_timed = np.array(is_timed)[spans.template]
    lasted_s = spans.end_s - spans.start_s

    def by_step(kind: str, seconds: Sequence[float]) -> Floats:
        by_span = np.array(seconds)[spans.template]
        by_span = np.where(was_timed, lasted_s, by_span) if kind == "communication" else by_span
        return np.bincount(spans.step, by_span, n).astype(float, copy=False)

    kinds = dict.fromkeys(kind for loads in loads_of_template for kind in loads.seconds)
    return spans.rank, Drawn(
        start_s,
        end_s,
        {kind: by_step(kind, [loads.seconds.get(kind, 0.0) for loads in loads_of_template]) for kind in kinds},
        {kind: by_step(kind, [loads.drawing_s.get(kind, 0.0) for loads in loads_of_template]) for kind in kinds},
        np.array([representatives.multiplicity[rank] for rank in spans.rank.tolist()]),
    )


def settled_clocks(before: GpuClocks, after: GpuClocks) -> GpuClocks:
    """Return ``before`` where every clock has changed by too little to matter, else ``after``."""
    pairs = [(before[kind], after[kind]) for kind in before]
    return before if all(a is None or b is None or abs(a - b) <= SETTLED * a for a, b in pairs) else after


def _loads(block: Block, costs: Costs, clock_hz: float, by_kernel: dict[tuple[int, str], Loads]) -> Loads:
    """Add up what the kernels of ``block`` draw at a clock; kernels, by id and GPU, are shared by layers and blocks."""
    loads = Loads()
    for compute in (compute for op in block.ops for compute in kernels_of(op)):
        key = id(compute.kernel), costs.gpu
        if key not in by_kernel:
            by_kernel[key] = _loads_of_kernel(compute.kernel, costs, clock_hz)
        loads.add_all(by_kernel[key])
    return loads


def _loads_of_kernel(kernel: Kernel, costs: Costs, clock_hz: float) -> Loads:
    """Return what a kernel draws at a clock, if anything."""
    loads = Loads()
    if (kind := load_class(kernel)) is not None:
        seconds = costs.kernel_s(kernel, costs.gpu, clock_hz)
        loads.add(kind, seconds, seconds * costs.intensity(kernel))
    return loads
