"""The clock: plays a Program on a Cluster with Costs, by one of two engines (`simulator.engine.engines`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from simulator.bounds import EngineChoice
from simulator.cluster import Cluster
from simulator.costs import Costs
from simulator.engine.engines import player
from simulator.engine.gpu_clocks import MOST_PLAYS, first_clocks, next_clocks, settled_clocks
from simulator.engine.periods import UnsteadyError
from simulator.engine.placement import Placed, StepSource
from simulator.engine.play import PlayedJob
from simulator.engine.recorder import GpuClocks
from simulator.engine.representatives import Representatives, fold_cluster
from simulator.engine.traffic import algorithms_of, contention, links_of
from simulator.garbage import rarely_searched
from simulator.program import Program, Repetition, validate
from simulator.timeline import Timeline


def simulate(
    program: Program,
    cluster: Cluster,
    costs: Costs,
    *,
    nodes: Sequence[int] | None = None,
    fold: bool = True,
    coalesce: bool = True,
    engine: EngineChoice = "auto",
    more: Callable[[], StepSource] | None = None,
    repetition: Repetition | None = None,
) -> Timeline:
    """Play ``program``: rank i on GPU i of ``cluster``, or of its ``nodes`` in their order.

    ``costs`` prices kernels and transfers.

    ``fold`` and ``coalesce`` are exact shortcuts: with or without them the Timeline is the same to 1e-9. ``engine``
    plays: "compiled", "python", which is the reference and takes ten times as long, or "auto" (`engines`).

    ``more()`` lets the program grow: it returns a source of extensions, a new one for each play that a power limit
    takes. The source is a function of the time, s, which returns the next `Extension`, or None where there is no more.
    It is called once for each, at the end of the instant at which a first lane has run all of its steps of the last
    one. An extension without steps has it called again at its release. A source ends the play by None, after so many
    extensions or at a time of its choice; what it raises, `simulate` raises. `play_together` returns the whole program.

    Ranks, links and transfers that are alike are found before the clock starts. So roles name, in `Role.later`, the
    communication that extensions bring; `simulator.program.expecting` reads it from samples. Hosts issue an extension
    behind the last one, in the order of a program by itself.

    ``repetition``: periods that ``program`` leaves out, which are put into the Timeline (`simulator.engine.periods`).
    `UnsteadyError` is raised where the play never came to the state of a period before.

    Raises `ProgramError` on an ill-formed program or extension and `DeadlockError` when no rank can go on.
    """
    placed = Placed.on(program, costs, cluster, nodes, more, repetition)
    return simulate_together([placed], cluster, fold=fold, coalesce=coalesce, engine=engine)[0]


def simulate_together(
    jobs: Sequence[Placed],
    cluster: Cluster,
    *,
    fold: bool = True,
    coalesce: bool = True,
    engine: EngineChoice = "auto",
) -> tuple[Timeline, ...]:
    """Play programs that begin at once on disjoint GPUs and share the links of ``cluster``: a Timeline each.

    The efficiency of links is that of the first job's costs. Where costs know of a power limit, all jobs are played
    again at the clocks that it leaves, until these stay, `MOST_PLAYS` times in all. `Timeline.clocks_settled` says
    whether they did. Raises as `simulate`.
    """
    return tuple(
        played.timeline for played in play_together(jobs, cluster, fold=fold, coalesce=coalesce, engine=engine)
    )


class PlayedProgram(NamedTuple):
    """A program with all extensions that came, and its Timeline."""

    program: Program
    timeline: Timeline


@rarely_searched()
def play_together(
    jobs: Sequence[Placed],
    cluster: Cluster,
    *,
    fold: bool = True,
    coalesce: bool = True,
    engine: EngineChoice = "auto",
) -> tuple[PlayedProgram, ...]:
    """Play programs as `simulate_together`; return each as it was played."""
    began = time.perf_counter()
    for placed in jobs:
        validate(placed.program, grows=placed.more is not None)
    if any(placed.repetition for placed in jobs) and (len(jobs) > 1 or cluster.background):
        raise UnsteadyError("a job beside others, or beside background traffic, has no period of its own")
    simulated = fold_cluster(jobs, cluster, folded=fold)
    playing, events = player(engine, jobs, simulated, cluster, coalesce), 0
    clocks = [first_clocks(placed, cluster) for placed in jobs]
    for number in range(MOST_PLAYS):
        played = playing.play(clocks)
        events += played.events
        # A job whose clocks have settled keeps them, as it does alone, however long others take.
        following = [
            _next_clocks(placed, cluster, representatives, job, before, number == 0)
            for placed, representatives, job, before in zip(
                jobs, simulated.representatives, played.jobs, clocks, strict=True
            )
        ]
        settled = [after is before for after, before in zip(following, clocks, strict=True)]
        if all(settled):
            break
        clocks = following
    contention_of_links = contention(simulated, played.saturations, [placed.program.name for placed in jobs])
    return tuple(
        PlayedProgram(
            job.program,
            job.spans.timeline(
                store=job.store,
                program=job.program,
                representatives=representatives,
                clocks_hz=job.clocks_hz,
                clocks_settled=has_settled,
                links=links_of(simulated.links, representatives, job.counts),
                algorithms=algorithms_of(representatives, job.counts),
                contention=contention_of_links,
                events=events,
                wall_s=time.perf_counter() - began,
            ),
        )
        for job, representatives, has_settled in zip(played.jobs, simulated.representatives, settled, strict=True)
    )


def _next_clocks(
    placed: Placed,
    cluster: Cluster,
    representatives: Representatives,
    job: PlayedJob,
    clocks: GpuClocks,
    is_first: bool,
) -> GpuClocks:
    """Return the clocks of the play after ``job`` was played at ``clocks``; these where they have settled.

    The first play of a program that grows is at clocks of its beginning. Where those of the whole differ, it is played
    again at them, as the whole program would be.
    """
    if is_first and placed.more is not None and any(clocks.values()):
        whole_clocks = first_clocks(replace(placed, program=job.program), cluster)
        if whole_clocks != clocks:
            return whole_clocks
    following = next_clocks(placed, cluster, representatives, job.spans, job.store, clocks)
    return settled_clocks(clocks, following)
