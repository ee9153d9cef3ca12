"""From a workload to the program of one training step."""

from __future__ import annotations

from simulator.build.algorithm import with_algorithm
from simulator.build.layout import layout
from simulator.build.pipeline import Lanes, lower
from simulator.build.stages import Stages
from simulator.build.tail import tail
from simulator.config import Workload
from simulator.model import Seat
from simulator.program import Program, Role


def build_program(workload: Workload) -> Program:
    """One training step of ``workload``: a role per distinct place of its layout, shared by all ranks that have it."""
    placed = layout(workload)
    parallelism = workload.parallelism
    schedule = parallelism.plan
    order = schedule.order(parallelism.pp, workload.microbatches, parallelism.vpp)
    lowered: dict[Seat, tuple[Stages, list[Lanes]]] = {}
    roles = []
    for place in placed.places:
        if place.seat not in lowered:
            stages = Stages(workload, place.seat)
            overlap = parallelism.overlap.p2p
            lanes = lower(order, schedule, parallelism.n_stages, stages.hop_bytes, stages.step, overlap=overlap)
            lowered[place.seat] = stages, lanes
        stages, lanes = lowered[place.seat]
        whole = tail(workload, stages, place.pipeline_rank, lanes[place.pipeline_rank])
        roles.append(Role(str(place), {lane: tuple(steps) for lane, steps in whole.items()}))
    if parallelism.collective_algorithm != "auto":
        roles = list(with_algorithm(tuple(roles), parallelism.collective_algorithm))
    return Program(tuple(roles), placed.place_of, placed.groups, workload.name)
