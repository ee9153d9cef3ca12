"""Lanes of one rank while they are worked on, and the conventions by which passes find each other's steps.

Labels of steps through which gradients leave the GPU begin with `REDUCTION`.
"""

from __future__ import annotations

from collections.abc import Iterable

from simulator.program import COMPUTE_LANE, Collective, Comm, Step, StepPhase

#: lane -> steps of one pipeline rank
Lanes = dict[str, list[Step]]

#: First word of the labels of steps that reduce gradients, copy them to the host, or exchange them with servers.
REDUCTION = "reduce "
#: Label of the sum over both copies of an embedding table.
EMBEDDING_GRADIENTS = "embedding grads"
#: The lane of blocking transfers between pipeline ranks.
PIPELINE_LANE = "pp"


def with_steps(lanes: Lanes, compute: Iterable[Step], added: Iterable[Step] = ()) -> Lanes:
    """Return ``lanes`` with another compute lane, and each ``added`` step on the lane of its communication."""
    whole = {lane: list(steps) for lane, steps in lanes.items()} | {COMPUTE_LANE: list(compute)}
    for step in added:
        assert isinstance(step.op, Comm)
        whole.setdefault(step.op.lane, []).append(step)
    return whole


def off_compute(lanes: Lanes) -> list[Step]:
    """Return the steps outside the compute lane, lane by lane."""
    return [step for lane, steps in lanes.items() if lane != COMPUTE_LANE for step in steps]


def drained(lanes: Lanes) -> tuple[str, ...]:
    """Return the label of the last blocking transfer of a pipeline, which holds up the host and all that follows."""
    return tuple(step.label for step in lanes.get(PIPELINE_LANE, ())[-1:])


def gradients_ready(lanes: Lanes) -> tuple[str, ...]:
    """Return the labels of steps that have ended when all gradients are where they are needed.

    Sums on the compute lane itself are not among them: its order says so already.
    """
    first_words = (REDUCTION, f"{EMBEDDING_GRADIENTS} ")
    return (*drained(lanes), *(step.label for step in off_compute(lanes) if step.label.startswith(first_words)))


def gradients_summed(lanes: Lanes) -> tuple[str, ...]:
    """Return the labels of sums of gradients on the compute lane."""
    return tuple(step.label for step in lanes[COMPUTE_LANE] if isinstance(step.op, Collective))


def weights_updated(lanes: Lanes) -> tuple[str, ...]:
    """Return the labels of steps after which the optimizer on the GPU is done, where it has anything to do at all."""
    last = lanes[COMPUTE_LANE][-1]
    return (last.label,) if last.phase == StepPhase.OPTIMIZER else (last.label, *gradients_ready(lanes))
