"""The clock: plays a Program on a Cluster with Costs, on SimPy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import simpy
from simpy.core import EmptySchedule

from simulator.cluster import Cluster
from simulator.costs import Costs
from simulator.engine.clocks import MOST_PLAYS, first_clocks, next_clocks, settled
from simulator.engine.placement import Placed
from simulator.engine.play import Play
from simulator.engine.recorder import Clocks
from simulator.engine.representatives import World, build_world
from simulator.engine.traffic import algorithms_of, contention, links_of
from simulator.garbage import rarely_searched
from simulator.network.flows import Network
from simulator.program import Program, validate
from simulator.timeline import Timeline


def simulate(
    program: Program,
    cluster: Cluster,
    costs: Costs,
    *,
    nodes: Sequence[int] | None = None,
    fold: bool = True,
    coalesce: bool = True,
) -> Timeline:
    """Play ``program``: rank i on GPU i of ``cluster``, or of its ``nodes`` in their order; kernels and transfers as
    ``costs`` says.

    ``fold`` and ``coalesce`` are exact shortcuts: with or without them the Timeline is the same to 1e-9.
    Raises `ProgramError` on an ill-formed program and `DeadlockError` when no rank can go on.
    """
    placed = Placed.on(program, costs, cluster, nodes)
    return simulate_together([placed], cluster, fold=fold, coalesce=coalesce)[0]


@rarely_searched()
def simulate_together(
    jobs: Sequence[Placed], cluster: Cluster, *, fold: bool = True, coalesce: bool = True
) -> tuple[Timeline, ...]:
    """Play programs that begin at once on GPUs of their own and share the links of ``cluster``, which are as good as
    the costs of the first say: a Timeline each. Where costs know of a power limit, all are played again at the clocks
    that it leaves, until these stay. Raises as `simulate`."""
    began = time.perf_counter()
    for placed in jobs:
        validate(placed.program)
    world = build_world(jobs, cluster, folded=fold)
    events = 0
    clocks = [first_clocks(placed, cluster) for placed in jobs]
    for _ in range(MOST_PLAYS):
        network, plays, more = _played(jobs, world, cluster, coalesce, clocks)
        events += more
        following = [
            next_clocks(placed, cluster, one.cast, one.recorder, one.store, one.clocks)
            for placed, one in zip(jobs, plays, strict=True)
        ]
        # A job whose clocks have settled keeps them, as it does alone, however long others take.
        clocks = [
            one.clocks if settled(one.clocks, after) else after for one, after in zip(plays, following, strict=True)
        ]
        if all(after is one.clocks for one, after in zip(plays, clocks, strict=True)):
            break
    met = contention(world, network.full_s, [placed.program.name for placed in jobs])
    return tuple(
        playing.recorder.timeline(
            program=placed.program,
            cast=cast,
            templates=playing.store.templates,
            clocks_hz={r.number: r.runs.clock_hz for r in playing.ranks if r.runs.clock_hz is not None},
            links=links_of(world.links, cast, playing.done),
            algorithms=algorithms_of(cast, playing.done),
            contention=met,
            events=events,
            wall_s=time.perf_counter() - began,
        )
        for placed, cast, playing in zip(jobs, world.casts, plays, strict=True)
    )


def _played(
    jobs: Sequence[Placed], world: World, cluster: Cluster, coalesce: bool, clocks: Sequence[Clocks]
) -> tuple[Network, list[Play], int]:
    """Play all to the end, each at its clocks: what moved, how each went, and the number of events that it took."""
    env = simpy.Environment()
    network = Network(env, [link.capacity_Bps for link in world.links])
    for phase in world.background:
        network.occupy(phase)
    plays = [
        Play(env, network, placed, cast, cluster, coalesce, of_roles)
        for placed, cast, of_roles in zip(jobs, world.casts, clocks, strict=True)
    ]
    for playing in plays:
        playing.begin()
    events = 0
    with suppress(EmptySchedule):
        while True:
            env.step()
            events += 1
    for playing in plays:
        playing.end()
    network.finish(max(playing.recorder.length_s for playing in plays))
    return network, plays, events
