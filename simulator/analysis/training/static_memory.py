"""What the ranks of a job hold whatever their steps do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from simulator import models
from simulator.config import Workload
from simulator.lowering.layout import PipelineSeat, layout
from simulator.lowering.sharding import held_by_part
from simulator.models import Part, StateBytes
from simulator.operations.weights import Weight, elements_by_axis
from simulator.units import DTYPE_BYTES, MB, MiB

#: CUDA context with the kernels that PyTorch loads. Since CUDA 11.7 modules load lazily and an idle context takes about
#: 300 MB; a training step's kernels bring it to about half a gigabyte (github.com/pytorch/pytorch, issue 107667).
CUDA_CONTEXT_BYTES = 500 * MB
#: What NCCL keeps per communicator: 544 MB with 2 and 688 MB with 4 A100s behind NVSwitch after an all-reduce, context
#: included (github.com/NVIDIA/nccl, issue 964), less about 300 MB for that context. Channels and their buffers are
#: independent of the number of ranks beyond a few (same repository, issue 986).
NCCL_COMMUNICATOR_BYTES = 320 * MiB
#: Threads that issue products, each with a handle and a workspace of its own: the forward pass's and autograd's.
BLAS_THREADS = 2


@dataclass(frozen=True)
class Holdings:
    """What a rank holds whatever its steps do, bytes: the model's ``state`` but for the gradients that steps make
    (``made``), ``placeholders`` that stay for good (see `models.linear.linear`), the ``bucket`` of copied gradients,
    ``receives`` of a pipeline, the ``workspaces`` of BLAS; and how many ``communicators`` it has. ``first_bucket``:
    what DDP's second step may hold beside all that.
    ``parts``: by stage, what its passes run; without what layers save where ``layers_away``: it is offloaded, and comes
    and goes with steps of its own. ``by_part``: passes are cut by part, and each piece takes and gives back its own."""

    state: StateBytes
    made: float = 0.0
    placeholders: float = 0.0
    bucket: float = 0.0
    receives: float = 0.0
    workspaces: float = 0.0
    first_bucket: float = 0.0
    communicators: int = 0
    parts: Mapping[int, tuple[Part, ...]] = field(default_factory=dict)
    layers_away: bool = False
    by_part: bool = False

    @property
    def gradients(self) -> float:
        """Those that are always there."""
        return self.state.gradients - self.made

    @property
    def allocated(self) -> float:
        """Of it, what PyTorch's allocator knows of."""
        return self.state.total - self.made + self.placeholders + self.bucket + self.receives + self.workspaces

    @property
    def overhead(self) -> float:
        """Device memory outside PyTorch's allocator."""
        return CUDA_CONTEXT_BYTES + self.communicators * NCCL_COMMUNICATOR_BYTES


def communicators(groups: Mapping[str, Iterable[Iterable[int]]]) -> Counter[int]:
    """Per rank the groups that it shares with others, ``groups`` being those of each axis: NCCL has a communicator
    each."""
    return Counter(
        rank for of_axis in groups.values() for members in map(tuple, of_axis) if len(members) > 1 for rank in members
    )


def holdings(workload: Workload, blas_workspace_bytes: Mapping[int, float]) -> dict[int, Holdings]:
    """Of the ranks of ``blas_workspace_bytes``, which says what one thread has there. A process has a communicator in
    every group, and one of all ranks where there are several (PyTorch's default group, which barriers use)."""
    placed = layout(workload)
    groups = {**placed.groups, "world": (tuple(range(workload.n_ranks)),) if workload.n_ranks > 1 else ()}
    members = communicators(groups)
    found: dict[tuple[PipelineSeat, int, float], Holdings] = {}
    by_rank = {}
    for rank, nbytes in blas_workspace_bytes.items():
        key = placed.places[placed.place_of[rank]], members[rank], BLAS_THREADS * nbytes
        if key not in found:
            found[key] = _of(workload, *key)
        by_rank[rank] = found[key]
    return by_rank


def _of(workload: Workload, place: PipelineSeat, n_communicators: int, workspaces: float) -> Holdings:
    parallelism = workload.parallelism
    parts = {
        stage: models.stage_parts(workload, stage % parallelism.n_stages, place.seat)
        for stage in parallelism.stages_of(place.pipeline_rank)
    }
    away = parallelism.offload.activations != "none"
    if away:
        parts = {stage: tuple(_emptied(part) for part in of_stage) for stage, of_stage in parts.items()}
    placeholders = models.unique(
        tensor for of_stage in parts.values() for part in of_stage for tensor in part.placeholders
    )
    weights = models.weights_of(part for of_stage in parts.values() for part in of_stage)
    state = models.state_bytes(workload, place.pipeline_rank)
    return Holdings(
        state=state,
        made=models.made_gradient_bytes(workload, weights),
        placeholders=sum(tensor.nbytes for tensor in placeholders),
        bucket=_bucket_bytes(workload, state),
        receives=_receive_bytes(workload, place),
        workspaces=workspaces,
        first_bucket=_first_bucket_bytes(workload, weights),
        communicators=n_communicators,
        parts=parts,
        layers_away=away,
        by_part=held_by_part(workload, weights),
    )


def _receive_bytes(workload: Workload, place: PipelineSeat) -> float:
    """What torch's stages receive into: an activation and a gradient per micro-batch, but for the first stage's and the
    last one's (torch/distributed/pipelining/stage.py, ``_create_act_recv_info``, ``_create_grad_recv_info``)."""
    if not workload.stage_runtime.buffers_each_microbatch:
        return 0.0
    last = workload.parallelism.n_stages - 1
    each = models.passed_bytes(workload)
    stages = workload.parallelism.stages_of(place.pipeline_rank)
    return workload.microbatches * each * sum((stage > 0) + (stage < last) for stage in stages)


def _first_bucket_bytes(workload: Workload, weights: Iterable[Weight]) -> float:
    """Gradients of ``weights`` in the one bucket of the first step of torch's DDP
    (torch/nn/parallel/distributed.py, ``_get_bucket_size_limits``). The second step makes others, in the order in which
    gradients came, while the process group may still hold on to the first: it lets go of what it reduced at its next
    collective after its watchdog, ten times a second, has seen the end
    (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, ``stashed_for_allocator_safety_``). Of the 34 ranks of real runs
    with DDP 23 held it (calibration/results/runs)."""
    if not workload.replication.in_ddp:
        return 0.0
    replicas, counts = workload.parallelism.replicas, elements_by_axis(weights).items()
    return float(DTYPE_BYTES[workload.training.grad_dtype] * sum(n for axis, n in counts if replicas(axis) > 1))


def _emptied(part: Part) -> Part:
    return replace(part, saved=(), held_for_weights=()) if part.is_unit else part


def _bucket_bytes(workload: Workload, state: StateBytes) -> float:
    parallelism = workload.parallelism
    if not parallelism.copy_to_buckets or parallelism.replicas("dp") == 1:
        return 0.0
    return min(float(parallelism.bucket_bytes), state.gradients)
