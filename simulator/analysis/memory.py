"""Memory of a step: what each rank holds, when most, and whether it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.analysis.metrics import peak_activations
from simulator.analysis.ranks import pipeline_ranks
from simulator.model import StateBytes
from simulator.timeline import Floats, Timeline
from simulator.units import MB, MiB

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


def communicators(groups: Mapping[str, Iterable[Iterable[int]]]) -> Counter[int]:
    """Per rank the groups that it shares with others, ``groups`` being those of each axis: NCCL has a communicator
    each."""
    return Counter(
        rank for of_axis in groups.values() for members in map(tuple, of_axis) if len(members) > 1 for rank in members
    )


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
