"""One entry of a lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simulator.program.ops import Batch, Block, Comm
from simulator.program.slots import slot_setters
from simulator.program.vocabulary import StepPhase


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of a lane.

    ``after`` holds labels of steps of the same rank that must have ended.
    ``stage`` is the model stage (chunk * pp + pipeline rank for interleaved schedules), -1 where it has none.
    ``part`` tells apart pieces of one thing: those that a pass is cut into, and parts of the parameters on servers.
    Memory: ``alloc_bytes`` are held from the step's start, ``free_bytes`` are given back at its end.
    Either may be negative, where the other outweighs it: a backward pass may leave more gradients than it frees.
    ``workspace_bytes`` are held only while it runs.
    ``hooks``: modules whose hooks the host runs before it.
    """

    label: str
    op: Block | Comm | Batch
    after: tuple[str, ...] = ()
    phase: StepPhase = StepPhase.COMMUNICATION
    microbatch: int = -1
    stage: int = -1
    chunk: int = 0
    part: str = ""
    alloc_bytes: float = 0.0
    free_bytes: float = 0.0
    workspace_bytes: float = 0.0
    hooks: int = 0


_SETTERS = slot_setters(Step)
# `reordered` looks up no name: a loop over all setters takes it half as long again, and more.
_set_label, _set_op, _set_after = _SETTERS["label"], _SETTERS["op"], _SETTERS["after"]
_set_phase, _set_microbatch, _set_stage = _SETTERS["phase"], _SETTERS["microbatch"], _SETTERS["stage"]
_set_chunk, _set_part, _set_alloc = _SETTERS["chunk"], _SETTERS["part"], _SETTERS["alloc_bytes"]
_set_free, _set_workspace = _SETTERS["free_bytes"], _SETTERS["workspace_bytes"]
_set_hooks = _SETTERS["hooks"]


def reordered(step: Step, after: tuple[str, ...], **changes: Any) -> Step:
    """Return ``step`` after other steps, and with further ``changes`` of its fields.

    It is as `dataclasses.replace`, in a third of the time: programs have hundreds of thousands of steps.
    """
    other = object.__new__(Step)
    _set_label(other, step.label)
    _set_op(other, step.op)
    _set_after(other, after)
    _set_phase(other, step.phase)
    _set_microbatch(other, step.microbatch)
    _set_stage(other, step.stage)
    _set_chunk(other, step.chunk)
    _set_part(other, step.part)
    _set_alloc(other, step.alloc_bytes)
    _set_free(other, step.free_bytes)
    _set_workspace(other, step.workspace_bytes)
    _set_hooks(other, step.hooks)
    for name, value in changes.items():
        _SETTERS[name](other, value)
    return other
