"""Lanes of one rank while they are worked on, and the conventions by which passes find each other's steps.

Labels of steps through which gradients leave the GPU begin with `REDUCTION`.
"""

from __future__ import annotations

from collections.abc import Iterable

from simulator.program import COMPUTE_LANE, Collective, Comm, LaneSteps, Step, StepPhase

#: lane -> steps of one pipeline rank
Lanes = dict[str, LaneSteps]

#: First word of the labels of steps that reduce gradients, copy them to the host, or exchange them with servers.
REDUCTION = "reduce "
#: Label of the sum over both copies of an embedding table.
EMBEDDING_GRADIENTS = "embedding grads"
#: The lane of blocking transfers between pipeline ranks.
PIPELINE_LANE = "pp"


def with_steps(lanes: Lanes, compute: Iterable[Step], added: Iterable[Step] = ()) -> Lanes:
    """Return ``lanes`` with another compute lane, and each ``added`` step on the lane of its communication."""
    more: dict[str, list[Step]] = {}
    for step in added:
        assert isinstance(step.op, Comm)
        more.setdefault(step.op.lane, []).append(step)
    whole = {**lanes, COMPUTE_LANE: LaneSteps.from_steps(compute)}
    return whole | {lane: whole.get(lane, LaneSteps()).followed_by(steps) for lane, steps in more.items()}


def off_compute(lanes: Lanes) -> list[Step]:
    """Return the steps outside the compute lane, lane by lane."""
    return [step for lane, steps in lanes.items() if lane != COMPUTE_LANE for step in steps]


def labels_off_compute(lanes: Lanes, first_words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels outside the compute lane that begin with one of some words."""
    columns = [steps.columns for lane, steps in lanes.items() if lane != COMPUTE_LANE]
    return tuple([label for one in columns for label in one.label if label.startswith(first_words)])


def drained(lanes: Lanes) -> tuple[str, ...]:
    """Return the label of the last blocking transfer of a pipeline, which holds up the host and all that follows."""
    return tuple(lanes[PIPELINE_LANE].columns.label[-1:]) if PIPELINE_LANE in lanes else ()


def gradients_ready(lanes: Lanes) -> tuple[str, ...]:
    """Return the labels of steps that have ended when all gradients are where they are needed.

    Sums on the compute lane itself are not among them: its order says so already.
    """
    return (*drained(lanes), *labels_off_compute(lanes, (REDUCTION, f"{EMBEDDING_GRADIENTS} ")))


def gradients_summed(lanes: Lanes) -> tuple[str, ...]:
    """Return the labels of sums of gradients on the compute lane."""
    compute = lanes[COMPUTE_LANE].columns
    return tuple([compute.label[at] for at in compute.places(lambda step: isinstance(step.op, Collective))])


def weights_updated(lanes: Lanes) -> tuple[str, ...]:
    """Return the labels of steps after which the optimizer on the GPU is done, where it has anything to do at all."""
    compute = lanes[COMPUTE_LANE].columns
    last = compute.label[-1]
    return (last,) if compute.like(-1).phase == StepPhase.OPTIMIZER else (last, *gradients_ready(lanes))
