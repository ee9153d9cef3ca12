"""From a workload to the program of one training step."""

from __future__ import annotations

from functools import partial

from simulator.config import Workload
from simulator.garbage import rarely_searched
from simulator.lowering.collective_algorithm import with_algorithm
from simulator.lowering.layout import layout
from simulator.lowering.pipeline import Lanes, lower, whole_at_first
from simulator.lowering.stages import Stages
from simulator.lowering.step_end import tail
from simulator.lowering.steps import repeated, rolling
from simulator.models import Seat, Turn, passed_bytes
from simulator.program import Program, Role
from simulator.schedules import Order, Times


@rarely_searched()
def build_program(workload: Workload, *, times: Times | None = None, steps: int = 1) -> Program:
    """One training step of ``workload``, or ``steps`` in a row with micro-batches numbered through: a role per distinct
    place of its layout, shared by all ranks that have it. ``times``: what a schedule that can be is tuned to."""
    placed = layout(workload)
    parallelism = workload.parallelism
    schedule = parallelism.plan if times is None else parallelism.plan.tuned(times)
    size = (parallelism.pp, workload.microbatches, parallelism.vpp)
    order = schedule.order(*size) if schedule.drains else schedule.over(*size, steps)
    if workload.stage_runtime.first_backward_whole and schedule.splits:
        order, schedule = whole_at_first(order, schedule, parallelism.n_stages)
    lowered: dict[Seat, tuple[Stages, list[Lanes]]] = {}
    roles, turns = [], _turns(order, workload.microbatches)
    for place in placed.places:
        if place.seat not in lowered:
            stages = Stages(workload, place.seat, turns)
            lanes = lower(
                order,
                schedule,
                parallelism.n_stages,
                passed_bytes(workload),
                stages.step,
                overlap=parallelism.overlap.p2p,
                batched=parallelism.batch_p2p,
                apart=workload.stage_runtime.awaits_apart,
            )
            lowered[place.seat] = stages, lanes
        stages, lanes = lowered[place.seat]
        add_tail = partial(tail, workload, stages, place.pipeline_rank)
        of_rank = lanes[place.pipeline_rank]
        if schedule.drains:
            whole = repeated(add_tail(of_rank), steps, workload.microbatches)
        else:
            whole = rolling(of_rank, steps, workload.microbatches, add_tail)
        roles.append(Role(str(place), {lane: tuple(steps) for lane, steps in whole.items()}))
    if parallelism.collective_algorithm != "auto":
        roles = list(with_algorithm(tuple(roles), parallelism.collective_algorithm))
    first_server = len(workload.own_nodes) - parallelism.server_count
    servers = tuple(range(first_server, first_server + parallelism.server_count))
    return Program(tuple(roles), placed.place_of, placed.groups, workload.name, servers)


def _turns(order: Order, microbatches: int) -> dict[tuple[int, int], Turn]:
    """By stage and micro-batch, those that make the first and the last gradients of a stage in a step."""
    made: dict[tuple[int, int], list[int]] = {}
    for action in (action for slots in order for slot in slots for action in slot):
        if action.kind in ("B", "W"):
            made.setdefault((action.stage, action.microbatch // microbatches), []).append(action.microbatch)
    return {
        (stage, microbatch): Turn(first=microbatch == row[0], last=microbatch == row[-1])
        for (stage, _), row in made.items()
        for microbatch in (row[0], row[-1])
    }
