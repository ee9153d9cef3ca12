"""The user's choice of algorithm for all-reduces."""

from __future__ import annotations

from dataclasses import replace

from simulator.program import (
    Batch,
    Beside,
    Block,
    Collective,
    CollectiveKind,
    Comm,
    Compute,
    LaneSteps,
    Role,
    StepColumns,
)


def with_algorithm(roles: tuple[Role, ...], algorithm: str) -> tuple[Role, ...]:
    """Return ``roles`` with every all-reduce, in line or a step of its own, performed by ``algorithm``.

    Like ``NCCL_ALGO``, it says nothing of operations that have one algorithm only.
    """
    changed: dict[int, Block | Comm | Batch] = {}

    def choose(op: Block | Comm | Batch) -> Block | Comm | Batch:
        if id(op) not in changed:
            changed[id(op)] = _changed(op, algorithm)
        return changed[id(op)]

    def steps(columns: StepColumns) -> LaneSteps:
        prototypes = [replace(step, op=choose(step.op)) for step in columns.prototypes]
        return LaneSteps(replace(columns, prototypes=prototypes))

    return tuple(Role(role.name, {lane: steps(columns) for lane, columns in role.columns.items()}) for role in roles)


def _changed(op: Block | Comm | Batch, algorithm: str) -> Block | Comm | Batch:
    """Return the operation of a step with its all-reduces performed by ``algorithm``."""
    match op:
        case Collective(op=CollectiveKind.ALL_REDUCE):
            return replace(op, algorithm=algorithm)
        case Block():
            return Block(op.name, tuple(_inside(one, algorithm) for one in op.ops))
    return op


def _inside(op: Compute | Collective | Beside, algorithm: str) -> Compute | Collective | Beside:
    """Return one operation of a block with its all-reduce performed by ``algorithm``."""
    match op:
        case Collective(op=CollectiveKind.ALL_REDUCE):
            return replace(op, algorithm=algorithm)
        case Beside(comm=Collective(op=CollectiveKind.ALL_REDUCE)):
            return replace(op, comm=replace(op.comm, algorithm=algorithm))
    return op
