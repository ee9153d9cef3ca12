"""What the network has carried, and who met there: facts of a simulation for its Timelines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from simulator.engine.representatives import Cast, SimulatedLink, World
from simulator.network.flows import Full
from simulator.timeline import Contender, Contention, LinkUse

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
    of_link: dict[int, list[Full]] = {}
    for full in full_s:
        of_link.setdefault(full.link, []).append(full)
    return tuple(
        Contention(
            world.links[link].name,
            world.links[link].kind,
            world.links[link].count,
            tuple(
                Contender(names[job] if job >= 0 else "", axis, op, *figures)
                for (job, axis, op), figures in sorted(_met(world, link, states, full_s).items())
            ),
        )
        for link, states in sorted(of_link.items())
    )


def _met(
    world: World, link: int, states: Sequence[Full], full_s: Mapping[Full, float]
) -> dict[tuple[int, str, str], tuple[float, float, float]]:
    """Job, axis and operation of everybody on a link, with the most there at once, the seconds that they were there in
    these ``states``, and what each of them lost."""
    streams = [world.streams[id(phase.unslowed or phase)] for full in states for phase in full.phases]
    numbers: dict[tuple[int, str, str], int] = {}
    who = np.array([numbers.setdefault((stream.job, stream.axis, stream.op), len(numbers)) for stream in streams])
    count = np.array([stream.at_once[link] for stream in streams])
    held = np.array([is_held for full in states for is_held in full.bottleneck])
    cap_Bps = np.array([phase.cap_Bps for full in states for phase in full.phases])
    rate_Bps = np.array([rate for full in states for rate in full.rates])
    state = np.repeat(np.arange(len(states)), [len(full.phases) for full in states])
    shape = len(states), len(numbers)
    entry = state * len(numbers) + who
    there = np.bincount(entry, count, math.prod(shape)).reshape(shape)
    lost = np.bincount(entry, np.where(held, count * (1 - rate_Bps / cap_Bps), 0.0), math.prod(shape)).reshape(shape)
    seconds = np.array([full_s[full] for full in states])
    each = np.divide(lost, there, out=np.zeros(shape), where=there > 0)
    figures = zip(there.max(axis=0).tolist(), (seconds @ (there > 0)).tolist(), (seconds @ each).tolist(), strict=True)
    return dict(zip(numbers, figures, strict=True))
