"""Several steps in a row, for schedules whose claim is of the period between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from simulator.lowering.lanes import Lanes
from simulator.program import COMPUTE_LANE, Collective, HostOperation, Step


def repeated(lanes: Lanes, steps: int, microbatches: int) -> Lanes:
    """A rank's ``lanes`` of one step, ``steps`` times one after the other; ``microbatches`` are numbered through.

    What a step leaves to do beside the next one (parameters to gather) begins when its computation has ended; what it
    still does then itself, the next one's computation waits for.
    """
    row: Lanes = {lane: [] for lane in lanes}
    ends = lanes[COMPUTE_LANE][-1].label
    closing = _closing(lanes, ends)
    for number in range(steps):
        for lane, of_lane in lanes.items():
            for index, step in enumerate(_numbered(of_lane, _labels(lanes), number, microbatches)):
                before: tuple[str, ...] = ()
                if number and lane == COMPUTE_LANE and index == 0:
                    before = tuple(_label(label, number - 1) for label in closing)
                elif number and not step.after and isinstance(step.op, Collective | HostOperation):
                    before = (_label(ends, number - 1),)
                row[lane].append(replace(step, after=(*before, *step.after)) if before else step)
    return row


def rolling(lanes: Lanes, steps: int, microbatches: int, tail: Callable[[Lanes], Lanes]) -> Lanes:
    """A rank's ``lanes`` of passes through several steps that run on as one; ``tail`` adds to the passes of one step
    what follows its last backward, before the rank's next pass."""
    whole = {lane: list(of_lane) for lane, of_lane in lanes.items()}
    for number in range(steps):
        own = [step for step in lanes[COMPUTE_LANE] if step.microbatch // microbatches == number]
        done = tail({COMPUTE_LANE: own})
        added = _labels(done) - _labels(lanes)
        done = {lane: _numbered(of_lane, added, number, 0) for lane, of_lane in done.items()}
        whole[COMPUTE_LANE] = _merged(whole[COMPUTE_LANE], own, done)
        for lane, of_lane in done.items():
            if lane != COMPUTE_LANE:
                whole.setdefault(lane, []).extend(of_lane)
    return whole


def _merged(compute: list[Step], own: list[Step], done: Lanes) -> list[Step]:
    """``compute`` with the passes ``own`` as they are in ``done``: cut up, and the last followed by the step's tail."""
    pieces: dict[str, list[Step]] = {}
    waiting: list[Step] = []
    labels = {step.label for step in own}
    for step in done[COMPUTE_LANE]:
        waiting.append(step)
        if step.label in labels:
            pieces[step.label], waiting = waiting, []
    pieces[own[-1].label] += waiting
    ends = done[COMPUTE_LANE][-1].label
    closing = _closing(done, ends)
    merged: list[Step] = []
    for step in compute:
        before = closing if merged and merged[-1].label == ends else ()
        first, *rest = pieces.get(step.label, [step])
        merged += [replace(first, after=(*before, *step.after)), *rest]
    return merged


def _closing(lanes: Lanes, ends: str) -> tuple[str, ...]:
    """What other lanes do after the step ``ends``, directly or one after another."""
    beside = [step for lane, of_lane in lanes.items() if lane != COMPUTE_LANE for step in of_lane]
    found = {ends: None}
    growing = True
    while growing:
        more = [
            step.label for step in beside if step.label not in found and any(label in found for label in step.after)
        ]
        found |= dict.fromkeys(more)
        growing = bool(more)
    return tuple(found)[1:]


def _labels(lanes: Lanes) -> set[str]:
    return {step.label for of_lane in lanes.values() for step in of_lane}


def _label(label: str, number: int) -> str:
    return f"{label}@{number}" if number else label


def _numbered(steps: Iterable[Step], renamed: set[str], number: int, microbatches: int) -> list[Step]:
    """``steps`` as those of step ``number`` of a row: the labels ``renamed`` say so."""
    return [
        replace(
            step,
            label=_label(step.label, number) if step.label in renamed else step.label,
            after=tuple(_label(label, number) if label in renamed else label for label in step.after),
            microbatch=step.microbatch + number * microbatches if step.microbatch >= 0 else step.microbatch,
        )
        for step in steps
    ]
