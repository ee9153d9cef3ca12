"""Collectives of one communicator take turns.

NCCL runs its kernels one after another as they are issued, whatever streams they are on (``ncclLaunchPrepare``:
launches wait for the communicator's own stream). So gathers and reductions of FSDP, which torch calls on two streams,
never move at once. In every profiled step on H200s a gather whose copy was ready began 6 to 12 us after the end of the
reduction before it (calibration/results/runs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from simulator.lowering.lanes import Lanes
from simulator.lowering.rank_context import RankContext
from simulator.program import COMPUTE_LANE, Collective, CollectiveKind, LaneSteps, Step, reordered


def take_turns(lanes: Lanes, context: RankContext) -> Lanes:
    """Let collectives beside computation wait for the one that was issued before on the same communicator (axis).

    A host issues a collective behind the computation that it waits for, as its hooks run there. A reduction comes
    before a gather that waits for the same computation. Steps of one lane need no such wait.
    """
    if not _shares_communicator(lanes):
        return lanes
    whole = {lane: list(steps) for lane, steps in lanes.items()}
    latest: dict[str, tuple[str, str]] = {}
    for _, lane, index in sorted(_issued(whole), key=lambda issued: issued[0]):
        step = whole[lane][index]
        assert isinstance(step.op, Collective)
        before = latest.get(step.op.axis)
        if before is not None and before[0] != lane:
            whole[lane][index] = reordered(step, (*step.after, before[1]))
        latest[step.op.axis] = lane, step.label
    return {lane: LaneSteps.from_steps(steps) for lane, steps in whole.items()}


def _shares_communicator(lanes: Lanes) -> bool:
    """Return whether several lanes beside computation have collectives of one axis."""
    axes = [
        {step.op.axis for step in steps.columns.prototypes if isinstance(step.op, Collective)}
        for lane, steps in lanes.items()
        if lane != COMPUTE_LANE
    ]
    return sum(map(len, axes)) > len(set().union(*axes))


def _issued(lanes: Mapping[str, Sequence[Step]]) -> Iterator[tuple[tuple[int, bool], str, int]]:
    """Yield (when it is issued, lane, number on it) of collectives beside computation; those of a lane in its order."""
    behind = _behind(lanes)
    for lane, steps in lanes.items():
        issued = -1, False
        for index, step in enumerate(steps):
            if lane == COMPUTE_LANE or not isinstance(step.op, Collective):
                continue
            issued = max(issued, (behind[step.label], step.op.op == CollectiveKind.ALL_GATHER))
            yield issued, lane, index


def _behind(lanes: Mapping[str, Sequence[Step]]) -> dict[str, int]:
    """Return the number of the last step of the compute lane that each step waits for, be it by way of others.

    -1 where there is none.
    """
    last_of = {step.label: index for index, step in enumerate(lanes[COMPUTE_LANE])}
    changed = True
    while changed:
        changed = False
        for lane, steps in lanes.items():
            last = -1
            for step in steps if lane != COMPUTE_LANE else ():
                for label in step.after:
                    last = max(last, last_of.get(label, -1))
                if last_of.get(step.label) != last:
                    changed, last_of[step.label] = True, last
    return last_of
