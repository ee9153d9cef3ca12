"""How gradients are reduced and parameters gathered over the ranks that hold the same ones.

Without ZeRO gradients are all-reduced. ZeRO-1 reduce-scatters them, so that each rank updates its shard of the
parameters and all gather the rest. ZeRO-2 keeps nothing but its shard of the gradients, so that it reduces those of
every micro-batch as they are made. ZeRO-3 keeps its shard of the parameters too and gathers them for every pass (arXiv
1910.02054, sections 5 and 7).

A state may have several instances (``hsdp``). Gradients are then reduce-scattered within one and their shards
all-reduced across, as often as they are reduced at all; parameters are gathered within one. References: arXiv
2304.11277, section 3.2.2; torch's ``fully_shard`` on a 2-dimensional mesh; Megatron-LM's
``num_distributed_optimizer_instances``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simulator.config import Parallelism, Workload
from simulator.lowering.host_copies import fetch_parameters
from simulator.operations.weights import Weight, by_axis, elements_by_axis, gathered_weight_bytes, trained, weight_bytes
from simulator.program import Collective, CollectiveKind, Purpose, Step, reordered
from simulator.units import DTYPE_BYTES


def leaving(parallelism: Parallelism, weights: Iterable[Weight]) -> dict[str, tuple[Weight, ...]]:
    """Return, by axis, the ``weights`` whose gradients leave the GPU: to other ranks, to servers, or to its host."""
    everywhere = parallelism.updates_elsewhere
    groups = by_axis(trained(weights)).items()
    return {axis: group for axis, group in groups if everywhere or parallelism.replicas(axis) > 1}


def gathers_by_unit(workload: Workload, weights: Iterable[Weight]) -> bool:
    """Return True where passes of a rank with ``weights`` are cut by part, and the weights of each part gathered."""
    parallelism = workload.parallelism
    offload = parallelism.offload
    if parallelism.zero != 3:
        return False
    shared = any(parallelism.replicas(axis) > 1 for axis in by_axis(weights))
    hooked = workload.software.hooked_modules is not None
    return shared or hooked or offload.optimizer != "none" or offload.parameters != "none"


def keeps_bytes_by_part(workload: Workload, weights: Iterable[Weight]) -> bool:
    """Return True where a pass takes and gives back the bytes of activations part by part.

    So it is under ZeRO-3, and in passes of two micro-batches that run in turns (`hide_all_to_alls`). Offloaded
    activations come and go by themselves (`offload_activations`).
    """
    layout = workload.parallelism
    apart = gathers_by_unit(workload, weights) or layout.overlap.expert_all_to_all
    return apart and layout.offload.activations == "none"


def whole_gradient_bytes(workload: Workload, weights: Iterable[Weight]) -> float:
    """Return the bytes of whole gradients of ``weights`` that are alive beside the state.

    They are there from a backward pass to their reduction, or to their copy to the host. Only ZeRO-2 and 3, whose state
    holds shards, have such: gradients that are sharded, or go to the host. A product that adds to a buffer makes them
    in the type in which they are reduced (Megatron-FSDP). Plain autograd makes them in working precision (torch). Those
    of several micro-batches are added up in the type in which they are reduced. What goes to DeepSpeed's buckets,
    tensor by tensor, waits there.
    """
    training, parallelism = workload.training, workload.parallelism
    if parallelism.zero < 2 or workload.replication.shards_buckets:
        return 0.0
    away = parallelism.offload.optimizer != "none"
    added = training.gradient_accumulation_fusion or workload.adds_whole_gradients
    dtype = training.grad_dtype if added else training.trained_dtype
    whole = sum(count for axis, count in elements_by_axis(weights).items() if away or parallelism.shards(axis) > 1)
    return float(DTYPE_BYTES[dtype] * whole)


def gathered_bytes(workload: Workload, weights: Iterable[Weight]) -> float:
    """Return the bytes of ``weights`` that, gathered, are alive beside the state.

    Only ZeRO-3, whose state holds shards, has such: weights that are sharded at all, or come from the host.
    """
    parallelism = workload.parallelism
    if parallelism.zero < 3:
        return 0.0
    streamed = parallelism.offload.parameters != "none"
    groups = by_axis(weights).items()
    return sum(gathered_weight_bytes(group) for axis, group in groups if streamed or parallelism.shards(axis) > 1)


def gather(workload: Workload, label: str, weights: Iterable[Weight], like: Step | None = None) -> list[Step]:
    """Return the steps that gather ``weights`` from their shards, one per axis, on the lane ``dp_gather``.

    They carry the micro-batch and the stage of the pass ``like`` that they serve. Shards that live outside the GPU are
    fetched first.
    """
    parallelism = workload.parallelism
    steps: list[Step] = []
    for axis, group in by_axis(weights).items():
        shards, named = parallelism.shards(axis), named_by_axis(label, axis)
        nbytes, whole = weight_bytes(group), gathered_bytes(workload, group)
        fetched = fetch_parameters(workload, named if shards == 1 else f"{named} shard", nbytes / shards)
        if shards > 1:
            over = parallelism.shard_axis(axis)
            comm = Collective(
                "dp.all_gather params",
                CollectiveKind.ALL_GATHER,
                gathered_weight_bytes(group),
                over,
                Purpose.DATA,
                stream="gather",
                hooks=hooks(workload, group),
            )
            shard_bytes = fetched[-1].alloc_bytes if fetched else 0.0
            after = tuple(step.label for step in fetched[-1:])
            fetched.append(Step(named, comm, after, alloc_bytes=whole, free_bytes=shard_bytes))
        steps += [part_of_pass(step, like) for step in fetched]
    return steps


def hooks(workload: Workload, weights: Sequence[Weight]) -> int:
    """Return the modules with these ``weights`` whose hooks gather them for a pass.

    DeepSpeed's run on a single rank too, which has nothing to gather (zero/partition_parameters.py,
    ``_no_gather_coalesced``).
    """
    modules = workload.software.hooked_modules
    return modules(weights) if modules is not None and workload.parallelism.zero == 3 else 0


def part_of_pass(step: Step, like: Step | None) -> Step:
    """Return ``step`` with the micro-batch and the stage of the pass ``like``, if there is one."""
    return reordered(step, step.after, microbatch=like.microbatch, stage=like.stage) if like else step


def named_by_axis(label: str, axis: str) -> str:
    """Return the label of a step for one ``axis``: those of experts' weights, which have their own axis, say so."""
    return label if axis == "dp" else f"{label} experts"
