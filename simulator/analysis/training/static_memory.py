"""Static memory: bytes that ranks hold whatever their steps do."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from simulator import models
from simulator.config import Workload
from simulator.lowering.layout import PipelineSeat, layout
from simulator.lowering.sharding import keeps_bytes_by_part, whole_gradient_bytes
from simulator.models import Part, StateBytes
from simulator.operations.weights import Weight, elements_by_axis
from simulator.same_objects import SameObjects
from simulator.units import DTYPE_BYTES, MB, MiB

#: CUDA context with the kernels that PyTorch loads. Since CUDA 11.7 modules load lazily, and an idle context takes
#: about 300 MB. A training step's kernels bring it to about half a gigabyte (github.com/pytorch/pytorch, issue 107667).
CUDA_CONTEXT_BYTES = 500 * MB
#: Memory of an NCCL communicator. After an all-reduce on A100s behind NVSwitch a process has 544 MB with 2 GPUs, 688 MB
#: with 4 (github.com/NVIDIA/nccl, issue 964). About 300 MB of it are the context. Beyond a few ranks channels and
#: their buffers are independent of the number of ranks (same repository, issue 986).
NCCL_COMMUNICATOR_BYTES = 320 * MiB
#: Threads that issue products, each with its own handle and workspace: the forward pass's and autograd's.
BLAS_THREADS = 2


@dataclass(frozen=True)
class StaticMemory:
    """Memory of a rank whatever its steps do, bytes.

    ``state``: the model's state, with ``step_gradients``, the gradients that exist within a step alone.
    ``accumulated``: whole gradients beside them that wait for the last micro-batch to be reduced.
    ``placeholders``: gradients of no content that stay (see `models.linear.linear`). ``bucket``: copies of gradients.
    ``receives``: receive buffers of a pipeline. ``workspaces``: BLAS. ``first_step_bucket``: extra bytes of DDP's
    second step. ``communicators``: their number.

    ``parts``: stage -> the parts that its passes run. ``layers_offloaded``: the layers' saved tensors are left out of
    ``parts``, as copies of their own move them. ``passes_by_part``: passes are cut by part, and each piece moves the
    activations of its part. ``first_update_tensors``: bytes of each tensor of states that the first update makes, which
    ``state`` has too.
    """

    state: StateBytes
    step_gradients: float = 0.0
    accumulated: float = 0.0
    placeholders: float = 0.0
    bucket: float = 0.0
    receives: float = 0.0
    workspaces: float = 0.0
    first_step_bucket: float = 0.0
    communicators: int = 0
    parts: Mapping[int, tuple[Part, ...]] = field(default_factory=dict)
    layers_offloaded: bool = False
    passes_by_part: bool = False
    first_update_tensors: tuple[float, ...] = ()

    @property
    def gradients(self) -> float:
        """Gradients that exist all the time."""
        return self.state.gradients - self.step_gradients

    @property
    def allocated(self) -> float:
        """Bytes inside PyTorch's allocator."""
        return (
            self.state.total - self.step_gradients + self.placeholders + self.bucket + self.receives + self.workspaces
        )

    @property
    def overhead(self) -> float:
        """Device memory outside PyTorch's allocator."""
        return CUDA_CONTEXT_BYTES + self.communicators * NCCL_COMMUNICATOR_BYTES


def communicators(groups: Mapping[str, Iterable[Iterable[int]]], ranks: Iterable[int]) -> Counter[int]:
    """Return the number of NCCL communicators of each of some ``ranks``: one in each group of several ranks.

    ``groups``: axis -> groups of ranks.
    """
    chosen, counts = frozenset(ranks), Counter[int]()
    for members in map(tuple, itertools.chain.from_iterable(groups.values())):
        if len(members) > 1:
            counts.update(chosen.intersection(members))
    return counts


def static_memory(workload: Workload, blas_workspace_bytes: Mapping[int, float]) -> dict[int, StaticMemory]:
    """Return the static memory of some ranks.

    ``blas_workspace_bytes``: rank -> bytes of one thread's workspace. A process has a communicator in every group. Jobs
    of several ranks have one of all ranks, too: PyTorch's default group, which barriers use.
    """
    placed = layout(workload)
    groups = {**placed.groups, "world": (tuple(range(workload.n_ranks)),) if workload.n_ranks > 1 else ()}
    counts = communicators(groups, blas_workspace_bytes)
    by_seat: dict[tuple[PipelineSeat, int, float], StaticMemory] = {}
    by_rank, weight_memories = {}, _WeightMemories(workload)
    for rank, nbytes in blas_workspace_bytes.items():
        key = placed.places[placed.place_of[rank]], counts[rank], BLAS_THREADS * nbytes
        if key not in by_seat:
            by_seat[key] = _static_memory_at(workload, weight_memories, *key)
        by_rank[rank] = by_seat[key]
    return by_rank


def _static_memory_at(
    workload: Workload, weight_memories: _WeightMemories, place: PipelineSeat, n_communicators: int, workspaces: float
) -> StaticMemory:
    parallelism, pipeline_rank = workload.parallelism, place.pipeline_rank
    parts = {
        stage: models.stage_parts(workload, stage % parallelism.n_stages, place.seat)
        for stage in parallelism.stages_of(pipeline_rank)
    }
    weight_memory = weight_memories.memory(pipeline_rank, list(itertools.chain.from_iterable(parts.values())))
    return static_memory_of(workload, pipeline_rank, parts, weight_memory, n_communicators, workspaces)


@dataclass(frozen=True)
class WeightMemory:
    """Memory of a rank that follows from its weights alone, bytes; fields as in `StaticMemory`."""

    state: StateBytes
    step_gradients: float
    accumulated: float
    first_step_bucket: float
    passes_by_part: bool
    first_update_tensors: tuple[float, ...]


def memory_of_weights(workload: Workload, pipeline_rank: int, weights: Sequence[Weight]) -> WeightMemory:
    """Return the memory of a pipeline rank's ``weights``; neither micro-batches' size nor recomputation matters."""
    return WeightMemory(
        state=models.state_bytes_of(workload, pipeline_rank, weights),
        step_gradients=models.made_gradient_bytes(workload, weights),
        accumulated=whole_gradient_bytes(workload, weights) if workload.adds_whole_gradients else 0.0,
        first_step_bucket=_bytes_of_first_step_bucket(workload, weights),
        passes_by_part=keeps_bytes_by_part(workload, weights),
        first_update_tensors=models.first_update_tensors(workload, weights),
    )


class _WeightMemories:
    """Memory of the weights of a workload's ranks; those with the same weights, in as many versions, share it."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        #: Weights of each part, and their versions -> memory.
        self._known = SameObjects[WeightMemory]()

    def memory(self, pipeline_rank: int, parts: Sequence[Part]) -> WeightMemory:
        """Return the memory of a pipeline rank that has these parts."""
        workload, layout = self._workload, self._workload.parallelism
        versions = layout.pipeline_schedule.weight_versions(layout.pp, workload.microbatches, pipeline_rank)
        return self._known.get(
            [part.weights for part in parts],
            lambda: memory_of_weights(workload, pipeline_rank, models.weights_of(parts)),
            versions,
        )


def static_memory_of(
    workload: Workload,
    pipeline_rank: int,
    parts: Mapping[int, tuple[Part, ...]],
    weight_memory: WeightMemory,
    n_communicators: int,
    workspaces: float,
) -> StaticMemory:
    """Return the static memory of a pipeline rank that has these ``parts`` of each of its stages."""
    offloaded = workload.parallelism.offload.activations != "none"
    if offloaded:
        parts = {stage: tuple(map(_without_saved_layers, stage_parts)) for stage, stage_parts in parts.items()}
    all_parts = [part for stage_parts in parts.values() for part in stage_parts]
    placeholders = models.unique(tensor for part in all_parts for tensor in part.placeholders)
    return StaticMemory(
        state=weight_memory.state,
        step_gradients=weight_memory.step_gradients,
        accumulated=weight_memory.accumulated,
        placeholders=sum(tensor.nbytes for tensor in placeholders),
        bucket=_bucket_bytes(workload, weight_memory.state),
        receives=_receive_bytes(workload, pipeline_rank),
        workspaces=workspaces,
        first_step_bucket=weight_memory.first_step_bucket,
        communicators=n_communicators,
        parts=parts,
        layers_offloaded=offloaded,
        passes_by_part=weight_memory.passes_by_part,
        first_update_tensors=weight_memory.first_update_tensors,
    )


def _receive_bytes(workload: Workload, pipeline_rank: int) -> float:
    """Return the bytes of receive buffers of torch's stages: an activation and a gradient per micro-batch.

    The first stage receives no activation, the last one no gradient (torch/distributed/pipelining/stage.py,
    ``_create_act_recv_info``, ``_create_grad_recv_info``).
    """
    if not workload.stage_runtime.buffers_each_microbatch:
        return 0.0
    last = workload.parallelism.n_stages - 1
    each = models.passed_bytes(workload)
    stages = workload.parallelism.stages_of(pipeline_rank)
    return workload.microbatches * each * sum((stage > 0) + (stage < last) for stage in stages)


def _bytes_of_first_step_bucket(workload: Workload, weights: Iterable[Weight]) -> float:
    """Return the bytes of the one bucket of gradients in the first step of torch's DDP.

    Source: torch/nn/parallel/distributed.py, ``_get_bucket_size_limits``. The second step rebuilds the buckets in the
    order of gradients, while the process group may still hold the first. It releases reduced tensors at its next
    collective after its watchdog, ten times a second, has seen the end
    (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, ``stashed_for_allocator_safety_``). In real runs with DDP 23 of
    34 ranks held it (calibration/results/runs).
    """
    if not workload.replication.in_ddp:
        return 0.0
    replicas, counts = workload.parallelism.replicas, elements_by_axis(weights).items()
    return float(DTYPE_BYTES[workload.training.grad_dtype] * sum(n for axis, n in counts if replicas(axis) > 1))


def _without_saved_layers(part: Part) -> Part:
    return replace(part, saved=(), held_for_weights=()) if part.is_unit else part


def _bucket_bytes(workload: Workload, state: StateBytes) -> float:
    """Return the bytes of the buffer that gradients are copied into, where they are; it holds one bucket."""
    parallelism, bucket = workload.parallelism, workload.replication.bucket
    if bucket == "whole" and parallelism.copy_to_buckets:
        return float(parallelism.bucket_bytes)
    if not parallelism.copy_to_buckets or parallelism.replicas("dp") == 1 or bucket == "none":
        return 0.0
    return min(float(parallelism.bucket_bytes), state.gradients)
