"""Memory of a step: what each rank holds, when most, whether it fits, and what would make it fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.analysis.metrics import peak_activations
from simulator.analysis.ranks import pipeline_ranks
from simulator.model import StateBytes
from simulator.timeline import Floats, Timeline
from simulator.units import DTYPE_BYTES, MB, MiB, format_gib

if TYPE_CHECKING:
    from simulator.config import Workload

#: CUDA context with the kernels that PyTorch loads. Since CUDA 11.7 modules load lazily and an idle context takes about
#: 300 MB; a training step's kernels bring it to about half a gigabyte (github.com/pytorch/pytorch, issue 107667).
CUDA_CONTEXT_BYTES = 500 * MB
#: What NCCL keeps per communicator: 544 MB with 2 and 688 MB with 4 A100s behind NVSwitch after an all-reduce, context
#: included (github.com/NVIDIA/nccl, issue 964), less about 300 MB for that context. Channels and their buffers are
#: independent of the number of ranks beyond a few (same repository, issue 986).
NCCL_COMMUNICATOR_BYTES = 320 * MiB


@dataclass(frozen=True)
class RankMemory:
    """One rank at its fullest, bytes. ``activations`` includes ``workspace``, what the op running then needs for
    itself; ``overhead`` lies outside PyTorch's allocator (CUDA context, NCCL). ``in_flight``: (micro-batch, stage)
    activations held at most."""

    rank: int
    stage: int
    state: StateBytes
    activations: float
    workspace: float
    overhead: float
    peak_at_s: float
    in_flight: int

    @property
    def allocated(self) -> float:
        """What ``torch.cuda.max_memory_allocated`` would say."""
        return self.state.total + self.activations

    @property
    def total(self) -> float:
        """All that is taken on the device."""
        return self.allocated + self.overhead


def overhead_bytes(communicators: int) -> float:
    """Device memory outside the allocator of a process with so many NCCL communicators."""
    return CUDA_CONTEXT_BYTES + communicators * NCCL_COMMUNICATOR_BYTES


def memory_curve(timeline: Timeline, rank: int) -> tuple[Floats, Floats, Floats]:
    """Memory that a rank's ops hold over the step: times (s), held bytes and workspace bytes from each time on.

    A span holds ``alloc_bytes`` from its start, gives ``free_bytes`` back at its end, and needs ``workspace_bytes``
    in between; what ends at a moment is given back before what starts at it is taken.
    """
    spans = np.flatnonzero(timeline.rank == rank)
    times = np.concatenate((timeline.end_s[spans], timeline.start_s[spans]))
    held = np.concatenate((-timeline.free_bytes[spans], timeline.alloc_bytes[spans]))
    workspace = np.concatenate((-timeline.workspace_bytes[spans], timeline.workspace_bytes[spans]))
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(held[order]), np.cumsum(workspace[order])


def memory_of_ranks(
    timeline: Timeline, states: Mapping[int, StateBytes], overhead: Mapping[int, float]
) -> tuple[RankMemory, ...]:
    """Every simulated rank at its fullest. ``states`` and ``overhead``: by simulated rank, bytes."""
    memories = []
    in_flight, places = peak_activations(timeline), pipeline_ranks(timeline)
    for rank in timeline.ranks:
        times, held, workspace = memory_curve(timeline, rank)
        at = int(np.argmax(held + workspace)) if len(times) else -1
        peak, need, when = (held[at], workspace[at], times[at]) if at >= 0 else (0.0, 0.0, 0.0)
        if peak + need <= 0:
            peak = need = when = 0.0
        memories.append(
            RankMemory(
                rank=rank,
                stage=places[rank],
                state=states[rank],
                activations=float(peak + need),
                workspace=float(need),
                overhead=float(overhead[rank]),
                peak_at_s=float(when),
                in_flight=in_flight[rank],
            )
        )
    return tuple(memories)


def worst_per_stage(memories: Sequence[RankMemory]) -> tuple[RankMemory, ...]:
    """The fullest rank of each pipeline rank, in order."""
    worst: dict[int, RankMemory] = {}
    for memory in memories:
        if memory.stage not in worst or memory.total > worst[memory.stage].total:
            worst[memory.stage] = memory
    return tuple(worst[stage] for stage in sorted(worst))


@dataclass(frozen=True)
class Change:
    """A setting that would lower the fullest rank's memory, and by about how many bytes."""

    setting: str
    saves_bytes: float


def changes(worst: RankMemory, workload: Workload) -> list[Change]:
    """What could be set otherwise to need less memory, cheapest for speed first.

    Estimates scale the rank's own figures: ZeRO-1 shares the optimizer over the replicas (arXiv 1910.02054);
    selective recompute drops the 5 a s / h of attention from 34 + 5 a s / h, full recompute keeps each layer's input
    and one layer at a time (arXiv 2205.05198, equations 2 and 6, table 2); 1F1B holds pp - stage micro-batches
    where GPipe holds them all; tp halves everything; pp halves the layers of a stage but holds twice the micro-batches.
    """
    model, training, parallelism = workload.model, workload.training, workload.parallelism
    found: list[Change] = []
    state, held = worst.state, worst.activations - worst.workspace
    if parallelism.zero == 0 and parallelism.dp > 1:
        found.append(Change("parallelism.zero: 1", state.optimizer * (1 - 1 / parallelism.dp)))
    if parallelism.schedule in ("gpipe", "naive") and worst.in_flight > parallelism.pp - worst.stage:
        kept = (parallelism.pp - worst.stage) / worst.in_flight
        found.append(Change("parallelism.schedule: 1f1b", held * (1 - kept)))
    if training.recompute.granularity == "none" and model.attention == "unfused":
        scores = 5 * model.heads * training.seq / model.hidden
        found.append(Change("training.recompute: selective", held * scores / (34 + scores)))
    # A split backward holds what it has recomputed until the weight gradient, so that less is saved than this.
    if training.recompute.granularity != "full" and worst.in_flight and not parallelism.plan.splits:
        stages = parallelism.stages_of(worst.stage)
        layers = sum(parallelism.layers_per_stage[stage] for stage in stages)
        shared = parallelism.tp if parallelism.sequence_parallel else 1
        inputs = training.seq * training.micro_batch * model.hidden * DTYPE_BYTES["bf16"] / shared
        one_layer = held / (worst.in_flight * max(layers, 1)) * parallelism.vpp
        found.append(
            Change("training.recompute: full", held - worst.in_flight * layers / parallelism.vpp * inputs - one_layer)
        )
    if training.micro_batch > 1:
        fewer = max(size for size in range(1, training.micro_batch) if training.micro_batch % size == 0)
        found.append(Change(f"training.micro_batch: {fewer}", worst.activations * (1 - fewer / training.micro_batch)))
    wider = 2 * parallelism.tp
    if model.heads % wider == 0 and (model.kv_heads % wider == 0 or wider % model.kv_heads == 0):
        found.append(Change(f"parallelism.tp: {wider}", (state.total + worst.activations) / 2))
    if model.layers % (2 * parallelism.pp * parallelism.vpp) == 0:
        found.append(Change(f"parallelism.pp: {2 * parallelism.pp}", state.total / 2))
    return [change for change in found if change.saves_bytes > 0]


def advice(memories: Sequence[RankMemory], capacity_bytes: float, workload: Workload) -> list[str]:
    """Plain words on what would make the fullest rank fit: which stage lacks how much, and what each change in
    `changes` gives; where none suffices alone, the first of them that do together. Empty where everything fits."""
    worst = max(memories, key=lambda memory: memory.total)
    excess = worst.total - capacity_bytes
    if excess <= 0:
        return []
    lines = [
        f"stage {worst.stage} needs {format_gib(worst.total)}, {format_gib(excess)} more than the "
        f"{format_gib(capacity_bytes)} of its GPU"
    ]
    possible = changes(worst, workload)
    for change in possible:
        verdict = "enough" if change.saves_bytes >= excess else "not enough alone"
        lines.append(f"{change.setting} would free about {format_gib(change.saves_bytes)}: {verdict}")
    if not any(change.saves_bytes >= excess for change in possible):
        together = _together(possible, excess)
        lines.append(f"together: {', '.join(together)}" if together else "all of these together are not enough")
    return lines


def _together(possible: Sequence[Change], excess: float) -> list[str]:
    """The fewest first changes whose savings add up to the excess; empty where all do not."""
    chosen: list[str] = []
    for change in possible:
        chosen.append(change.setting)
        excess -= change.saves_bytes
        if excess <= 0:
            return chosen
    return []


def memory_report(memories: Sequence[RankMemory], capacity_bytes: float) -> dict[str, Any]:
    """The contract's ``memory``: bytes, and the fullest rank of each stage."""
    return {
        "capacity_bytes": float(capacity_bytes),
        "fits": all(memory.total <= capacity_bytes for memory in memories),
        "peak_bytes": max(memory.total for memory in memories),
        "peak_allocated_bytes": max(memory.allocated for memory in memories),
        "per_stage": [
            {
                "stage": memory.stage,
                "weights": memory.state.weights,
                "gradients": memory.state.gradients,
                "optimizer": memory.state.optimizer,
                "activations": memory.activations,
                "buffers": memory.overhead,
                "peak": memory.total,
                "peak_at_s": memory.peak_at_s,
                "in_flight": memory.in_flight,
                "workspace": memory.workspace,
            }
            for memory in worst_per_stage(memories)
        ],
    }
