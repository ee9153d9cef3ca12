"""What the network has carried, and who met there: facts of a simulation for its Timelines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from simulator.engine.world import Cast, SimulatedLink, World
from simulator.network.flows import Full
from simulator.timeline import Contention, LinkUse, Meeting

#: How often each transfer (by id) was made for each purpose.
Done = Counter[tuple[int, str]]


def links_of(links: Sequence[SimulatedLink], cast: Cast, done: Done) -> tuple[LinkUse, ...]:
    """What each simulated link has carried of one program, for each purpose."""
    carried: list[dict[str, float]] = [{} for _ in links]
    transfers = {id(transfer): transfer for transfer in cast.transfers.values()}
    for (transfer_id, purpose), times in done.items():
        for link, nbytes in transfers[transfer_id].link_bytes:
            carried[link][purpose] = carried[link].get(purpose, 0.0) + nbytes * times
    return tuple(
        LinkUse(link.name, link.kind, link.count, sum(of.values()), link.capacity_Bps, link.leaves_gpu, of)
        for link, of in zip(links, carried, strict=True)
    )


def algorithms_of(cast: Cast, done: Done) -> dict[str, str]:
    """Per purpose, the algorithm that sent the most bytes."""
    transfers = {id(transfer): transfer for transfer in cast.transfers.values()}
    sent: dict[str, dict[str, float]] = {}
    for (transfer_id, purpose), count in done.items():
        transfer = transfers[transfer_id]
        of_purpose = sent.setdefault(purpose, {})
        algorithm = transfer.plan.algorithm
        of_purpose[algorithm] = of_purpose.get(algorithm, 0.0) + count * transfer.wire_bytes
    return {purpose: max(of_purpose, key=lambda name: of_purpose[name]) for purpose, of_purpose in sent.items()}


def contention(world: World, full_s: Mapping[Full, float], names: Sequence[str]) -> tuple[Contention, ...]:
    """Who was held up on which link, and who was there beside them. ``full_s``: seconds of each state of a link;
    ``names``: of the programs.

    A transfer at rate r loses 1 - r / cap of every second in which a link holds it below its cap, what it would reach
    on an idle network: added up, that is how much longer it takes than alone.
    """
    met: dict[int, dict[tuple[int, str, str], list[float]]] = {}
    for full, seconds in full_s.items():
        here: dict[tuple[int, str, str], list[float]] = {}
        for phase, rate, held in zip(full.phases, full.rates, full.bottleneck, strict=True):
            stream = world.streams[id(phase)]
            count = stream.at_once[full.link]
            of = here.setdefault((stream.job, stream.axis, stream.op), [0.0, 0.0])
            of[0] += count
            of[1] += count * (1 - rate / phase.cap_Bps) if held else 0.0
        on_link = met.setdefault(full.link, {})
        for who, (count, lost) in here.items():
            row = on_link.setdefault(who, [0.0, 0.0, 0.0])
            row[0] = max(row[0], count)
            row[1] += seconds
            row[2] += seconds * lost / count
    return tuple(
        Contention(
            world.links[link].name,
            world.links[link].kind,
            world.links[link].count,
            tuple(
                Meeting(names[job] if job >= 0 else "", axis, op, *figures)
                for (job, axis, op), figures in sorted(on_link.items())
            ),
        )
        for link, on_link in sorted(met.items())
    )
