"""A pipeline schedule alone: unit costs in place of a model."""

from __future__ import annotations

from simulator.build.pipeline import lower
from simulator.program import Block, Compute, Fixed, Program, Role, Step
from simulator.schedules import SCHEDULES, Action


def schedule_program(
    name: str, stages: int, microbatches: int, chunks: int, forward_s: float, backward_s: float
) -> Program:
    """The program of schedule ``name`` on ``stages`` pipeline ranks with ``chunks`` chunks each.

    A forward of a chunk lasts ``forward_s``, its whole backward ``backward_s``; transfers carry no bytes, so that they
    last the cluster's latency, in the background. A held micro-batch chunk counts as one byte of memory.
    """
    schedule = SCHEDULES[name]
    order = schedule.order(stages, microbatches, chunks)
    seconds = {"F": forward_s, "B": backward_s}
    blocks = {kind: Block(kind, (Compute(kind, Fixed(length), kind),)) for kind, length in seconds.items()}

    def step(action: Action) -> Step:
        forward = action.kind == "F"
        return Step(
            str(action),
            blocks[action.kind],
            phase=action.kind,
            microbatch=action.microbatch,
            stage=action.stage,
            chunk=action.stage // stages,
            alloc_bytes=float(forward),
            free_bytes=float(not forward),
        )

    lanes = lower(order, schedule, stages * chunks, 0.0, step, overlap=True)
    roles = tuple(
        Role(f"stage{rank}", {lane: tuple(steps) for lane, steps in of_rank.items()})
        for rank, of_rank in enumerate(lanes)
    )
    groups = {"pp": (tuple(range(stages)),)} if stages > 1 else {}
    return Program(roles, tuple(range(stages)), groups, name)
