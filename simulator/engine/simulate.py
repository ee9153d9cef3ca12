"""The clock: plays a Program on a Cluster with Costs, on SimPy."""

from __future__ import annotations

import time
from collections.abc import Sequence

from simulator.cluster import Cluster
from simulator.costs import Costs
from simulator.engine.gpu_clocks import MOST_PLAYS, first_clocks, next_clocks, settled_clocks
from simulator.engine.placement import Placed
from simulator.engine.play import Play
from simulator.engine.recorder import GpuClocks
from simulator.engine.representatives import SimulatedCluster, fold_cluster
from simulator.engine.traffic import algorithms_of, contention, links_of
from simulator.garbage import rarely_searched
from simulator.network.flows import Network
from simulator.network.simulated_time import SimulatedTime
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
    """Play ``program``: rank i on GPU i of ``cluster``, or of its ``nodes`` in their order.

    ``costs`` prices kernels and transfers.

    ``fold`` and ``coalesce`` are exact shortcuts: with or without them the Timeline is the same to 1e-9.
    Raises `ProgramError` on an ill-formed program and `DeadlockError` when no rank can go on.
    """
    placed = Placed.on(program, costs, cluster, nodes)
    return simulate_together([placed], cluster, fold=fold, coalesce=coalesce)[0]


@rarely_searched()
def simulate_together(
    jobs: Sequence[Placed], cluster: Cluster, *, fold: bool = True, coalesce: bool = True
) -> tuple[Timeline, ...]:
    """Play programs that begin at once on disjoint GPUs and share the links of ``cluster``: a Timeline each.

    The efficiency of links is that of the first job's costs. Where costs know of a power limit, all jobs are played
    again at the clocks that it leaves, until these stay. Raises as `simulate`.
    """
    began = time.perf_counter()
    for placed in jobs:
        validate(placed.program)
    simulated = fold_cluster(jobs, cluster, folded=fold)
    events = 0
    clocks = [first_clocks(placed, cluster) for placed in jobs]
    for _ in range(MOST_PLAYS):
        network, plays, events_of_play = _play(jobs, simulated, cluster, coalesce, clocks)
        events += events_of_play
        # A job whose clocks have settled keeps them, as it does alone, however long others take.
        clocks = [
            settled_clocks(play.clocks, next_clocks(placed, cluster, play.representatives, play.recorder, play.clocks))
            for placed, play in zip(jobs, plays, strict=True)
        ]
        if all(following is play.clocks for play, following in zip(plays, clocks, strict=True)):
            break
    contention_of_links = contention(simulated, network.saturated_s, [placed.program.name for placed in jobs])
    return tuple(
        play.recorder.timeline(
            program=placed.program,
            representatives=play.representatives,
            clocks_hz={rank.number: rank.speed.clock_hz for rank in play.ranks if rank.speed.clock_hz is not None},
            links=links_of(simulated.links, play.representatives, play.counts),
            algorithms=algorithms_of(play.representatives, play.counts),
            contention=contention_of_links,
            events=events,
            wall_s=time.perf_counter() - began,
        )
        for placed, play in zip(jobs, plays, strict=True)
    )


def _play(
    jobs: Sequence[Placed],
    simulated: SimulatedCluster,
    cluster: Cluster,
    coalesce: bool,
    clocks: Sequence[GpuClocks],
) -> tuple[Network, list[Play], int]:
    """Play all jobs to the end, each at its clocks; return the network, the plays, and the number of events."""
    env = SimulatedTime()
    network = Network(env, [link.capacity_Bps for link in simulated.links])
    for phase in simulated.background:
        network.occupy(phase)
    plays = [
        Play(env, network, placed, representatives, cluster, coalesce, clocks_of_job)
        for placed, representatives, clocks_of_job in zip(jobs, simulated.representatives, clocks, strict=True)
    ]
    for play in plays:
        play.begin()
    env.run()
    for play in plays:
        play.end()
    network.finish(max(play.recorder.length_s for play in plays))
    return network, plays, env.events
