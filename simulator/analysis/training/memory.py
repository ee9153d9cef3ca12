"""Memory of a step: what each rank holds over time, when most, what is in it then, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from simulator.analysis.time.memory_curve import Curve, memory_curve
from simulator.analysis.time.pipeline_ranks import pipeline_ranks
from simulator.analysis.training.activation_lifetimes import among, turns
from simulator.analysis.training.in_flight import peak_activations
from simulator.analysis.training.reserved_memory import cached_bytes
from simulator.analysis.training.static_memory import CUDA_CONTEXT_BYTES, NCCL_COMMUNICATOR_BYTES, Holdings
from simulator.models import Tensor
from simulator.timeline import Floats, Timeline
from simulator.units import format_gib


@dataclass(frozen=True)
class RankMemory:
    """One rank at its fullest, bytes.

    ``held``: activations that its steps have taken by then, by kind of tensor; ``made``: gradients that they have made;
    ``gathered``: what else they have taken, such as parameters of other ranks. ``workspace``: what the pass under way
    then needs for itself, or the optimizer where it is ``updating``. ``capacity``: what its GPU has. ``cached``: what
    the allocator has reserved at most beyond what it has given out at most. ``in_flight``: (micro-batch, stage)
    activations held at most.
    """

    rank: int
    stage: int
    holdings: Holdings
    held: Mapping[str, float]
    made: float
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
        """Held from forward to backward."""
        return sum(self.held.values())

    @property
    def allocated(self) -> float:
        """What ``torch.cuda.max_memory_allocated`` would say."""
        return self.holdings.allocated + self.activations + self.made + self.gathered + self.workspace

    @property
    def gradients(self) -> float:
        """Gradients that are there."""
        return self.holdings.gradients + self.made

    @property
    def reserved(self) -> float:
        """What ``torch.cuda.max_memory_reserved`` would say."""
        return self.allocated + self.cached

    @property
    def total(self) -> float:
        """All that is taken on the device, as ``nvidia-smi`` shows it."""
        return self.reserved + self.holdings.overhead

    @property
    def second_step(self) -> float:
        """All that the second step may take on the device, nothing cached: torch's DDP makes its buckets anew in it and
        may hold those of the first step meanwhile."""
        return self.allocated + self.holdings.first_bucket + self.holdings.overhead

    @property
    def buffers(self) -> float:
        """What is neither the model's state nor activations."""
        state = self.holdings.state
        return self.total - state.weights - self.gradients - state.optimizer - self.activations - self.workspace

    @property
    def contents(self) -> dict[str, float]:
        """What `total` consists of, largest first."""
        state = self.holdings.state
        parts = {
            "weights": state.weights,
            "gradients": self.gradients,
            "optimizer": state.optimizer,
            **{f"activations: {kind}": nbytes for kind, nbytes in self.held.items()},
            "optimizer workspace" if self.updating else "workspace": self.workspace,
            "gathered": self.gathered,
            "gradient placeholders": self.holdings.placeholders,
            "gradient bucket": self.holdings.bucket,
            "receive buffers": self.holdings.receives,
            "BLAS workspaces": self.holdings.workspaces,
            "allocator cache": self.cached,
            "CUDA context": CUDA_CONTEXT_BYTES,
            "NCCL": self.holdings.communicators * NCCL_COMMUNICATOR_BYTES,
        }
        return {name: parts[name] for name in sorted(parts, key=lambda name: -parts[name]) if parts[name] > 0}


def memory_of_ranks(
    timeline: Timeline, holdings: Mapping[int, Holdings], capacities: Mapping[int, float] = MappingProxyType({})
) -> tuple[RankMemory, ...]:
    """Every simulated rank at its fullest. ``holdings``: by simulated rank, as ``capacities``, the bytes that its GPU
    has [no end of them]; near them the allocator gives back what it has cached."""
    memories = []
    in_flight, places = peak_activations(timeline), pipeline_ranks(timeline)
    for rank in timeline.ranks:
        holding, curve = holdings[rank], memory_curve(timeline, rank)
        capacity = capacities.get(rank, math.inf)
        taken = curve.held + curve.workspace
        at = int(np.argmax(taken)) if len(taken) else -1
        if at < 0 or taken[at] <= 0:
            at = -1
        held = _activations(timeline, curve, at, holding)
        total = float(curve.held[at]) if at >= 0 else 0.0
        gathered = max(total - sum(held.values()), 0.0)
        made = min(gathered, holding.made)
        gathered -= made
        if holding.layers_away:
            held, gathered = {**held, "layers": gathered}, 0.0
        if not holding.parts:
            held, gathered = ({"all": total} if total else {}), 0.0
        memories.append(
            RankMemory(
                rank=rank,
                stage=places[rank],
                holdings=holding,
                held=held,
                made=made,
                gathered=gathered if gathered > 1e-9 * total else 0.0,
                workspace=float(curve.workspace[at]) if at >= 0 else 0.0,
                capacity=capacity,
                cached=cached_bytes(
                    timeline, curve.span, curve.begins, holding, in_flight[rank], capacity - holding.overhead
                ),
                peak_at_s=float(curve.times[at]) if at >= 0 else 0.0,
                during=_running(timeline, curve, at),
                in_flight=in_flight[rank],
                updating=_updating(timeline, curve, at),
            )
        )
    return tuple(memories)


#: First word of a tensor's name -> what it is called in a breakdown.
_KINDS = {"input": "layer inputs", "attn": "attention", "loss": "logits", "output gradient": "output gradients"}


def _kind(tensor: Tensor) -> str:
    word = tensor.name.split(".")[0].rstrip(" 0123456789")
    return _KINDS.get(word, word)


def _by_kind(tensors: Iterable[Tensor]) -> dict[str, float]:
    nbytes: dict[str, float] = {}
    for tensor in tensors:
        nbytes[_kind(tensor)] = nbytes.get(_kind(tensor), 0.0) + tensor.nbytes
    return nbytes


def _negative(nbytes: Mapping[str, float]) -> dict[str, float]:
    return {kind: -size for kind, size in nbytes.items()}


def activation_changes(timeline: Timeline, curve: Curve, holdings: Holdings) -> Iterator[tuple[int, dict[str, float]]]:
    """Events of a curve that change the activations held, in order: index, and bytes by kind of tensor."""
    turning: dict[tuple[int, int], float] = {}  # taken by input gradients that still run
    turn_of = turns(timeline, curve.span, holdings)

    @cache
    def saved(stage: int, of: tuple[int, ...]) -> dict[str, float]:
        return _by_kind(tensor for index in of for tensor in holdings.parts[stage][index].saved)

    @cache
    def held(stage: int, of: tuple[int, ...]) -> dict[str, float]:
        return _by_kind(tensor for index in of for tensor in holdings.parts[stage][index].held_for_weights)

    made = (timeline.phase[curve.span] == "I") & (timeline.alloc_bytes[curve.span] != 0)
    for event in np.flatnonzero(made | among(turn_of, curve.span, curve.begins)).tolist():
        index, begins = int(curve.span[event]), int(curve.begins[event])
        stage, phase = int(timeline.stage[index]), str(timeline.phase[index])
        key = stage, int(timeline.microbatch[index])
        if phase == "I" and stage in holdings.parts and begins:
            taken = float(timeline.alloc_bytes[index])
            turning[key] = turning.get(key, 0.0) + taken
            yield event, {"output gradients": taken}
        turn, of = turn_of.get((index, begins), (None, ()))
        if turn == "takes":
            yield event, saved(stage, of)
        elif turn == "turns":
            yield event, _negative(saved(stage, of))
            yield event, held(stage, of)
            yield event, {"output gradients": -turning.pop(key, 0.0)}
            yield event, {"input gradients": sum(holdings.parts[stage][index].input_gradient_bytes for index in of)}
        elif turn == "gives":
            yield event, _negative((held if phase == "W" else saved)(stage, of))


def _activations(timeline: Timeline, curve: Curve, at: int, holdings: Holdings) -> dict[str, float]:
    """Bytes of activations that are alive after the first ``at`` + 1 events of a curve, by kind of tensor."""
    held: dict[str, float] = {"output gradients": 0.0}
    for event, change in activation_changes(timeline, curve, holdings):
        if event > at:
            break
        for kind, nbytes in change.items():
            held[kind] = held.get(kind, 0.0) + nbytes
    return {kind: nbytes for kind, nbytes in held.items() if nbytes > 0.5}


def held_activations(timeline: Timeline, curve: Curve, holdings: Holdings) -> Floats:
    """Of the ``held`` bytes of a curve, after each event, those that are activations; the rest are parameters and
    gradients that are whole for a while."""
    if holdings.layers_away or not holdings.parts:
        return curve.held
    changes = np.zeros(len(curve.times))
    for event, change in activation_changes(timeline, curve, holdings):
        changes[event] += sum(change.values())
    return np.minimum(np.cumsum(changes), curve.held)


_MOVES = {
    **dict.fromkeys(("dp_gather", "h2d_params", "nvme_read_params"), "the gathering of parameters"),
    **dict.fromkeys(("dp", "dp_replica", "d2h_grads", "push"), "the reduction of gradients"),
}
_PASSES = {"F": "the forward pass", "B": "the backward pass", "I": "the input gradient", "W": "the weight gradient"}


def _running(timeline: Timeline, curve: Curve, at: int) -> str:
    """In words, what starts at event ``at`` of a curve."""
    if at < 0:
        return ""
    index = int(curve.span[at])
    phase = str(timeline.phase[index])
    if phase not in _PASSES:
        return (
            "the optimizer"
            if phase == "O"
            else _MOVES.get(timeline.lane_names[timeline.lane[index]], "a transfer beside the passes")
        )
    return f"{_PASSES[phase]} of micro-batch {timeline.microbatch[index]}, stage {timeline.stage[index]}"


def _updating(timeline: Timeline, curve: Curve, at: int) -> bool:
    """Whether an optimizer's step is under way after event ``at`` of a curve."""
    of_updates = timeline.phase[curve.span[: at + 1]] == "O"
    return bool((2 * curve.begins[: at + 1] - 1)[of_updates].sum() > 0)


def worst_per_stage(memories: Sequence[RankMemory]) -> tuple[RankMemory, ...]:
    """The fullest rank of each pipeline rank, in order."""
    worst: dict[int, RankMemory] = {}
    for memory in memories:
        worst[memory.stage] = fullest([worst.get(memory.stage, memory), memory])
    return tuple(worst[stage] for stage in sorted(worst))


def fullest(memories: Sequence[RankMemory]) -> RankMemory:
    """The rank with the least room left, and of those the one that holds most."""
    return max(memories, key=lambda memory: (memory.total - memory.capacity, memory.total))


def _second_steps(memories: Iterable[RankMemory]) -> list[float]:
    """What second steps may take, of ranks of which it is more than what others do."""
    return [memory.second_step for memory in memories if memory.holdings.first_bucket]


def second_step_warning(memories: Sequence[RankMemory]) -> list[str]:
    """Where steps fit, but for the second one."""
    over = [memory for memory in memories if memory.second_step > memory.capacity >= memory.total]
    if not over:
        return []
    worst = max(over, key=lambda memory: memory.second_step - memory.capacity)
    return [
        f"the second step may not fit: PyTorch's DDP makes its buckets anew in it and may hold those of the first step "
        f"meanwhile, {format_gib(worst.holdings.first_bucket)} more, {format_gib(worst.second_step)} "
        f"of {format_gib(worst.capacity)}"
    ]


def memory_report(memories: Sequence[RankMemory]) -> dict[str, Any]:
    """The contract's ``memory``: bytes, and the fullest rank of each stage. ``contents`` adds up to ``peak``, that of
    all steps but the first ones; ``second_step_bytes``: what torch's DDP may take in the second. What a pass needs for
    itself counts among activations, what the optimizer needs among buffers.
    ``capacity_bytes``: of the GPU with the least room left."""
    return {
        "capacity_bytes": float(fullest(memories).capacity),
        "fits": all(memory.total <= memory.capacity for memory in memories),
        "peak_bytes": max(memory.total for memory in memories),
        "peak_reserved_bytes": max(memory.reserved for memory in memories),
        "peak_allocated_bytes": max(memory.allocated for memory in memories),
        **({"second_step_bytes": max(second)} if (second := _second_steps(memories)) else {}),
        "per_stage": [
            {
                "stage": memory.stage,
                "weights": memory.holdings.state.weights,
                "gradients": memory.gradients,
                "optimizer": memory.holdings.state.optimizer,
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
