"""Facts of the network for Timelines: what links have carried, and which transfers met on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from simulator.engine.representatives import Representatives, SimulatedCluster, SimulatedLink
from simulator.network.max_min import Saturation
from simulator.timeline import Contender, Contention, LinkUse

#: How often each planned communication (by id) was made for each purpose.
CommCounts = Counter[tuple[int, str]]


def links_of(
    links: Sequence[SimulatedLink], representatives: Representatives, counts: CommCounts
) -> tuple[LinkUse, ...]:
    """Return what each simulated link has carried of one program, for each purpose."""
    carried: list[dict[str, float]] = [{} for _ in links]
    planned = {id(one): one for one in representatives.planned.values()}
    for (planned_id, purpose), times in counts.items():
        for link, nbytes in planned[planned_id].link_bytes:
            carried[link][purpose] = carried[link].get(purpose, 0.0) + nbytes * times
    return tuple(
        LinkUse(link.name, link.kind, link.count, sum(uses.values()), link.capacity_Bps, link.leaves_gpu, uses)
        for link, uses in zip(links, carried, strict=True)
    )


def algorithms_of(representatives: Representatives, counts: CommCounts) -> dict[str, str]:
    """Return for each purpose the algorithm that sent the most bytes."""
    planned = {id(one): one for one in representatives.planned.values()}
    sent: dict[str, dict[str, float]] = {}
    for (planned_id, purpose), count in counts.items():
        one = planned[planned_id]
        by_algorithm = sent.setdefault(purpose, {})
        algorithm = one.plan.algorithm
        by_algorithm[algorithm] = by_algorithm.get(algorithm, 0.0) + count * one.wire_bytes
    return {purpose: max(by_algorithm, key=lambda name: by_algorithm[name]) for purpose, by_algorithm in sent.items()}


def contention(
    cluster: SimulatedCluster, saturated_s: Mapping[Saturation, float], names: Sequence[str]
) -> tuple[Contention, ...]:
    """Return who was held up on which link, and who was there beside them.

    ``saturated_s``: seconds of each state of a link; ``names``: of the programs. A transfer's cap is the rate that it
    would reach on an idle network. At rate r it loses 1 - r / cap of every second in which a link holds it below its
    cap. Added up, that is how much longer it takes than alone.
    """
    states_of_link: dict[int, list[Saturation]] = {}
    for saturation in saturated_s:
        states_of_link.setdefault(saturation.link, []).append(saturation)
    return tuple(
        Contention(
            cluster.links[link].name,
            cluster.links[link].kind,
            cluster.links[link].count,
            tuple(
                Contender(names[job] if job >= 0 else "", axis, op, *figures)
                for (job, axis, op), figures in sorted(_losses(cluster, link, states, saturated_s).items())
            ),
        )
        for link, states in sorted(states_of_link.items())
    )


def _losses(
    cluster: SimulatedCluster, link: int, states: Sequence[Saturation], saturated_s: Mapping[Saturation, float]
) -> dict[tuple[int, str, str], tuple[float, float, float]]:
    """Return for each job, axis and operation on a link three figures, over these ``states`` of the link.

    They are the most transfers there at once, the seconds that any was there, and the seconds that each of them lost.
    """
    sources = [cluster.sources[id(phase.unslowed or phase)] for state in states for phase in state.phases]
    numbers: dict[tuple[int, str, str], int] = {}
    source = np.array([numbers.setdefault((one.job, one.axis, one.op), len(numbers)) for one in sources])
    count = np.array([one.at_once[link] for one in sources])
    held_up = np.array([is_held_up for state in states for is_held_up in state.held_up])
    cap_Bps = np.array([phase.cap_Bps for state in states for phase in state.phases])
    rate_Bps = np.array([rate for state in states for rate in state.rates])
    state = np.repeat(np.arange(len(states)), [len(state.phases) for state in states])
    shape = len(states), len(numbers)
    entry = state * len(numbers) + source
    present = np.bincount(entry, count, math.prod(shape)).reshape(shape)
    loss = np.where(held_up, count * (1 - rate_Bps / cap_Bps), 0.0)
    lost = np.bincount(entry, loss, math.prod(shape)).reshape(shape)
    seconds = np.array([saturated_s[state] for state in states])
    each = np.divide(lost, present, out=np.zeros(shape), where=present > 0)
    figures = present.max(axis=0).tolist(), (seconds @ (present > 0)).tolist(), (seconds @ each).tolist()
    return dict(zip(numbers, zip(*figures, strict=True), strict=True))
