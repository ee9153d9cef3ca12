"""The parts of a model stage, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from simulator.config import Workload
from simulator.models.encoder import encoder_parts
from simulator.models.layer import layer, layer_kind
from simulator.models.multi_token_prediction import predictor
from simulator.models.parts import Part, output_gradients
from simulator.models.shapes import passed_bytes, shapes
from simulator.models.vocabulary import embedding, head
from simulator.operations.nodes import Tensor, memory, unique
from simulator.operations.shapes import ANY_SEAT, ANY_TURN, Seat, Shapes, Turn
from simulator.operations.weights import Weight, elements_by_axis
from simulator.units import DTYPE_BYTES

#: Layers, embeddings and heads by what tells them apart, for stages that are cut in other places.
PartPool = dict[object, Part]
#: What tells stages of one layout apart.
StageKey = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _WorkloadParts:
    """Parts of one workload that were made before, and the stages that they make up."""

    workload: Workload
    pool: PartPool = field(default_factory=dict)
    stages: dict[tuple[StageKey, Seat, Turn], tuple[Part, ...]] = field(default_factory=dict)

    @cached_property
    def keys(self) -> tuple[StageKey, ...]:
        """Keys by which stages differ."""
        model = self.workload.model
        return stage_keys(self.workload, tuple(map(model.alike, range(model.layers))))


#: Of the last few workloads, as programs, memory and FLOPs of one ask for the same stages.
_recent: deque[_WorkloadParts] = deque(maxlen=2)


def stage_keys(workload: Workload, layer_kinds: Sequence[object]) -> tuple[StageKey, ...]:
    """Return keys by which stages of the model differ: their layers, and what stands at the model's ends.

    ``layer_kinds``: what tells each layer of the model apart. Where only some weights are trained every stage counts as
    another.
    """
    layout, rank_of = workload.parallelism, workload.parallelism.pipeline_schedule.rank_of
    if workload.training.frozen:
        return tuple((stage,) for stage in range(layout.n_stages))
    keys: list[StageKey] = []
    first = 0
    for stage, count in enumerate(layout.layers_per_stage):
        kinds = tuple(layer_kinds[first : first + count])
        apart = stage > 0 and rank_of(stage, layout.pp) != rank_of(stage - 1, layout.pp)
        keys.append((kinds, stage == 0, stage == layout.n_stages - 1, apart))
        first += count
    return tuple(keys)


def stage_parts(
    workload: Workload, stage: int, seat: Seat = ANY_SEAT, turn: Turn = ANY_TURN, pool: PartPool | None = None
) -> tuple[Part, ...]:
    """Return the parts of model stage ``stage`` (0 .. pp * vpp - 1) in order.

    They are those for a rank at ``seat`` and a micro-batch whose ``turn`` it is. The embedding opens the first stage,
    the head closes the last; a stage that keeps its output has it with its last part. Where ``recompute.layers`` is
    given, the first so many layers of a stage are recomputed (Megatron's block method).

    ``pool``: parts made before, for this workload or for one that differs in the number of chunks of a rank alone.
    Without one, the stages of the last few workloads are kept, and equal stages have the very same parts.
    """
    if pool is not None:
        return _stage_parts(workload, stage, seat, turn, pool)
    kept = next((one for one in _recent if one.workload is workload), None)
    if kept is None:
        kept = _WorkloadParts(workload)
        _recent.append(kept)
    key = kept.keys[stage], seat, turn
    if key not in kept.stages:
        kept.stages[key] = _stage_parts(workload, stage, seat, turn, kept.pool)
    return kept.stages[key]


def _stage_parts(workload: Workload, stage: int, seat: Seat, turn: Turn, pool: PartPool) -> tuple[Part, ...]:
    """Return the parts of a stage, of those in ``pool`` where it has them."""
    counts = workload.parallelism.layers_per_stage
    recompute = workload.training.recompute
    n_layers = counts[stage]
    n_recomputed = n_layers if recompute.layers is None else min(recompute.layers, n_layers)
    first = sum(counts[:stage])

    def pooled(key: object, make: Callable[[], Part]) -> Part:
        key = key, seat, turn
        if key not in pool:
            pool[key] = make()
        return pool[key]

    def part_at(place: int) -> Part:
        number, granularity = first + place, None if place < n_recomputed else "none"
        key = granularity, layer_kind(workload, number)
        return pooled(key, lambda: layer(workload, recompute=granularity, seat=seat, turn=turn, number=number))

    parts = tuple(map(part_at, range(n_layers)))
    if stage == 0:
        parts = (pooled("embedding", lambda: embedding(workload, turn)), *parts)
        if workload.model.encoder:
            parts = (*encoder_parts(workload, workload.model.encoder, turn), *parts)
    if stage == len(counts) - 1:
        parts = (*parts, pooled("head", lambda: head(workload, turn)))
        for number in range(workload.model.mtp_layers):
            parts += predictor(workload, number, seat, turn)
    elif not workload.parallelism.deallocate_pipeline_outputs:
        parts = (*parts[:-1], _with_kept_output(parts[-1], shapes(workload, seat).stream_bytes))
    parts = _with_stage_buffers(workload, stage, parts, seat)
    leaves_gradients = turn.last if workload.adds_whole_gradients else turn.first
    if leaves_gradients:
        left = {id(part): _with_left_gradients(workload, part) for part in parts}  # equal layers stay one object
        parts = tuple(left[id(part)] for part in parts)
    return parts


def _with_stage_buffers(workload: Workload, stage: int, parts: tuple[Part, ...], seat: Seat) -> tuple[Part, ...]:
    """Return ``parts`` with the tensors that the runtime of stages keeps for them.

    The input of a stage lies in a buffer that stays. The last stage keeps its output too, the logits
    (torch/distributed/pipelining/stage.py, ``fwd_cache``).
    """
    layout, sizes, runtime = workload.parallelism, shapes(workload, seat), workload.stage_runtime
    if runtime.buffers_each_microbatch and stage > 0:
        saved, for_weights = (
            tuple(tensor for tensor in tensors if tensor.name != "input")
            for tensors in (parts[0].saved, parts[0].held_for_weights)
        )
        parts = (replace(parts[0], saved=saved, held_for_weights=for_weights), *parts[1:])
    logits = Tensor("stage output", float(sizes.element * sizes.tokens * sizes.vocab))
    if runtime.keeps_last_outputs and stage == layout.n_stages - 1:
        parts = (*parts[:-1], replace(parts[-1], saved=(*parts[-1].saved, logits)))
    if runtime.keeps_graphs and layout.pipeline_schedule.splits and stage > 0:
        parts = _with_torch_graphs(workload, stage, parts, sizes)
    return parts


def _with_torch_graphs(workload: Workload, stage: int, parts: tuple[Part, ...], shapes: Shapes) -> tuple[Part, ...]:
    """Return ``parts`` with the tensors that torch's split backward pass leaves between its halves.

    Its input gradient runs through a graph that is retained, and the weight gradient begins at the nodes that have
    weights. Each of these nodes holds all nodes towards the input, and so the tensors that those have saved
    (torch/distributed/pipelining/_backward.py, ``stage_backward_input``). Logits and loss, which lie behind the last
    such node, are let go at the end.

    The gradient of the input stays in its ``.grad`` until the next step (``clear_runtime_states``). Where the stage
    before is on the same rank, that is its buffer to receive it in. So is the gradient of the output the stage's own
    buffer, which is not held twice.

    The weight gradient begins with Python's ``sum`` of the gradients that reach each node with weights. The sum is that
    of 0 and the gradient of the node's output: one more kernel that reads and writes it (``stage_backward_weight`` of
    torch 2.11).
    """
    layout, last = workload.parallelism, parts[-1]
    ends = stage == layout.n_stages - 1
    released = {one.name for one in last.trailing} | ({"stage output"} if ends else set())
    if not (ends or last.trailing):
        released |= {output_gradients(last)[-1].name}

    def with_graph(part: Part, released: Iterable[str] = ()) -> Part:
        in_graph = unique((*part.saved, *part.held_for_weights))
        kept = tuple(one for one in in_graph if one.name not in released)
        summed = tuple(
            memory("W", f"{part.name} {one.name} sum", "copy", one.nbytes, one.nbytes, shapes.dtype)
            for one in output_gradients(part)
        )
        return replace(part, held_for_weights=kept, graph_stays=True, weight_grad=(*summed, *part.weight_grad))

    graphs = {id(part): with_graph(part) for part in parts[:-1]}  # equal layers stay one object
    first, *rest = (*(graphs[id(part)] for part in parts[:-1]), with_graph(last, released))
    rank_of = layout.pipeline_schedule.rank_of
    apart = rank_of(stage, layout.pp) != rank_of(stage - 1, layout.pp)
    return (replace(first, input_gradient_bytes=passed_bytes(workload) if apart else 0.0), *rest)


def _with_kept_output(part: Part, output: float) -> Part:
    """Return the last part of a stage that keeps its output, of so many bytes."""
    return replace(part, saved=(*part.saved, Tensor("stage output", output)))


def _with_left_gradients(workload: Workload, part: Part) -> Part:
    """Return ``part`` in a pass that makes the first gradients that stay until the optimizer's step."""
    left = made_gradient_bytes(workload, part.weights)
    return replace(part, left_gradient_bytes=left) if left else part


def made_gradient_bytes(workload: Workload, weights: Iterable[Weight]) -> float:
    """Return the bytes of gradients of ``weights`` that steps make and the optimizer's step gives back.

    Autograd hands them over: of weights that torch's FSDP shards the shards, and all gradients that DDP has no buckets
    for. Under ZeRO-2 they are the shards that stay.
    """
    layout, element = workload.parallelism, DTYPE_BYTES[workload.kept_gradient_dtype]
    counts = elements_by_axis(weights).items()
    replication = workload.replication
    if not replication.hands_over_gradients:
        return 0.0
    if layout.zero == 2 or replication.fully_sharded:
        return sum(element * count / layout.shards(axis) for axis, count in counts)
    bucketed = replication.in_ddp
    return float(sum(element * n for axis, n in counts if not (bucketed and layout.replicas(axis) > 1)))
