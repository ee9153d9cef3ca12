"""Lower bounds of a layout: bytes and seconds that no step of it stays below, without simulating one.

What is bounded is what `simulator.run` returns, with every schedule and every framework. Tests hold random layouts
against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simulator import models
from simulator.analysis.training.static_memory import (
    BLAS_THREADS,
    CUDA_CONTEXT_BYTES,
    WeightMemory,
    memory_of_weights,
)
from simulator.api import cluster_of
from simulator.config import Workload
from simulator.config.profile import load_profiles
from simulator.config.stack import load_stack
from simulator.costs import Costs
from simulator.lowering.layout import groups_of_first_rank
from simulator.lowering.reductions import AlikeReductions, Reductions
from simulator.lowering.sharding import gather, leaving
from simulator.models import PartPool
from simulator.operations.weights import Weight, trained
from simulator.program import Collective, Compute, Step
from simulator.searching.memory_floor import memory_floor
from simulator.searching.prices import AxisGroups, LeastPrices
from simulator.searching.stage_parts import StageParts, layer_kinds_of
from simulator.searching.time_floor import shared_traffic, time_floor

#: Keys on which no weight depends, nor what an optimizer computes with it.
_WEIGHTLESS = ("training.micro_batch", "training.recompute", "parallelism.schedule", "parallelism.vpp")
#: Pipeline ranks whose weights are remembered.
_MOST_RANKS = 20_000
#: Pools of parts that are kept: once there are so many, all are given up.
_MOST_POOLS = 2_000


@dataclass(frozen=True)
class LayoutBound:
    """Least bytes of the fullest GPU, and least seconds of a step, 0 where nothing is said of it."""

    memory_bytes: float
    step_time_s: float


class RankUpdate(NamedTuple):
    """The optimizer of a pipeline rank: bytes of its workspace, and least seconds from the last pass to its end."""

    workspace_bytes: float
    seconds: float


@dataclass(frozen=True)
class LayoutBounds:
    """Bounds of the layouts of one search, which share prices.

    ``blas_workspace_bytes``: workspace of one thread on a GPU. ``capacity_bytes``: memory of the largest GPU.
    ``layer_kinds``: what tells each layer of the model apart.
    """

    prices: LeastPrices
    blas_workspace_bytes: float
    capacity_bytes: float
    layer_kinds: tuple[object, ...]
    _pools: dict[tuple[Any, ...], PartPool] = field(default_factory=dict, init=False, repr=False, compare=False)
    _memories: dict[tuple[Any, ...], WeightMemory] = field(default_factory=dict, init=False, repr=False, compare=False)
    _updates: dict[tuple[Any, ...], RankUpdate] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def for_workload(cls, workload: Workload) -> LayoutBounds:
        """Return the bounds of layouts of a workload on its cluster."""
        profiles = load_profiles(workload.calibrations, workload.training)
        network = load_stack(workload.stack) if workload.stack else None
        costs = Costs.from_profiles(profiles, workload.software, network)
        specs = [profile.gpu_spec for profile in profiles.values()]
        return cls(
            LeastPrices.on_cluster(costs, cluster_of(workload), workload.gpu_types),
            min(spec.blas_workspace_bytes for spec in specs),
            max(spec.memory_bytes.value for spec in specs),
            layer_kinds_of(workload.model),
        )

    def bound(self, changes: Mapping[str, Any], workload: Workload) -> LayoutBound:
        """Return the bounds of a layout, which is ``workload`` and differs by ``changes`` from others of the search.

        Where it needs more memory than any GPU has, nothing is said of its time, and parts of its memory may be left
        out.
        """
        stages = StageParts(workload, self.layer_kinds, self._pool(changes, workload))
        keys = self._rank_keys(changes, stages)
        memories = [self._memory(key, stages, rank) for rank, key in enumerate(keys)]
        state_bytes = max(one.state.total - one.step_gradients for one in memories) + CUDA_CONTEXT_BYTES
        if state_bytes > self.capacity_bytes:
            return LayoutBound(state_bytes, 0.0)
        groups = _priced_groups(workload)
        updates = [self._update(key, stages, rank, groups) for rank, key in enumerate(keys)]
        workspaces = BLAS_THREADS * self.blas_workspace_bytes
        beside = [one.workspace_bytes for one in updates]
        memory_bytes = memory_floor(stages, memories, beside, workspaces, self.capacity_bytes)
        if memory_bytes > self.capacity_bytes:
            return LayoutBound(memory_bytes, 0.0)
        computing_s = time_floor(stages, groups, [one.seconds for one in updates], self.prices)
        return LayoutBound(memory_bytes, max(computing_s, self.prices.links_s(shared_traffic(stages))))

    def _pool(self, changes: Mapping[str, Any], workload: Workload) -> PartPool:
        """Return the pool of parts of layouts that differ from this one in chunks of a rank alone."""
        same = tuple((key, repr(value)) for key, value in changes.items() if key != "parallelism.vpp")
        key = workload.parallelism.n_stages > 1, same
        if key not in self._pools and len(self._pools) >= _MOST_POOLS:
            self._pools.clear()
        return self._pools.setdefault(key, {})

    def _rank_keys(self, changes: Mapping[str, Any], stages: StageParts) -> list[tuple[Any, ...]]:
        """Return, by pipeline rank, what its weights and all that is done with them depend on."""
        workload = stages.workload
        layout = workload.parallelism
        same = tuple((key, repr(value)) for key, value in changes.items() if key not in _WEIGHTLESS)
        versions = layout.pipeline_schedule.weight_versions
        return [
            (
                same,
                layout.n_stages > 1,
                workload.microbatches > 1,
                stages.weights_key(rank),
                versions(layout.pp, workload.microbatches, rank),
                rank == 0,
            )
            for rank in range(layout.pp)
        ]

    def _memory(self, key: tuple[Any, ...], stages: StageParts, rank: int) -> WeightMemory:
        if key not in self._memories:
            if len(self._memories) >= _MOST_RANKS:
                self._memories.clear()
            self._memories[key] = memory_of_weights(stages.workload, rank, stages.weights(rank))
        return self._memories[key]

    def _update(self, key: tuple[Any, ...], stages: StageParts, rank: int, groups: AxisGroups) -> RankUpdate:
        # Rank 0 also waits for collectives: where they are priced, and where parameters are gathered behind the update.
        key = *key, rank == 0 and (bool(groups), stages.workload.parallelism.pipeline_schedule.drains)
        if key not in self._updates:
            if len(self._updates) >= _MOST_RANKS:
                self._updates.clear()
            workload, weights = stages.workload, stages.weights(rank)
            layout = workload.parallelism
            here = not layout.updates_elsewhere
            ops = models.optimizer_ops(workload, weights)
            seconds = sum(self.prices.kernel_s(op.kernel) for op in ops if isinstance(op, Compute))
            if rank == 0:
                seconds += self._reduced_at_end_s(workload, weights, groups)
                seconds += self._gathered_at_end_s(workload, weights, groups)
            workspace = models.optimizer_workspace_bytes(workload, weights) if here else 0.0
            self._updates[key] = RankUpdate(workspace, seconds)
        return self._updates[key]

    def _reduced_at_end_s(self, workload: Workload, weights: Sequence[Weight], groups: AxisGroups) -> float:
        """Return the seconds of the slowest reduction of rank 0 where all begin when its last pass has ended."""
        layout = workload.parallelism
        beside = layout.zero >= 2 or layout.overlap.grad_reduce
        if beside or layout.server_count or layout.grad_compression != "none" or not leaving(layout, weights):
            return 0.0
        reductions = Reductions(AlikeReductions(workload))
        reductions.add("", weights, ())
        return self._slowest_s(reductions.steps, groups)

    def _gathered_at_end_s(self, workload: Workload, weights: Sequence[Weight], groups: AxisGroups) -> float:
        """Return the seconds for which rank 0 gathers what the optimizer has updated, where nothing runs beside."""
        layout = workload.parallelism
        beside = layout.overlap.param_gather or not layout.pipeline_schedule.drains
        if layout.zero not in (1, 2) or beside or layout.updates_elsewhere:
            return 0.0
        return self._slowest_s(gather(workload, "", trained(weights)), groups)

    def _slowest_s(self, steps: Iterable[Step], groups: AxisGroups) -> float:
        """Return the seconds of the slowest collective of ``steps``, of those whose axis has a group."""
        comms = [step.op for step in steps if isinstance(step.op, Collective)]
        each = [self.prices.collective_s(comm, groups[comm.axis]) for comm in comms if comm.axis in groups]
        return max(each, default=0.0)


def _priced_groups(workload: Workload) -> AxisGroups:
    """Return the groups of rank 0 whose collectives count; none where another algorithm is asked, or passes join."""
    layout = workload.parallelism
    counted = layout.collective_algorithm == "auto" and not layout.pipeline_schedule.joined
    return groups_of_first_rank(workload) if counted else {}
