"""Steps that reduce gradients over the ranks with the same parameters, or take them to servers or to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from simulator.config import Workload
from simulator.lowering.host_copies import gradients_to_host
from simulator.lowering.servers import exchange
from simulator.lowering.sharding import leaving, named_by_axis, part_of_pass, whole_gradient_bytes
from simulator.operations.weights import Weight, elements
from simulator.program import Collective, CollectiveKind, Purpose, Step, reordered
from simulator.same_objects import SameObjects
from simulator.units import DTYPE_BYTES


class LeavingGradients(NamedTuple):
    """Gradients that leave the GPU over an axis: their number, and the bytes of `whole_gradient_bytes`."""

    axis: str
    n_elements: int
    nbytes: float


class AlikeReductions:
    """Reductions of a job, which ranks with the same weights share."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._leaving = SameObjects[list[LeavingGradients]]()
        self._steps: dict[tuple[str, int, float], list[Step]] = {}

    def leaving(self, weights: Sequence[Weight]) -> list[LeavingGradients]:
        """Return what leaves of ``weights``, axis by axis."""

        def gradients() -> list[LeavingGradients]:
            groups = leaving(self.workload.parallelism, weights).items()
            return [
                LeavingGradients(axis, elements(group), whole_gradient_bytes(self.workload, group))
                for axis, group in groups
            ]

        return self._leaving.get((weights,), gradients)

    def steps(self, axis: str, count: int, freed_bytes: float) -> list[Step]:
        """Return `reduce_steps`; reductions of as many gradients over an axis differ in labels alone."""
        key = axis, count, freed_bytes
        if key not in self._steps:
            self._steps[key] = reduce_steps(self.workload, axis, count, freed_bytes)
        return self._steps[key]


class Reductions:
    """The gradient reductions of a rank in order, as ``steps``.

    Where whole gradients are alive for a while only (ZeRO-2 and 3), one reduction goes on beside the pass that makes
    the next gradients, which then are reduced. The pass after that waits for the first reduction. At most two sets are
    alive, as with torch's ``fully_shard`` (``reduce_scatter_state``) and DeepSpeed's two buckets (``overlap_comm``).
    Without overlap all that follows waits.
    """

    def __init__(self, alike: AlikeReductions) -> None:
        self.steps: list[Step] = []
        self._alike, self._workload = alike, alike.workload
        #: Labels of each reduction's first steps, which give the gradients back.
        self._first_steps: list[tuple[str, ...]] = []
        #: Per set of gradients that every micro-batch makes: the step after which the host has those made so far.
        self._on_host: dict[tuple[int, int, str], str] = {}
        self._sets_of_pass: Counter[tuple[str, str]] = Counter()

    def add(self, label: str, weights: Sequence[Weight], after: Sequence[str], like: Step | None = None) -> None:
        """Reduce the gradients of ``weights`` once the steps ``after`` have ended, for the pass ``like`` if any."""
        workload, parallelism = self._workload, self._workload.parallelism
        first_steps: list[str] = []
        for axis, count, whole_bytes in self._alike.leaving(weights):
            named, freed_bytes = named_by_axis(label, axis), whole_bytes
            if parallelism.server_count:
                self.steps += exchange(workload, named, axis, count, tuple(after))
                continue
            steps = self._reduce_steps(named, axis, count, after, freed_bytes)
            first_steps += [step.label for step in steps[:1]]
            if parallelism.offload.optimizer != "none":
                ready = (steps[-1].label,) if steps else tuple(after)
                freed_bytes += sum(step.alloc_bytes for step in steps)
                steps += self._to_host(named, axis, count, ready, freed_bytes, like)
                first_steps.append(f"{named} to host")
            self.steps += [part_of_pass(step, like) for step in steps]
        if first_steps:
            self._first_steps.append(tuple(first_steps))

    def _reduce_steps(self, label: str, axis: str, count: int, after: Sequence[str], freed_bytes: float) -> list[Step]:
        """Return `reduce_steps` in a row, with their whole labels."""
        steps: list[Step] = []
        for like in self._alike.steps(axis, count, freed_bytes):
            before = (steps[-1].label,) if steps else tuple(after)
            steps.append(reordered(like, before, label=label + like.label))
        return steps

    def waits(self, *, all_done: bool = False) -> tuple[str, ...]:
        """Return the labels that the next pass has to wait for; ``all_done``: of the youngest reduction too."""
        ahead = 1 if self._workload.parallelism.overlap.grad_reduce and not all_done else 0
        return self._first_steps[-1 - ahead] if len(self._first_steps) > ahead else ()

    def _to_host(
        self, label: str, axis: str, count: int, after: tuple[str, ...], freed_bytes: float, like: Step | None
    ) -> list[Step]:
        """Copy this rank's share to the host, where later micro-batches are added to the first."""
        share = count / self._workload.parallelism.shards(axis)
        if like is None:
            return gradients_to_host(self._workload, label, share, after, freed_bytes)
        self._sets_of_pass[like.label, axis] += 1
        key = like.stage, self._sets_of_pass[like.label, axis], axis
        steps = gradients_to_host(self._workload, label, share, after, freed_bytes, self._on_host.get(key, ""))
        self._on_host[key] = steps[-1].label
        return steps


def reduce_steps(workload: Workload, axis: str, count: int, freed_bytes: float) -> list[Step]:
    """Return the reduction of ``count`` gradients over the ranks of ``axis``; with `hsdp` the second one of its shards.

    Each step is to follow the one before. Its label here is what stands behind that of the whole reduction.
    ``freed_bytes`` are alive for that alone, and given back unless the host gets them. Where the type in which they
    are reduced needs more, the step takes the difference. Nothing where one rank holds the parameters.
    """
    parallelism, shards = workload.parallelism, workload.parallelism.shards(axis)
    if parallelism.replicas(axis) == 1:
        return []
    whole = shards == 1 or (workload.replication.shards_buckets and parallelism.zero < 3)
    op = CollectiveKind.ALL_REDUCE if whole else CollectiveKind.REDUCE_SCATTER
    nbytes = float(count * DTYPE_BYTES[workload.training.grad_dtype])
    comm = Collective(f"dp.{op} grads", op, nbytes, parallelism.shard_axis(axis), Purpose.DATA)
    cast = max(nbytes - freed_bytes, 0.0) if freed_bytes else 0.0
    stays = parallelism.offload.optimizer != "none"
    steps = [Step("", comm, alloc_bytes=cast, free_bytes=0.0 if stays else freed_bytes + cast)]
    if 1 < shards < parallelism.replicas(axis):
        over = parallelism.replica_axis(axis)
        comm = Collective(
            "dp.all_reduce shards", CollectiveKind.ALL_REDUCE, nbytes / shards, over, Purpose.DATA, stream="replica"
        )
        steps.append(Step(" shard", comm))
    return steps
