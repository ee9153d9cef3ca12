"""Least memory of a layout: what some GPU of it holds, whatever its passes take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from simulator.analysis.training.static_memory import StaticMemory, WeightMemory, static_memory_of
from simulator.config import Workload
from simulator.models import Part
from simulator.searching.in_flight import FullestMoment, fullest_moments
from simulator.searching.stage_parts import StageParts


def memory_floor(
    stages: StageParts,
    weight_memories: Sequence[WeightMemory],
    optimizer_bytes: Sequence[float],
    workspaces: float,
    capacity_bytes: float = math.inf,
) -> float:
    """Return bytes that some GPU needs at least.

    GPUs are looked at until one needs more than ``capacity_bytes``. ``weight_memories`` and ``optimizer_bytes`` (the
    optimizer's workspace) are of each pipeline rank; ``workspaces``: bytes of cuBLAS's workspaces on a GPU.

    A rank has its static memory always, which is exact but for communicators that few layouts have.

    At the moment of `fullest_moments` it also has the activations of all its chunks, and the workspace of the pass that
    begins. Between two passes the sum of activations is exact. In its optimizer a rank has the optimizer's workspace,
    and gradients that exist within a step alone. The larger of the two sums counts. The allocator's cache comes on top.
    """
    workload = stages.workload
    layout = workload.parallelism
    moments = fullest_moments(layout.schedule, layout.pp, workload.microbatches, layout.vpp)
    n_groups = least_communicators(workload)
    #: Torch's first stage runs other passes than the schedule says where the backward is split.
    as_scheduled = not (workload.stage_runtime.first_backward_whole and layout.pipeline_schedule.splits)
    statics: dict[object, StaticMemory] = {}
    floor = 0.0
    for rank, moment in enumerate(moments):
        memory = weight_memories[rank]
        key = stages.rank_key(rank), id(memory)
        if key not in statics:
            parts = {stage: stages.parts(stage) for stage in stages.stages_of[rank]}
            statics[key] = static_memory_of(workload, rank, parts, memory, n_groups, workspaces)
        static = statics[key]
        with_workspace = as_scheduled and not static.layers_offloaded and not static.passes_by_part
        parts_here = dict(zip(stages.stages_of[rank], static.parts.values(), strict=True))
        within = _held_bytes(moment, stages, parts_here, workspace=with_workspace)
        floor = max(
            floor,
            static.allocated + static.overhead + max(within, static.step_gradients + optimizer_bytes[rank]),
        )
        if floor > capacity_bytes:
            break
    return floor


def _held_bytes(
    moment: FullestMoment, stages: StageParts, parts: Mapping[int, Sequence[Part]], *, workspace: bool
) -> float:
    """Return the activations of a moment, with the ``workspace`` of the pass that follows where that is sure."""
    nbytes = sum(count * stages.activations(stage, parts[stage]).saved for stage, count in moment.waiting)
    nbytes += sum(count * stages.activations(stage, parts[stage]).split for stage, count in moment.split)
    if workspace and moment.following is not None:
        moved = stages.moved(*moment.following)
        nbytes += moved.alloc + moved.workspace
    return nbytes


def least_communicators(workload: Workload) -> int:
    """Return the communicators that every rank has: one per group of several ranks.

    Groups are those of Megatron-LM (``parallel_state.initialize_model_parallel``), as `simulator.lowering.layout` has
    them: tp, cp, pp, ranks with the same parameters, and all tp and pp ranks of a replica. Experts have ep, etp, ranks
    with the same experts, and all pp, ep and etp ranks of a replica. PyTorch's default group has all ranks of the job.
    """
    layout = workload.parallelism
    sizes = [layout.tp, layout.cp, layout.pp, layout.replicas("dp"), layout.pp * layout.tp, workload.n_ranks]
    if workload.model.moe is not None:
        expert = layout.ep * layout.etp
        sizes += [layout.ep, layout.etp, layout.replicas("edp"), layout.pp * expert]
    return sum(size > 1 for size in sizes)
