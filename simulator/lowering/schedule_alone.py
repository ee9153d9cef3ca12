"""A pipeline schedule alone: unit costs in place of a model."""

from __future__ import annotations

from simulator.garbage import rarely_searched
from simulator.lowering.pipeline import lower
from simulator.program import Block, Compute, Fixed, Program, Role, Step, StepPhase
from simulator.schedules import Action, Order, Schedule, in_a_row


@rarely_searched()
def schedule_program(
    schedule: Schedule,
    stages: int,
    microbatches: int,
    chunks: int,
    forward_s: float,
    backward_s: float,
    weight_s: float = 0.0,
    *,
    steps: int = 1,
    passes: Order | None = None,
) -> Program:
    """Return the program of ``schedule`` on ``stages`` pipeline ranks with ``chunks`` chunks each.

    A forward of a chunk lasts ``forward_s``, its whole backward ``backward_s``, of which the weight gradient takes
    ``weight_s`` where they are split. Transfers carry no bytes, so that they last the cluster's latency, in the
    background. A held micro-batch chunk counts as one byte of memory. ``steps`` in a row, micro-batches numbered
    through. ``passes``: the order of a `ShortenedStep`, instead of that of the whole step.
    """
    order = (
        schedule.over(stages, microbatches, chunks, steps) if passes is None else in_a_row(passes, microbatches, steps)
    )
    seconds = {"F": forward_s, "B": backward_s, "I": backward_s - weight_s, "W": weight_s}
    blocks = {kind: Block(kind, (Compute(kind, Fixed(length), StepPhase(kind)),)) for kind, length in seconds.items()}

    def step(action: Action, after: tuple[str, ...]) -> Step:
        stage, kind, microbatch = action
        return Step(
            str(action),
            blocks[kind],
            after,
            phase=StepPhase(kind),
            microbatch=microbatch,
            stage=stage,
            chunk=stage // stages,
            alloc_bytes=float(kind == "F"),
            free_bytes=float(kind in "BW"),
        )

    lanes = lower(order, schedule, stages * chunks, 0.0, step, overlap=True)
    roles = tuple(Role(f"stage{rank}", rank_lanes) for rank, rank_lanes in enumerate(lanes))
    groups = {"pp": (tuple(range(stages)),)} if stages > 1 else {}
    return Program(roles, tuple(range(stages)), groups, schedule.name)
