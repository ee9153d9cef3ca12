"""Lowering: a workload becomes the program of one training step, or of several.

A schedule orders the passes of every pipeline rank; `pipeline` adds their transfers. `passes.PASSES` then adds, one
after another, all else that a step does.
"""

from __future__ import annotations

from functools import partial

from simulator.config import Workload
from simulator.garbage import rarely_searched
from simulator.lowering.collective_algorithm import with_algorithm
from simulator.lowering.lanes import Lanes
from simulator.lowering.layout import layout
from simulator.lowering.passes import apply_passes
from simulator.lowering.passes.hide_all_to_alls import pairs_in
from simulator.lowering.pipeline import lower, whole_at_first
from simulator.lowering.rank_context import RankContext
from simulator.lowering.stage_variants import first_and_last
from simulator.lowering.stages import Stages
from simulator.lowering.steps_in_a_row import repeated, rolling
from simulator.models import Seat, passed_bytes
from simulator.program import Program, Role
from simulator.schedules import Order, Schedule, Times


@rarely_searched()
def build_program(
    workload: Workload, *, times: Times | None = None, steps: int = 1, passes: Order | None = None
) -> Program:
    """Return one training step of ``workload``, or ``steps`` in a row with micro-batches numbered through.

    Each distinct place of its layout is a role, shared by all ranks that have it. ``times``: what a schedule that can
    be is tuned to. ``passes``: the order of a `ShortenedStep`, instead of that of the whole step.
    """
    parallelism, placed = workload.parallelism, layout(workload)
    order, schedule = _order(workload, times, steps, passes)
    pipelines: dict[Seat, tuple[Stages, list[Lanes]]] = {}
    roles: list[Role] = []
    for place in placed.places:
        if place.seat not in pipelines:
            pipelines[place.seat] = _pipeline(workload, place.seat, order, schedule)
        stages, ranks = pipelines[place.seat]
        context = RankContext(workload, stages, place.pipeline_rank, pairs_in(order[place.pipeline_rank]))
        lanes = _all_steps(ranks[place.pipeline_rank], context, steps)
        roles.append(Role(str(place), lanes))
    if parallelism.collective_algorithm != "auto":
        roles = list(with_algorithm(tuple(roles), parallelism.collective_algorithm))
    first_server = len(workload.own_nodes) - parallelism.server_count
    servers = tuple(range(first_server, first_server + parallelism.server_count))
    return Program(tuple(roles), placed.place_of, placed.groups, workload.name, servers)


def _order(workload: Workload, times: Times | None, steps: int, passes: Order | None) -> tuple[Order, Schedule]:
    """Return the order of passes on every pipeline rank, of one step or of as many as run on as one."""
    parallelism = workload.parallelism
    schedule = parallelism.pipeline_schedule if times is None else parallelism.pipeline_schedule.tuned(times)
    size = (parallelism.pp, workload.microbatches, parallelism.vpp)
    whole = schedule.order if schedule.drains else partial(schedule.over, steps=steps)
    order = whole(*size) if passes is None else passes
    if workload.stage_runtime.first_backward_whole and schedule.splits:
        return whole_at_first(order, schedule, parallelism.n_stages)
    return order, schedule


def _pipeline(workload: Workload, seat: Seat, order: Order, schedule: Schedule) -> tuple[Stages, list[Lanes]]:
    """Return the stages of the ranks at a seat, and by pipeline rank the lanes of its passes and transfers."""
    parallelism = workload.parallelism
    stages = Stages(workload, seat, first_and_last(order, workload.microbatches))
    lanes = lower(
        order,
        schedule,
        parallelism.n_stages,
        passed_bytes(workload),
        stages.step,
        stages.variants.turns,
        overlap=parallelism.overlap.p2p,
        batched=parallelism.batch_p2p,
        apart=workload.stage_runtime.awaits_apart,
    )
    return stages, lanes


def _all_steps(lanes: Lanes, context: RankContext, steps: int) -> Lanes:
    """Return the lanes of a rank with all its work, ``steps`` times."""
    microbatches = context.workload.microbatches
    if context.parallelism.pipeline_schedule.drains:
        return repeated(apply_passes(lanes, context), steps, microbatches)
    return rolling(lanes, steps, microbatches, lambda passes: apply_passes(passes, context))
