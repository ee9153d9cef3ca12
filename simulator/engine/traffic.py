"""Facts of the network for Timelines: what links have carried, and which transfers met on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from simulator.engine.folded_traffic import SimulatedLink
from simulator.engine.representatives import Representatives, SimulatedCluster
from simulator.network.max_min import Saturations
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
        LinkUse(
            link.name, link.kind, link.count, sum(uses.values()), link.capacity_Bps, link.leaves_gpu, uses, link.index
        )
        for link, uses in zip(links, carried, strict=True)
    )


def algorithms_of(representatives: Representatives, counts: CommCounts) -> dict[str, str]:
    """Return for each purpose the algorithm by which all ranks together sent the most bytes; of equals the first name.

    Bytes are added up in another order where ranks are folded: what differs in the last digits alone is equal.
    """
    planned = {id(one): one for one in representatives.planned.values()}
    sent: dict[str, dict[str, float]] = {}
    for (planned_id, purpose), count in counts.items():
        one = planned[planned_id]
        by_algorithm = sent.setdefault(purpose, {})
        algorithm = one.plan.algorithm
        senders = sum(representatives.multiplicity[rank] for rank in one.members)
        by_algorithm[algorithm] = by_algorithm.get(algorithm, 0.0) + count * one.wire_bytes * senders
    return {purpose: _most_used(by_algorithm) for purpose, by_algorithm in sent.items()}


def _most_used(sent: Mapping[str, float]) -> str:
    most = max(sent.values())
    return min(name for name, nbytes in sent.items() if math.isclose(nbytes, most))


def contention(cluster: SimulatedCluster, full: Saturations, names: Sequence[str]) -> tuple[Contention, ...]:
    """Return who was held up on which link, and who was there beside them.

    ``names``: of the programs. A transfer's cap is the rate that it would reach on an idle network. At rate r it loses
    1 - r / cap of every second in which a link holds it below its cap. Added up, that is how much longer it takes than
    alone.
    """
    contenders: dict[int, list[Contender]] = {}
    for (job, axis, op), link, *figures in sorted(_losses(cluster, full), key=lambda loss: loss[:2]):
        contenders.setdefault(link, []).append(Contender(names[job] if job >= 0 else "", axis, op, *figures))
    met = ((cluster.links[number], tuple(on_link)) for number, on_link in sorted(contenders.items()))
    return tuple(Contention(link.name, link.kind, link.count, on_link, link.index) for link, on_link in met)


def _losses(
    cluster: SimulatedCluster, full: Saturations
) -> list[tuple[tuple[int, str, str], int, float, float, float]]:
    """Return figures of the transfers of each job, axis and operation on each full link.

    The figures are the most of them there at once, the seconds that any was there, and the seconds that each lost.
    """
    sources = [cluster.sources[id(phase)] for phase in full.phases]
    numbers: dict[tuple[int, str, str], int] = {}
    source = np.array(
        [numbers.setdefault((one.job, one.axis, one.op), len(numbers)) for one in sources], dtype=np.int64
    )
    n_links, n_sources = len(cluster.links), len(numbers)
    # How many transfers a phase stands for on a link.
    crossings, crossing_of = np.unique(full.phase * n_links + full.link[full.state], return_inverse=True)
    at_once = np.array([sources[one // n_links].at_once[one % n_links] for one in crossings.tolist()], dtype=np.float64)
    count = at_once[crossing_of]
    # Transfers of a source in a state of a link, and what they lose of each second together.
    pairs, pair_of = np.unique(full.state * n_sources + source[full.phase], return_inverse=True)
    state, source = pairs // max(n_sources, 1), pairs % max(n_sources, 1)
    present = np.bincount(pair_of, count, len(pairs))
    loss = np.where(full.is_held_up, count * (1 - full.rate_Bps / full.cap_Bps), 0.0)
    lost = np.bincount(pair_of, loss, len(pairs))
    each = np.divide(lost, present, out=np.zeros(len(pairs)), where=present > 0)
    # Over the states of each link.
    contenders, contender_of = np.unique(full.link[state] * n_sources + source, return_inverse=True)
    most = np.zeros(len(contenders))
    np.maximum.at(most, contender_of, present)
    seconds = np.bincount(contender_of, full.seconds[state] * (present > 0), len(contenders))
    lost_s = np.bincount(contender_of, full.seconds[state] * each, len(contenders))
    by_number, figures = list(numbers), (most.tolist(), seconds.tolist(), lost_s.tolist())
    return [
        (by_number[one % n_sources], one // n_sources, *row)
        for one, *row in zip(contenders.tolist(), *figures, strict=True)
    ]
