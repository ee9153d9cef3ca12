"""The clock: plays a Program on a Cluster with Costs, on SimPy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from simulator.cluster import Cluster
from simulator.costs import Costs
from simulator.engine.gpu_clocks import MOST_PLAYS, first_clocks, next_clocks, settled_clocks
from simulator.engine.placement import Placed, StepSource
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
    more: Callable[[], StepSource] | None = None,
) -> Timeline:
    """Play ``program``: rank i on GPU i of ``cluster``, or of its ``nodes`` in their order.

    ``costs`` prices kernels and transfers.

    ``fold`` and ``coalesce`` are exact shortcuts: with or without them the Timeline is the same to 1e-9.

    ``more()`` lets the program grow: it returns a source of extensions, a new one for each play that a power limit
    takes. The source is a function of the time, s, which returns the next `Extension`, or None where there is no more.
    It is called once for each, at the end of the instant at which a first lane has run all of its steps of the last
    one. An extension without steps has it called again at its release. A source ends the play by None, after so many
    extensions or at a time of its choice; what it raises, `simulate` raises. `play_together` returns the whole program.

    Ranks, links and transfers that are alike are found before the clock starts. So roles name, in `Role.later`, the
    communication that extensions bring; `simulator.program.expecting` reads it from samples. Hosts issue an extension
    behind the last one, in the order of a program by itself.

    Raises `ProgramError` on an ill-formed program or extension and `DeadlockError` when no rank can go on.
    """
    placed = Placed.on(program, costs, cluster, nodes, more)
    return simulate_together([placed], cluster, fold=fold, coalesce=coalesce)[0]


def simulate_together(
    jobs: Sequence[Placed], cluster: Cluster, *, fold: bool = True, coalesce: bool = True
) -> tuple[Timeline, ...]:
    """Play programs that begin at once on disjoint GPUs and share the links of ``cluster``: a Timeline each.

    The efficiency of links is that of the first job's costs. Where costs know of a power limit, all jobs are played
    again at the clocks that it leaves, until these stay. Raises as `simulate`.
    """
    return tuple(played.timeline for played in play_together(jobs, cluster, fold=fold, coalesce=coalesce))


class PlayedProgram(NamedTuple):
    """A program with all extensions that came, and its Timeline."""

    program: Program
    timeline: Timeline


@rarely_searched()
def play_together(
    jobs: Sequence[Placed], cluster: Cluster, *, fold: bool = True, coalesce: bool = True
) -> tuple[PlayedProgram, ...]:
    """Play programs as `simulate_together`; return each as it was played."""
    began = time.perf_counter()
    for placed in jobs:
        validate(placed.program, grows=placed.more is not None)
    simulated = fold_cluster(jobs, cluster, folded=fold)
    events = 0
    clocks = [first_clocks(placed, cluster) for placed in jobs]
    for number in range(MOST_PLAYS):
        network, plays, events_of_play = _play(jobs, simulated, cluster, coalesce, clocks)
        events += events_of_play
        # A job whose clocks have settled keeps them, as it does alone, however long others take.
        clocks = [_next_clocks(placed, cluster, play, number == 0) for placed, play in zip(jobs, plays, strict=True)]
        if all(following is play.clocks for play, following in zip(plays, clocks, strict=True)):
            break
    contention_of_links = contention(simulated, network.saturated_s, [placed.program.name for placed in jobs])
    programs = [play.program for play in plays]
    return tuple(
        PlayedProgram(
            program,
            play.recorder.timeline(
                program=program,
                representatives=play.representatives,
                clocks_hz={rank.number: rank.speed.clock_hz for rank in play.ranks if rank.speed.clock_hz is not None},
                links=links_of(simulated.links, play.representatives, play.counts),
                algorithms=algorithms_of(play.representatives, play.counts),
                contention=contention_of_links,
                events=events,
                wall_s=time.perf_counter() - began,
            ),
        )
        for program, play in zip(programs, plays, strict=True)
    )


def _next_clocks(placed: Placed, cluster: Cluster, play: Play, is_first: bool) -> GpuClocks:
    """Return the clocks of the next play; those of ``play`` itself where they have settled.

    The first play of a program that grows is at clocks of its beginning. Where those of the whole differ, it is played
    again at them, as the whole program would be.
    """
    if is_first and placed.more is not None and any(play.clocks.values()):
        clocks = first_clocks(replace(placed, program=play.program), cluster)
        if clocks != play.clocks:
            return clocks
    following = next_clocks(placed, cluster, play.representatives, play.recorder, play.clocks)
    return settled_clocks(play.clocks, following)


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
