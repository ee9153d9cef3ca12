"""How gradients are reduced and parameters gathered over the ranks that hold the same ones.

Without ZeRO gradients are all-reduced. ZeRO-1 reduce-scatters them, so that each rank updates its shard of the
parameters and all gather the rest; ZeRO-2 keeps nothing but its shard of the gradients, so that it reduces those of
every micro-batch as they are made; ZeRO-3 keeps its shard of the parameters too and gathers them for every pass (arXiv
1910.02054, sections 5 and 7). Where a state has several instances (``hsdp``) gradients are reduce-scattered within one
and their shards all-reduced across, as often as they are reduced at all, and parameters gathered within (arXiv
2304.11277, section 3.2.2; torch's ``fully_shard`` on a 2-dimensional mesh; Megatron-LM's
``num_distributed_optimizer_instances``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from simulator.config import Parallelism, Workload
from simulator.lowering.offload import HostGradients, fetch_parameters, gradients_to_host
from simulator.lowering.servers import exchange
from simulator.operations.weights import Weight, by_axis, elements, elements_by_axis, weight_bytes
from simulator.program import Collective, CollectiveKind, Purpose, Step
from simulator.units import DTYPE_BYTES


def leaving(parallelism: Parallelism, weights: Iterable[Weight]) -> dict[str, tuple[Weight, ...]]:
    """Return, by axis, the ``weights`` whose gradients leave the GPU: to other ranks, to servers, or to its host."""
    everywhere = bool(parallelism.server_count) or parallelism.offload.optimizer != "none"
    return {axis: group for axis, group in by_axis(weights).items() if everywhere or parallelism.replicas(axis) > 1}


def gathers_by_unit(workload: Workload, weights: Iterable[Weight]) -> bool:
    """Return True where passes of a rank with ``weights`` are cut by part, and the weights of each part gathered."""
    parallelism = workload.parallelism
    return parallelism.zero == 3 and (bool(leaving(parallelism, weights)) or parallelism.offload.parameters != "none")


def held_by_part(workload: Workload, weights: Iterable[Weight]) -> bool:
    """Return True where such a pass takes and gives back the bytes of activations part by part.

    Offloaded activations come and go by themselves (`activations`).
    """
    return gathers_by_unit(workload, weights) and workload.parallelism.offload.activations == "none"


def gradient_bytes(workload: Workload, weights: Iterable[Weight]) -> float:
    """Return the bytes of whole gradients of ``weights`` that are alive beside the state.

    They are there from a backward pass to their reduction, or to their copy to the host. Only ZeRO-2 and 3, whose state
    holds shards, have such: gradients that are sharded, or go to the host. A product that adds to a buffer makes them
    in the type in which they are reduced (Megatron-FSDP), plain autograd in working precision (torch).
    """
    training, parallelism = workload.training, workload.parallelism
    if parallelism.zero < 2:
        return 0.0
    away = parallelism.offload.optimizer != "none"
    dtype = training.grad_dtype if training.gradient_accumulation_fusion else training.precision
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
    return sum(weight_bytes(group) for axis, group in groups if streamed or parallelism.shards(axis) > 1)


def gather(workload: Workload, label: str, weights: Iterable[Weight], like: Step | None = None) -> list[Step]:
    """Return the steps that gather ``weights`` from their shards, one per axis, on the lane ``dp_gather``.

    They carry the micro-batch and the stage of the pass ``like`` that they serve. Shards that live outside the GPU are
    fetched first.
    """
    parallelism = workload.parallelism
    steps: list[Step] = []
    for axis, group in by_axis(weights).items():
        shards, named = parallelism.shards(axis), _named(label, axis)
        nbytes, whole = weight_bytes(group), gathered_bytes(workload, group)
        fetched = fetch_parameters(workload, named if shards == 1 else f"{named} shard", nbytes / shards)
        if shards > 1:
            over = parallelism.shard_axis(axis)
            comm = Collective(
                "dp.all_gather params", CollectiveKind.ALL_GATHER, nbytes, over, Purpose.DATA, stream="gather"
            )
            own = fetched[-1].alloc_bytes if fetched else 0.0
            after = tuple(step.label for step in fetched[-1:])
            fetched.append(Step(named, comm, after, alloc_bytes=whole, free_bytes=own))
        steps += [_as_part_of(step, like) for step in fetched]
    return steps


class Reductions:
    """The gradient reductions of a rank, in order, or what takes their place. ``over_replicas``: labels of those of
    whole gradients over the ranks that hold the same parameters. ``on_host``: what has been copied to the host.

    Where whole gradients are alive for a while only (ZeRO-2 and 3), one reduction goes on beside the pass that makes
    the next gradients, which then are reduced; what comes after waits for the first. So at most two sets are alive, as
    with torch's ``fully_shard`` (``reduce_scatter_state``) and DeepSpeed's two buckets (``overlap_comm``). Without
    overlap all that follows waits.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.steps: list[Step] = []
        self.over_replicas: set[str] = set()
        self.on_host: dict[object, HostGradients] = {}
        self._seen: Counter[tuple[str, str]] = Counter()
        self._done: list[tuple[str, ...]] = []  # labels of each reduction's first steps, which give the gradients back

    def add(self, label: str, weights: Iterable[Weight], after: Sequence[str], like: Step | None = None) -> None:
        """Reduce the gradients of ``weights`` once the steps ``after`` have ended; see `gather` for ``like``."""
        workload, parallelism = self._workload, self._workload.parallelism
        first: list[str] = []
        for axis, group in leaving(parallelism, weights).items():
            named, count = _named(label, axis), elements(group)
            if parallelism.server_count:
                self.steps += exchange(workload, named, axis, count, tuple(after))
                continue
            done: tuple[str, ...] = tuple(after)
            given_back = gradient_bytes(workload, group)
            if parallelism.replicas(axis) > 1:
                given_back, done = self._reduce(named, axis, count, after, given_back, like)
                first.append(named)
            if parallelism.offload.optimizer != "none":
                self._to_host(named, axis, count, done, given_back, like)
                first.append(f"{named} to host")
        if first:
            self._done.append(tuple(first))

    def _reduce(
        self, label: str, axis: str, count: int, after: Sequence[str], made: float, like: Step | None
    ) -> tuple[float, tuple[str, ...]]:
        """Reduce over the ranks that hold the same parameters, where ``made`` bytes of gradients are alive for that
        alone; what they take in the precision in which they are reduced, and what has to have ended then."""
        workload, parallelism = self._workload, self._workload.parallelism
        grad_bytes, shards = DTYPE_BYTES[workload.training.grad_dtype], parallelism.shards(axis)
        op = CollectiveKind.REDUCE_SCATTER if shards > 1 else CollectiveKind.ALL_REDUCE
        over = parallelism.shard_axis(axis)
        comm = Collective(f"dp.{op} grads", op, float(count * grad_bytes), over, Purpose.DATA)
        stays = parallelism.offload.optimizer != "none"
        cast = max(comm.nbytes - made, 0.0) if made else 0.0
        step = Step(label, comm, tuple(after), alloc_bytes=cast, free_bytes=0.0 if stays else made + cast)
        self.over_replicas.add(label)
        self.steps.append(_as_part_of(step, like))
        if not 1 < shards < parallelism.replicas(axis):
            return made + cast, (label,)
        over, nbytes = parallelism.replica_axis(axis), count * grad_bytes / shards
        comm = Collective(
            "dp.all_reduce shards", CollectiveKind.ALL_REDUCE, nbytes, over, Purpose.DATA, stream="replica"
        )
        self.steps.append(_as_part_of(Step(f"{label} shard", comm, (label,)), like))
        return made + cast, (f"{label} shard",)

    def _to_host(
        self, label: str, axis: str, count: int, after: Sequence[str], given_back: float, like: Step | None
    ) -> None:
        """Copy this rank's share to the host, where those of later micro-batches are added to the first one's."""
        key: object = label
        if like is not None:
            self._seen[like.label, axis] += 1
            key = (like.stage, self._seen[like.label, axis], axis)
        share = count / self._workload.parallelism.shards(axis)
        earlier = self.on_host.get(key)
        steps = gradients_to_host(self._workload, label, share, tuple(after), given_back, earlier)
        self.steps += [_as_part_of(step, like) for step in steps]
        self.on_host[key] = HostGradients(share, steps[-1].label)

    def waits(self, *, all_done: bool = False) -> tuple[str, ...]:
        """What the next pass has to wait for, where ``all_done`` the youngest too."""
        ahead = 1 if self._workload.parallelism.overlap.grad_reduce and not all_done else 0
        return self._done[-1 - ahead] if len(self._done) > ahead else ()


def _as_part_of(step: Step, like: Step | None) -> Step:
    return replace(step, microbatch=like.microbatch, stage=like.stage) if like else step


def _named(label: str, axis: str) -> str:
    """Steps of experts, which have an axis of their own, stand beside those of the rest."""
    return label if axis == "dp" else f"{label} experts"
