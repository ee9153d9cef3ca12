"""In which order a host issues what its rank does: it goes through the compute lane, and what runs on lanes of its own
is issued in between. And what follows from that for communicators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from simulator.program.ops import COLLECTIVES, COMPUTE_LANE, Comm, Step

Lanes = Mapping[str, Sequence[Step]]


def issue_order(lanes: Lanes) -> tuple[tuple[Step, ...], ...]:
    """Per step of the compute lane, the communication that the host issues right before it, and one entry more for
    what follows the last.

    Communication that waits for computation, or for other communication that does, is issued behind it, as by a hook
    that runs when a gradient is there or a layer begins. What waits for none is issued before the first computation
    that waits for it; what nobody waits for, first. Batches of blocking transfers are not counted.
    """
    compute = lanes.get(COMPUTE_LANE, ())
    needed: dict[str, int] = {}
    for index, step in enumerate(compute):
        for label in step.after:
            needed.setdefault(label, index)
    behind = follows(lanes)
    order: list[list[Step]] = [[] for _ in range(len(compute) + 1)]
    for lane, steps in lanes.items():
        for step in steps:
            if lane != COMPUTE_LANE and isinstance(step.op, Comm):
                last = behind[step.label]
                order[needed.get(step.label, 0) if last is None else last + 1].append(step)
    return tuple(map(tuple, order))


def follows(lanes: Lanes) -> dict[str, int | None]:
    """Label -> the last step of the compute lane that it waits for, itself or through other communication; of that
    lane's steps their own place."""
    found: dict[str, int | None] = {step.label: index for index, step in enumerate(lanes.get(COMPUTE_LANE, ()))}
    waits = {step.label: step.after for lane, steps in lanes.items() if lane != COMPUTE_LANE for step in steps}
    for label in waits:
        rising = [label]
        while rising:
            open_ = [other for other in waits.get(rising[-1], ()) if other in waits and other not in found]
            if open_ and open_[0] not in rising:
                rising.append(open_[0])
                continue
            done = rising.pop()
            places = (found.get(other) for other in waits[done])
            found.setdefault(done, max((place for place in places if place is not None), default=None))
    return found


def on_one_communicator(lanes: Lanes) -> dict[str, tuple[Step, ...]]:
    """``lanes`` in which a collective waits for the one that the host has issued before it on the same axis.

    NCCL runs what one communicator is called for one after another, whatever streams it is called on (NCCL user guide,
    "Using multiple streams with the same communicator"): FSDP's gathers and reductions, of one process group, were
    never on the GPU at once in any real run (calibration/results/runs).
    """
    slot = {step.label: place for place, steps in enumerate(issue_order(lanes)) for step in steps}
    issued: list[tuple[int, str, Step]] = []
    for lane, steps in lanes.items():
        reached = 0  # a lane is issued in its own order
        for step in steps:
            if lane != COMPUTE_LANE and isinstance(step.op, Comm) and step.op.op in COLLECTIVES:
                reached = max(reached, slot[step.label])
                issued.append((reached, lane, step))
    latest: dict[str, tuple[str, str]] = {}
    behind: dict[str, str] = {}
    for _, lane, step in sorted(issued, key=lambda one: one[0]):
        axis = cast(Comm, step.op).axis
        if axis in latest and latest[axis][0] != lane:
            behind[step.label] = latest[axis][1]
        latest[axis] = lane, step.label
    return {
        lane: tuple(
            replace(step, after=tuple(dict.fromkeys((*step.after, behind[step.label]))))
            if step.label in behind
            else step
            for step in steps
        )
        for lane, steps in lanes.items()
    }
