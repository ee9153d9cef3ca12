"""Several steps in a row, for schedules whose claim is of the period between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from simulator.lowering.lanes import Lanes
from simulator.lowering.passes.update_on_host import weights_in_place
from simulator.program import COMPUTE_LANE, Collective, HostOperation, LaneSteps, Step, reordered


def repeated(lanes: Lanes, steps: int, microbatches: int) -> Lanes:
    """Return a rank's ``lanes`` of one step, ``steps`` times one after the other.

    Steps have ``microbatches`` each, which are numbered through.

    The first pass of a step waits for what follows the last computation of the step before, such as an update by the
    host. Agreements that no stage waits for (`update_weights`) go on beside it. Communication that waits for nothing in
    its own step reads parameters, as gathers beside first passes do. It begins once all updated ones are in place.
    """
    if steps == 1:
        return lanes
    row: dict[str, list[Step]] = {lane: [] for lane in lanes}
    ends = lanes[COMPUTE_LANE].columns.label[-1]
    closing, labels, in_place = _closing(lanes, ends), _labels(lanes), weights_in_place(lanes)
    for number in range(steps):
        for lane, work in lanes.items():
            for index, step in enumerate(_numbered(work, labels, number, microbatches)):
                before: tuple[str, ...] = ()
                if number and lane == COMPUTE_LANE and index == 0:
                    before = closing
                elif number and not step.after and isinstance(step.op, Collective | HostOperation):
                    before = in_place
                before = tuple([_label(label, number - 1) for label in before])
                row[lane].append(reordered(step, (*before, *step.after)) if before else step)
    return {lane: LaneSteps.from_steps(work) for lane, work in row.items()}


def rolling(lanes: Lanes, steps: int, microbatches: int, rest_of_step: Callable[[Lanes], Lanes]) -> Lanes:
    """Return a rank's ``lanes`` of passes through several steps that run on as one.

    ``rest_of_step`` adds to the passes of one step the work after its last backward pass, before the rank's next pass.
    """
    whole = {lane: list(work) for lane, work in lanes.items()}
    for number in range(steps):
        passes = [step for step in lanes[COMPUTE_LANE] if step.microbatch // microbatches == number]
        done = rest_of_step({COMPUTE_LANE: LaneSteps.from_steps(passes)})
        added = _labels(done) - _labels(lanes)
        done = {lane: LaneSteps.from_steps(_numbered(work, added, number, 0)) for lane, work in done.items()}
        whole[COMPUTE_LANE] = _merged(whole[COMPUTE_LANE], passes, done)
        for lane, work in done.items():
            if lane != COMPUTE_LANE:
                whole.setdefault(lane, []).extend(work)
    return {lane: LaneSteps.from_steps(work) for lane, work in whole.items()}


def _merged(compute: list[Step], passes: list[Step], done: Lanes) -> list[Step]:
    """Return ``compute`` with some ``passes`` as they are in ``done``: cut up, the last followed by the step's rest."""
    pieces: dict[str, list[Step]] = {}
    waiting: list[Step] = []
    labels = {step.label for step in passes}
    for step in done[COMPUTE_LANE]:
        waiting.append(step)
        if step.label in labels:
            pieces[step.label], waiting = waiting, []
    pieces[passes[-1].label] += waiting
    ends = done[COMPUTE_LANE][-1].label
    closing = _closing(done, ends)
    merged: list[Step] = []
    for step in compute:
        before = closing if merged and merged[-1].label == ends else ()
        first, *rest = pieces.get(step.label, [step])
        merged += [reordered(first, (*before, *step.after)), *rest]
    return merged


def _closing(lanes: Lanes, ends: str) -> tuple[str, ...]:
    """Return the labels of the steps of other lanes that wait for the step ``ends``, directly or through each other."""
    beside = [step for lane, work in lanes.items() if lane != COMPUTE_LANE for step in work]
    following = {ends: None}
    growing = True
    while growing:
        later = (step for step in beside if step.label not in following)
        more = [step.label for step in later if any(label in following for label in step.after)]
        following |= dict.fromkeys(more)
        growing = bool(more)
    return tuple(following)[1:]


def _labels(lanes: Lanes) -> set[str]:
    return {step.label for work in lanes.values() for step in work}


def _label(label: str, number: int) -> str:
    """Return the label in training step ``number`` of a row; the first step's have no number."""
    return f"{label}@{number}" if number else label


def _numbered(steps: Iterable[Step], renamed: set[str], number: int, microbatches: int) -> list[Step]:
    """Return ``steps`` as those of training step ``number`` of a row, with that number in the labels ``renamed``."""
    if number == 0:
        return list(steps)
    return [
        reordered(
            step,
            tuple([_label(label, number) if label in renamed else label for label in step.after]),
            label=_label(step.label, number) if step.label in renamed else step.label,
            microbatch=step.microbatch + number * microbatches if step.microbatch >= 0 else step.microbatch,
        )
        for step in steps
    ]
