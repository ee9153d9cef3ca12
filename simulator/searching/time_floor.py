"""Least step time of a layout: the work of its ranks, the way of a micro-batch, and bytes over links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from simulator import models
from simulator.cluster import Cluster
from simulator.config import Workload
from simulator.lowering.layout import groups_of_first_rank
from simulator.models import Part, StageKey, Turn
from simulator.operations.weights import by_axis, elements, gathered_weight_bytes, trained
from simulator.searching.prices import AxisGroups, LeastPrices, RepeatedCollective, is_uniform
from simulator.searching.stage_parts import StageParts
from simulator.units import DTYPE_BYTES


def time_floor(stages: StageParts, groups: AxisGroups, ends_s: Sequence[float], prices: LeastPrices) -> float:
    """Return seconds that a step takes at least.

    A rank runs its passes one after another, whatever their order. The sum of their kernels, and of in-line collectives
    on an idle network, is a bound; ``ends_s`` comes on top: gradients that are reduced behind a rank's last pass, and
    its optimizer.

    Where a step drains, each micro-batch goes forward through all stages and back again. Then comes the optimizer of
    the first stage. A rank's first forward pass also waits for a forward pass of all stages before its first one.
    Its last gradient pass is of that stage or a later one, and one of all stages before follows. Then comes what is
    left of the first stage's backward pass, and the optimizer there. With equal stages this is the (m + p - 1) of 1F1B,
    and its fraction with interleaved chunks, but it holds for every order of passes.

    Of steps that follow one another without draining a mean period is returned by `run`, which is not below the mean of
    what ranks have to do. Of workers that do not wait for each other it is not below the least.
    """
    workload, plan = stages.workload, stages.workload.parallelism.pipeline_schedule
    n_stages = workload.parallelism.n_stages
    seconds = _Seconds(stages, groups, prices)
    each = [seconds.stage(stage) for stage in range(n_stages)]
    filled = [0.0, *accumulate(one.forward for one in each)]
    drained = [0.0, *accumulate(one.first_gradient for one in each)]
    after_gradients = (
        max(each[0].first_backward - each[0].first_gradient, 0.0) + ends_s[plan.rank_of(0, workload.parallelism.pp)]
    )
    count = workload.microbatches // plan.copies
    busy: list[float] = []
    bound = filled[-1] + drained[-1] + after_gradients
    for rank, numbers in enumerate(stages.stages_of):
        first = min(stage % n_stages for stage in numbers)
        here = [seconds.stage(stage, first_rank=rank == 0) for stage in numbers]
        passes = sum(count * one.forward + (count - 1) * one.backward + one.first_backward for one in here)
        busy.append(passes + ends_s[rank])
        until_last = sum(count * one.forward + (count - 1) * one.gradient + one.first_gradient for one in here)
        tail = until_last + drained[first] + (after_gradients if first else 0.0)
        bound = max(bound, filled[first] + max(busy[-1], tail))
    if workload.parallelism.data_parallel == "async":
        return min(busy)
    return sum(busy) / len(busy) if plan.steady else bound


def shared_traffic(stages: StageParts) -> list[RepeatedCollective]:
    """Return what rank 0 and those that hold the same parameters send each other in a step, with ZeRO-2 and 3.

    Gradients are then reduced for every micro-batch, or once. With ZeRO-3 layers are gathered for each of its forward
    passes and, where they are given up after these, backward passes. Experts, and what is not a layer, are left out.
    """
    workload, layout = stages.workload, stages.workload.parallelism
    elsewhere = layout.updates_elsewhere or layout.offload.parameters != "none"
    other_bytes = layout.grad_compression != "none" or layout.hsdp is not None or layout.collective_algorithm != "auto"
    if layout.zero < 2 or layout.replicas("dp") == 1 or elsewhere or other_bytes:
        return []
    group = groups_of_first_rank(workload)["dp"]
    passes = workload.microbatches // layout.pipeline_schedule.copies
    reductions = 1 if workload.adds_whole_gradients else passes
    weights = by_axis(trained(stages.weights(0))).get("dp", ())
    gradients = RepeatedCollective(
        "reduce_scatter", group, float(reductions * elements(weights) * DTYPE_BYTES[workload.training.grad_dtype])
    )
    if layout.zero == 2:
        return [gradients]
    parts = [part for stage in stages.stages_of[0] for part in stages.parts(stage) if part.is_unit]
    layers = by_axis(models.weights_of(parts)).get("dp", ())
    if workload.stage_runtime.keeps_units:  # a unit may be whole from one micro-batch to the next
        passes = 1
    elif layout.reshard_after_forward:
        passes *= 2
    return [gradients, RepeatedCollective("all_gather", group, passes * gathered_weight_bytes(layers))]


class StageSeconds(NamedTuple):
    """Least seconds of the passes of a micro-batch through a stage.

    ``gradient``: of what the stage before waits for, a whole backward pass or an input gradient. ``backward``: of all
    backward work. ``first_gradient``, ``first_backward``: the least of any micro-batch, as that which makes the first
    gradients has none to add to.
    """

    forward: float
    gradient: float
    backward: float
    first_gradient: float
    first_backward: float


class _Seconds:
    """Least seconds of the stages of a layout, each distinct one worked out once."""

    def __init__(self, stages: StageParts, groups: AxisGroups, prices: LeastPrices) -> None:
        workload = stages.workload
        self._workload, self._stages, self._prices, self._first_groups = workload, stages, prices, groups
        self._groups = {
            axis: group for axis, group in groups.items() if first_group_is_fastest(workload, group, prices.cluster)
        }
        self._of_stage: dict[tuple[StageKey, bool], StageSeconds] = {}

    def stage(self, stage: int, *, first_rank: bool = False) -> StageSeconds:
        """Return the seconds of a stage: where it is on the ``first_rank``, with all collectives of rank 0.

        Elsewhere those count whose groups have no better network than that of rank 0.
        """
        key = self._stages.key(stage), first_rank
        if key not in self._of_stage:
            self._of_stage[key] = self._stage(stage, self._first_groups if first_rank else self._groups)
        return self._of_stage[key]

    def _stage(self, stage: int, groups: AxisGroups) -> StageSeconds:
        replication = self._workload.replication
        usual = first = self._stages.parts(stage)
        if replication.adds_first_gradients != replication.adds_later_gradients:
            first = self._stages.parts(stage, Turn(first=True))

        def passed(parts: Sequence[Part], kind: str) -> float:
            counts = Counter(map(id, parts))  # equal layers are one object
            once = {id(part): part for part in parts}
            return sum(
                n * self._prices.ops_s(once[one], kind, once[one].ops(kind), groups) for one, n in counts.items()
            )

        forward, whole, first_whole = passed(usual, "F"), passed(usual, "B"), passed(first, "B")
        if not self._workload.parallelism.pipeline_schedule.splits:
            least = min(whole, first_whole)
            return StageSeconds(forward, whole, whole, least, least)
        inputs, first_inputs = passed(usual, "I"), passed(first, "I")
        backward = min(whole, inputs + passed(usual, "W"))
        first_backward = min(backward, first_whole, first_inputs + passed(first, "W"))
        gradient = min(whole, inputs)
        return StageSeconds(forward, gradient, backward, min(gradient, first_whole, first_inputs), first_backward)


def first_group_is_fastest(workload: Workload, group: Sequence[int], cluster: Cluster) -> bool:
    """Return whether it is sure that no group of an axis has a faster network than its first one, ``group``.

    That is so where every group lies in one node. It is also so where every group fills nodes next to each other, if
    those of the first one hang on the same leaf switches. Nodes elsewhere are then no nearer to each other. Return
    False where nodes differ, or ranks are not in ascending order.
    """
    spec, per_node = workload.cluster, workload.cluster.gpus_per_node
    if not is_uniform(spec) or list(group) != sorted(group):
        return False
    reach = group[-1] + (group[1] - group[0] if len(group) > 1 else 1)
    if per_node % reach == 0:
        return True
    n_nodes, left = divmod(len(group), per_node)
    switches = set(cluster.switches.leaves[:n_nodes])
    return reach == len(group) and not left and workload.nodes is None and len(switches) == 1
