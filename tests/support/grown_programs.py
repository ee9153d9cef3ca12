"""Small programs that grow, and their play."""

from __future__ import annotations

from collections.abc import Callable

from simulator.costs import Costs
from simulator.engine import Placed, PlayedProgram, StepSource, play_together
from simulator.engine.invariants import check
from simulator.program import (
    Block,
    Collective,
    CollectiveKind,
    Comm,
    Compute,
    Fixed,
    Program,
    Purpose,
    Role,
    Step,
    StepPhase,
)
from tests.support.clusters import nic_cluster
from tests.support.engines import ENGINES, each_engine  # noqa: F401

IDEAL = Costs.ideal()

F, B = StepPhase.FORWARD, StepPhase.BACKWARD

REDUCTION = Collective("r", CollectiveKind.ALL_REDUCE, 1e9, "dp", Purpose.DATA)


def kernel(label: str, seconds: float, *after: str, phase: StepPhase = F) -> Step:
    return Step(label, Block(label, (Compute(label, Fixed(seconds), phase),)), after, phase)


def one_role(lanes: dict[str, tuple[Step, ...]], ranks: int = 1, **later: tuple[Comm, ...]) -> Program:
    """Return a program of ranks that do the same, in one dp group."""
    return Program((Role("all", lanes, later),), (0,) * ranks, {"dp": (tuple(range(ranks)),)})


def grow(program: Program, more: Callable[[], StepSource], costs: Costs = IDEAL, **shortcuts: bool) -> PlayedProgram:
    cluster = nic_cluster(program.n_ranks)
    (played,) = play_together([Placed.on(program, costs, cluster, more=more)], cluster, **shortcuts)
    check(played.program, played.timeline)
    return played


def spans(played: PlayedProgram, rank: int = 0) -> dict[str, tuple[float, float]]:
    """Label of a step -> when it began and ended."""
    timeline = played.timeline
    mine = (timeline.rank == timeline.simulated_as[rank]).tolist()
    times = zip(timeline.labels, timeline.start_s.tolist(), timeline.end_s.tolist(), mine, strict=True)
    return {label: (start_s, end_s) for label, start_s, end_s, is_mine in times if is_mine}
