"""Memory of a step: the contents of each rank at its peak, and whether they fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np

from simulator.analysis.time.memory_curve import MemoryHistory, digest_without_times, memory_curves
from simulator.analysis.time.pipeline_ranks import pipeline_ranks
from simulator.analysis.training.activation_lifetimes import ActivationEvents, events_of_ranks
from simulator.analysis.training.in_flight import peak_activations
from simulator.analysis.training.memory_contents import REDUCING, activation_changes, most_gradient_bytes
from simulator.analysis.training.reserved_memory import ReplayedRank, cached_bytes
from simulator.analysis.training.static_memory import CUDA_CONTEXT_BYTES, NCCL_COMMUNICATOR_BYTES, StaticMemory
from simulator.bounds import EngineChoice
from simulator.engine.engines import engine_in_use
from simulator.timeline import Timeline
from simulator.units import format_gib

#: Share of a GPU's memory; where less is left, a job barely fits. Simulated peaks are off by more (suite `memory`).
NARROW = 0.03


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank at its peak, bytes.

    ``activations_by_kind``: kind of tensor -> activations held. ``step_gradients``: gradients that the step has made,
    those included that wait whole for the last micro-batch.
    ``gathered``: other bytes that steps have taken, such as parameters of other ranks. ``workspace``: workspace of the
    running pass, or of the optimizer where it is ``updating``. ``capacity``: memory of the GPU. ``cached``: most bytes
    reserved by the allocator less the most it has allocated. ``in_flight``: most (micro-batch, stage) activations held
    at once. ``peak_at_s``, ``during``: time of the peak, and the op that starts then.
    """

    rank: int
    stage: int
    static: StaticMemory
    activations_by_kind: Mapping[str, float]
    step_gradients: float
    gathered: float
    workspace: float
    capacity: float
    cached: float
    peak_at_s: float
    during: str
    in_flight: int
    updating: bool = False

    @property
    def activations(self) -> float:
        """Activations, held from forward to backward."""
        return sum(self.activations_by_kind.values())

    @property
    def allocated(self) -> float:
        """Bytes that ``torch.cuda.max_memory_allocated`` returns."""
        return self.static.allocated + self.activations + self.step_gradients + self.gathered + self.workspace

    @property
    def gradients(self) -> float:
        """Gradients that exist at the peak."""
        return self.static.gradients + self.step_gradients

    @property
    def reserved(self) -> float:
        """Bytes that ``torch.cuda.max_memory_reserved`` returns."""
        return self.allocated + self.cached

    @property
    def total(self) -> float:
        """Used memory of the device, as ``nvidia-smi`` shows it."""
        return self.reserved + self.static.overhead

    @property
    def second_step(self) -> float:
        """Most memory of the device that the second step may use, without cached blocks.

        PyTorch's DDP rebuilds its buckets in this step and may hold those of the first step meanwhile.
        """
        return self.allocated + self.static.first_step_bucket + self.static.overhead

    @property
    def buffers(self) -> float:
        """Used memory without the model's state, activations and workspace."""
        state = self.static.state
        return self.total - state.weights - self.gradients - state.optimizer - self.activations - self.workspace

    @property
    def contents(self) -> dict[str, float]:
        """Contents of `total` by name, largest first."""
        state = self.static.state
        parts = {
            "weights": state.weights,
            "gradients": self.gradients,
            "optimizer": state.optimizer,
            **{f"activations: {kind}": nbytes for kind, nbytes in self.activations_by_kind.items()},
            "optimizer workspace" if self.updating else "workspace": self.workspace,
            "gathered": self.gathered,
            "gradient placeholders": self.static.placeholders,
            "gradient bucket": self.static.bucket,
            "receive buffers": self.static.receives,
            "BLAS workspaces": self.static.workspaces,
            "allocator cache": self.cached,
            "CUDA context": CUDA_CONTEXT_BYTES,
            "NCCL": self.static.communicators * NCCL_COMMUNICATOR_BYTES,
        }
        return {name: parts[name] for name in sorted(parts, key=lambda name: -parts[name]) if parts[name] > 0}


def memory_of_ranks(
    timeline: Timeline,
    static: Mapping[int, StaticMemory],
    capacities: Mapping[int, float] = MappingProxyType({}),
    engine: EngineChoice = "auto",
) -> tuple[RankMemory, ...]:
    """Return the memory of every simulated rank at its peak.

    ``static``: simulated rank -> its static memory. ``capacities``: simulated rank -> bytes of its GPU [infinite]; near
    them the allocator releases cached blocks. ``engine``: what plays the allocator; raises as `engine_in_use`.
    """
    in_flight, places = peak_activations(timeline), pipeline_ranks(timeline)
    curves = memory_curves(timeline)
    first = _first_alike(
        timeline,
        curves,
        {rank: (id(static[rank]), places[rank], capacities.get(rank), in_flight[rank]) for rank in curves},
    )
    ranks = list(dict.fromkeys(first.values()))
    own_curves, own_static = [curves[rank] for rank in ranks], [static[rank] for rank in ranks]
    events = events_of_ranks(timeline, own_curves, own_static)
    replayed = [
        ReplayedRank(
            curves[rank],
            events_of_rank,
            static[rank],
            in_flight[rank],
            capacities.get(rank, math.inf) - static[rank].overhead,
        )
        for rank, events_of_rank in zip(ranks, events, strict=True)
    ]
    cached = cached_bytes(timeline, replayed, compiled=engine_in_use(engine) == "compiled")
    peaks = {rank: _peak(curves[rank]) for rank in ranks}
    activations = _activations_at(timeline, own_curves, events, own_static, [*peaks.values()])
    memories = {
        rank: _rank_memory(
            timeline,
            curves[rank],
            peaks[rank],
            static[rank],
            own_activations,
            rank=rank,
            stage=places[rank],
            capacity=capacities.get(rank, math.inf),
            in_flight=in_flight[rank],
            cached=cached_of_rank,
        )
        for rank, own_activations, cached_of_rank in zip(ranks, activations, cached, strict=True)
    }
    return tuple(
        replace(memories[like], rank=rank, peak_at_s=_time_s(curves[rank], peaks[like])) for rank, like in first.items()
    )


def _first_alike(
    timeline: Timeline, curves: Mapping[int, MemoryHistory], facts: Mapping[int, Hashable]
) -> dict[int, int]:
    """Return for each rank the first one with the same ``facts`` and the same curve but for its times."""
    count, first = Counter(facts.values()), dict[Hashable, int]()
    return {
        rank: first.setdefault((fact, digest_without_times(timeline, curves[rank]) if count[fact] > 1 else b""), rank)
        for rank, fact in facts.items()
    }


def _time_s(curve: MemoryHistory, at: int) -> float:
    """Return the time of an entry of a curve; 0 of none, which is -1."""
    return float(curve.times[at]) if at >= 0 else 0.0


def _peak(curve: MemoryHistory) -> int:
    """Return the index of a curve's first entry with the most bytes; -1 where none holds any."""
    total = curve.held_bytes + curve.workspace_bytes
    return int(np.argmax(total >= (1 - _ROUNDING) * total.max())) if len(total) and total.max() > 0 else -1


def _rank_memory(
    timeline: Timeline,
    curve: MemoryHistory,
    at: int,
    static: StaticMemory,
    activations: dict[str, float],
    *,
    rank: int,
    stage: int,
    capacity: float,
    in_flight: int,
    cached: float,
) -> RankMemory:
    held_bytes = float(curve.held_bytes[at]) if at >= 0 else 0.0
    gathered = max(held_bytes - sum(activations.values()), 0.0)
    step_gradients = min(gathered, float(most_gradient_bytes(timeline, curve, static)[at])) if gathered else 0.0
    gathered -= step_gradients
    if static.layers_offloaded:
        activations, gathered = {**activations, "layers": gathered}, 0.0
    if not static.parts:
        activations, gathered = ({"all": held_bytes} if held_bytes else {}), 0.0
    return RankMemory(
        rank=rank,
        stage=stage,
        static=static,
        activations_by_kind=activations,
        step_gradients=step_gradients,
        gathered=gathered if gathered > 1e-9 * held_bytes else 0.0,
        workspace=float(curve.workspace_bytes[at]) if at >= 0 else 0.0,
        capacity=capacity,
        cached=cached,
        peak_at_s=_time_s(curve, at),
        during=_op_in_words(timeline, curve, at),
        in_flight=in_flight,
        updating=_is_updating(timeline, curve, at),
    )


#: Sums of one rank's bytes that differ by less than this share are equal; of equal ones the first is the peak.
_ROUNDING = 1e-12


def _activations_at(
    timeline: Timeline,
    curves: Sequence[MemoryHistory],
    events: Sequence[ActivationEvents],
    static: Sequence[StaticMemory],
    peaks: Sequence[int],
) -> list[dict[str, float]]:
    """Return the bytes of activations after the entries ``peaks`` of curves, by kind of tensor."""
    changes = activation_changes(timeline, curves, events, static)
    begins = accumulate((len(curve.span) for curve in curves[:-1]), initial=0)
    return [changes.held_after(begin, begin + peak) for begin, peak in zip(begins, peaks, strict=True)]


_TRANSFERS = {
    **dict.fromkeys(("dp_gather", "h2d_params", "nvme_read_params"), "the gathering of parameters"),
    **dict.fromkeys(REDUCING, "the reduction of gradients"),
}
_PASSES = {"F": "the forward pass", "B": "the backward pass", "I": "the input gradient", "W": "the weight gradient"}


def _op_in_words(timeline: Timeline, curve: MemoryHistory, at: int) -> str:
    """Describe the span of entry ``at`` of a curve."""
    if at < 0:
        return ""
    span = int(curve.span[at])
    phase = str(timeline.phase[span])
    if phase in _PASSES:
        return f"{_PASSES[phase]} of micro-batch {timeline.microbatch[span]}, stage {timeline.stage[span]}"
    if phase == "O":
        return "the optimizer"
    return _TRANSFERS.get(timeline.lane_names[timeline.lane[span]], "a transfer beside the passes")


def _is_updating(timeline: Timeline, curve: MemoryHistory, at: int) -> bool:
    """Tell whether an optimizer's step is under way after entry ``at`` of a curve."""
    updates = timeline.phase[curve.span[: at + 1]] == "O"
    return bool((2 * curve.begins[: at + 1] - 1)[updates].sum() > 0)


def worst_per_stage(memories: Sequence[RankMemory]) -> tuple[RankMemory, ...]:
    """Return the fullest rank of each pipeline rank, in order."""
    worst: dict[int, RankMemory] = {}
    for memory in memories:
        worst[memory.stage] = fullest([worst.get(memory.stage, memory), memory])
    return tuple(worst[stage] for stage in sorted(worst))


def fullest(memories: Sequence[RankMemory]) -> RankMemory:
    """Return the rank with the least free memory; of equal ones, the one that holds most."""
    return max(memories, key=lambda memory: (memory.total - memory.capacity, memory.total))


def _second_steps(memories: Iterable[RankMemory]) -> list[float]:
    """Return the bytes of second steps, for ranks whose second step takes more than others."""
    return [memory.second_step for memory in memories if memory.static.first_step_bucket]


def second_step_warning(memories: Sequence[RankMemory]) -> list[str]:
    """Return a warning where all steps fit but the second one."""
    over = [memory for memory in memories if memory.second_step > memory.capacity >= memory.total]
    if not over:
        return []
    worst = max(over, key=lambda memory: memory.second_step - memory.capacity)
    return [
        f"the second step may not fit: PyTorch's DDP makes its buckets anew in it and may hold those of the first step "
        f"meanwhile, {format_gib(worst.static.first_step_bucket)} more, {format_gib(worst.second_step)} "
        f"of {format_gib(worst.capacity)}"
    ]


def narrow_warning(memories: Sequence[RankMemory]) -> list[str]:
    """Return a warning where all GPUs fit and one of them only just."""
    worst = min(memories, key=lambda memory: (memory.capacity - memory.total) / memory.capacity)
    if not is_narrow(worst.total, worst.capacity) or any(memory.total > memory.capacity for memory in memories):
        return []
    return [
        f"barely fits: {format_gib(worst.total)} of {format_gib(worst.capacity)}. Less than {100 * NARROW:.0f} % of a "
        f"GPU is left, and simulated peaks are off by more than that on average"
    ]


def is_narrow(peak_bytes: float, capacity_bytes: float) -> bool:
    """Tell whether a peak fits and leaves less than `NARROW` of the capacity."""
    return 0 <= capacity_bytes - peak_bytes < NARROW * capacity_bytes


def memory_report(memories: Sequence[RankMemory]) -> dict[str, Any]:
    """Return ``memory`` of the results: bytes, and the fullest rank of each stage.

    ``contents`` adds up to ``peak``, the peak of all steps after the first two. ``second_step_bytes``: memory that
    torch's DDP may take in the second. Workspace of a pass counts among activations, workspace of the optimizer among
    buffers. ``capacity_bytes``: memory of the GPU with the least free memory. Peaks are those of GPUs with as much.
    """
    capacity = fullest(memories).capacity
    equal = [memory for memory in memories if memory.capacity == capacity]
    return {
        "capacity_bytes": float(capacity),
        "fits": all(memory.total <= memory.capacity for memory in memories),
        "peak_bytes": max(memory.total for memory in equal),
        "peak_reserved_bytes": max(memory.reserved for memory in equal),
        "peak_allocated_bytes": max(memory.allocated for memory in equal),
        **({"second_step_bytes": max(second)} if (second := _second_steps(equal)) else {}),
        "per_stage": [
            {
                "stage": memory.stage,
                "weights": memory.static.state.weights,
                "gradients": memory.gradients,
                "optimizer": memory.static.state.optimizer,
                "activations": memory.activations + (0.0 if memory.updating else memory.workspace),
                "buffers": memory.buffers + (memory.workspace if memory.updating else 0.0),
                "peak": memory.total,
                "capacity": memory.capacity,
                "peak_at_s": memory.peak_at_s,
                "during": memory.during,
                "in_flight": memory.in_flight,
                "workspace": memory.workspace,
                "contents": memory.contents,
            }
            for memory in worst_per_stage(memories)
        ],
    }
