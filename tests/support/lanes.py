"""Lanes of one rank as text, and facts of the rank, to try passes on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from simulator.lowering.lanes import Lanes
from simulator.lowering.passes.hide_all_to_alls import pairs_in
from simulator.lowering.pipeline import lower
from simulator.lowering.rank_context import RankContext
from simulator.lowering.stage_variants import first_and_last
from simulator.lowering.stages import Stages
from simulator.models import Seat, passed_bytes
from simulator.program import COMPUTE_LANE, LaneSteps, Program, Role, Step, from_text, to_text
from tests.support.sharded import load

_HEAD = """
program name=text
block 0 name=work
  compute work F fixed seconds=1
role rank ranks=0
"""
_GROUPS = """
role others ranks=1-3
  lane compute
group dp 0,1,2,3
group dp_shard 0,1
group dp_shard 2,3
group dp_replica 0,2
group dp_replica 1,3
group edp 0,1,2,3
group embd 0,1
group pp 0,1,2,3
group rank 0
"""
#: Bytes that steps take and give back, and places of passes: most tests look at something else.
_MEMORY = re.compile(r" (alloc_bytes|free_bytes|workspace_bytes)=\S+")
_PLACE = re.compile(r" (block|phase|microbatch|stage|chunk|part)=\S+")


def rank(pipeline_rank: int = 0, seat: Seat | None = None, **sections: Any) -> RankContext:
    """Return a rank of a small job; ``sections`` as for `tests.support.sharded.load`."""
    workload = load(**sections)
    parallelism = workload.parallelism
    order = parallelism.pipeline_schedule.order(parallelism.pp, workload.microbatches, parallelism.vpp)
    stages = Stages(workload, seat or Seat(), first_and_last(order, workload.microbatches))
    return RankContext(workload, stages, pipeline_rank, pairs_in(order[pipeline_rank]))


def pipeline_passes(context: RankContext) -> Lanes:
    """Return the lanes of a rank with nothing but the passes of its pipeline and their transfers."""
    workload, parallelism = context.workload, context.parallelism
    schedule = parallelism.pipeline_schedule
    order = schedule.order(parallelism.pp, workload.microbatches, parallelism.vpp)
    nbytes = passed_bytes(workload)
    n_stages, overlap = parallelism.n_stages, parallelism.overlap.p2p
    stages = context.stages
    lanes = lower(order, schedule, n_stages, nbytes, stages.step, stages.variants.turns, overlap=overlap)
    return lanes[context.pipeline_rank]


def read(text: str) -> Lanes:
    """Return the lanes that ``text`` describes, as the text form of a program does; its block 0 is some work."""
    role = from_text(f"{_HEAD}{text}{_GROUPS}").roles[0]
    return lanes_of(role.lanes)


def lanes_of(lanes: Mapping[str, Iterable[Step]]) -> Lanes:
    """Return steps by the name of their lane as lanes of a rank."""
    return {lane: LaneSteps.from_steps(steps) for lane, steps in lanes.items()}


def write(lanes: Lanes, *, places: bool = False, memory: bool = False) -> str:
    """Return the text of ``lanes``; blocks, phases and micro-batches with ``places``, bytes held with ``memory``."""
    role = Role("rank", lanes)
    text = to_text(Program((role,), (0,), {}))
    lines = text[text.index("  lane ") :].splitlines()
    if not memory:
        lines = [_MEMORY.sub("", line) for line in lines]
    if not places:
        lines = [_PLACE.sub("", line) for line in lines]
    return "\n".join(line[2:] for line in lines)


def waits(lanes: Lanes, lane: str = COMPUTE_LANE) -> dict[str, tuple[str, ...]]:
    """Return, by label, what each step of a lane waits for."""
    return {step.label: step.after for step in lanes.get(lane, ())}


def step_called(lanes: Lanes, label: str) -> Step:
    """Return the step with a label."""
    return next(step for steps in lanes.values() for step in steps if step.label == label)
