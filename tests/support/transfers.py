"""Programs of a few transfers on small clusters, whose ends can be derived by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from simulator.costs import Costs
from simulator.engine import simulate
from simulator.engine.invariants import check
from simulator.program import Comm, Program, Role, Step
from simulator.timeline import Timeline
from tests.support.clusters import nic_cluster

IDEAL = Costs.ideal()
#: Pairs (fold, coalesce).
SHORTCUTS = list(product((True, False), repeat=2))


def play(
    program: Program, costs: Costs = IDEAL, *, gpus: int = 1, fold: bool = True, coalesce: bool = True
) -> Timeline:
    timeline = simulate(program, nic_cluster(program.n_ranks // gpus, gpus), costs, fold=fold, coalesce=coalesce)
    check(program, timeline)
    return timeline


def ends(timeline: Timeline, rank: int = 0) -> dict[str, float]:
    """Label of a step -> when it ended on the simulated rank of ``rank``."""
    mine = timeline.rank == timeline.simulated_as[rank]
    return {label: float(timeline.end_s[i]) for i, label in enumerate(timeline.labels) if mine[i]}


def at_once(groups: Mapping[str, Sequence[Sequence[int]]], *comms: Comm) -> Program:
    """Every rank calls all of ``comms`` at time 0, each on a lane of its own."""
    ranks = sorted({rank for of_axis in groups.values() for group in of_axis for rank in group})
    role = Role("all", {f"lane{i}": (Step(f"step{i}", comm),) for i, comm in enumerate(comms)})
    named = {axis: tuple(tuple(group) for group in of_axis) for axis, of_axis in groups.items()}
    return Program((role,), (0,) * len(ranks), named)
