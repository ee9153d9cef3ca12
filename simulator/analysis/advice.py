"""What would make a job fit into memory: other settings, and about what each would need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from simulator.analysis.memory import RankMemory, fullest
from simulator.analysis.reserved import enough
from simulator.config import Workload, altered
from simulator.config.files import brief
from simulator.errors import InputError
from simulator.schedules import SCHEDULES
from simulator.units import format_gib

#: Dotted keys and their values, as a user would set them.
Setting = dict[str, Any]

#: Pairs of changes that are tried, each a simulation of the changed job.
PAIRS = 8


def _flash(workload: Workload) -> Setting:
    return {"model.attention": "flash"}


def _sequence_parallel(workload: Workload) -> Setting:
    instead = {"parallelism.scatter_gather_p2p": False} if workload.parallelism.scatter_gather_p2p else {}
    return {"parallelism.sequence_parallel": True} | instead


def _zero(workload: Workload) -> Setting:
    return {"parallelism.zero": max(1, workload.parallelism.zero)}


def _schedule(workload: Workload) -> Setting:
    """The schedule that claims to hold least, of those that leave backward passes whole and weights as they would be,
    and claim no larger bubble."""
    layout = workload.parallelism
    shape = (layout.pp, workload.microbatches, layout.vpp)
    idle = layout.plan.bubble(*shape, 1, 1, 1)
    peaks: dict[str, int] = {}
    for name, schedule in SCHEDULES.items():
        if schedule.splits or not schedule.drains or schedule.check(*shape) is not None:
            continue
        claimed, held = schedule.bubble(*shape, 1, 1, 1), [schedule.peak(*shape, rank) for rank in range(layout.pp)]
        if claimed is not None and (idle is None or claimed <= idle):
            peaks[name] = max(peak for peak in held if peak is not None)
    return {"parallelism.schedule": min(peaks, key=peaks.__getitem__)} if peaks else {}


def _selective(workload: Workload) -> Setting:
    return {"training.recompute": "selective"}


def _micro_batch(workload: Workload) -> Setting:
    return {"training.micro_batch": max(1, workload.training.micro_batch // 2)}


def _full(workload: Workload) -> Setting:
    return {"training.recompute": "full"}


def _tensor_parallel(workload: Workload) -> Setting:
    """Within a node: beyond it, it would be far too slow."""
    wider = 2 * workload.parallelism.tp
    if wider > workload.cluster.gpus_per_node:
        return {}
    return {"parallelism.tp": wider} | _place_for_twice_the_model_parallel(workload)


def _pipeline(workload: Workload) -> Setting:
    return {"parallelism.pp": 2 * workload.parallelism.pp} | _place_for_twice_the_model_parallel(workload)


def _fully_sharded(workload: Workload) -> Setting:
    """Of jobs without a pipeline, which would gather and scatter for every micro-batch."""
    return {"parallelism.zero": 3} if workload.parallelism.pp == 1 else {}


def _context_parallel(workload: Workload) -> Setting:
    return {"parallelism.cp": 2 * workload.parallelism.cp} | _place_for_twice_the_model_parallel(workload)


def _offload_optimizer(workload: Workload) -> Setting:
    return {"parallelism.offload.optimizer": "cpu"}


def _place_for_twice_the_model_parallel(workload: Workload) -> Setting:
    """Half the replicas on the same GPUs, or else twice the GPUs."""
    dp, cluster = workload.parallelism.dp, workload.cluster
    if dp % 2 == 0:
        return {"parallelism.dp": dp // 2}
    nodes = cluster.nodes_for(2 * workload.n_ranks)
    return {"cluster.nodes": nodes} if nodes > cluster.nodes else {}


#: What could be set otherwise to need less memory, cheapest for speed first; not all of it is legal or helps.
CANDIDATES: tuple[Callable[[Workload], Setting], ...] = (
    _flash,
    _sequence_parallel,
    _zero,
    _schedule,
    _selective,
    _micro_batch,
    _full,
    _fully_sharded,
    _tensor_parallel,
    _pipeline,
    _context_parallel,
    _offload_optimizer,
)


@dataclass(frozen=True)
class Change:
    """A legal change of a job that lowers its memory: what is set, the job then, the bytes that it needs, and which of
    `CANDIDATES` it is."""

    setting: Setting
    workload: Workload
    needed: float
    candidate: Callable[[Workload], Setting]


def changes(workload: Workload, needed: float, needed_bytes: Callable[[Workload], float]) -> Iterator[Change]:
    """Each of `CANDIDATES` that is legal and lowers what a job needs from ``needed`` bytes."""
    for candidate in CANDIDATES:
        found = _changed(workload, candidate, needed, needed_bytes)
        if found is not None:
            yield found


def _changed(
    workload: Workload,
    candidate: Callable[[Workload], Setting],
    needed: float,
    needed_bytes: Callable[[Workload], float],
) -> Change | None:
    setting = candidate(workload)
    try:
        other = altered(workload, setting)
    except InputError:
        return None
    then = needed_bytes(few_rounds(other)) if other != workload else needed
    return Change(setting, other, then, candidate) if then < needed else None


def few_rounds(workload: Workload) -> Workload:
    """As ``workload`` with the fewest micro-batches of which it holds as much: as many in flight on every rank, by what
    its schedule claims, and enough for a replay of the allocator, in each copy of the model. Itself where that is not
    known, and where every micro-batch has memory of its own."""
    layout, training, most = workload.parallelism, workload.training, workload.microbatches

    def in_flight(microbatches: int) -> list[int | None]:
        return [layout.plan.peak(layout.pp, microbatches, layout.vpp, rank) for rank in range(layout.pp)]

    held = [peak for peak in in_flight(most) if peak is not None]
    if len(held) < layout.pp or workload.pipelined_by_torch:
        return workload
    copies = layout.plan.copies
    for fewer in range(copies * enough(max(held), copies * layout.vpp), most):
        if layout.plan.check(layout.pp, fewer, layout.vpp) is None and in_flight(fewer) == held:
            return altered(workload, {"training.global_batch": fewer * training.micro_batch * layout.dp})
    return workload


def advice(memories: Sequence[RankMemory], workload: Workload, needed_bytes: Callable[[Workload], float]) -> list[str]:
    """Plain words on what would make the fullest rank fit: which stage lacks how much and what it is full of, and what
    each of `CANDIDATES` gives; where none suffices alone, two that do together, or else more. Empty where everything
    fits. ``needed_bytes`` simulates a job and says what its fullest rank takes: every change is tried."""
    worst = fullest(memories)
    capacity_bytes = worst.capacity
    excess = worst.total - capacity_bytes
    if excess <= 0:
        return []
    lines = [
        f"stage {worst.stage} needs {format_gib(worst.total)}, {format_gib(excess)} more than the "
        f"{format_gib(capacity_bytes)} of its GPU"
    ]
    alone = list(changes(workload, worst.total, needed_bytes))
    for change in alone:
        verdict = "enough" if change.needed <= capacity_bytes else "not enough alone"
        lines.append(f"{_words(change.setting)} would free {format_gib(worst.total - change.needed)}: {verdict}")
    lines += _no_shards(workload)
    if alone and all(change.needed > capacity_bytes for change in alone):
        pair = _pair(alone, worst.total, capacity_bytes, needed_bytes)
        lines.append(
            f"together: {_words(pair)}" if pair else _together(workload, worst.total, capacity_bytes, needed_bytes)
        )
    return lines


def _pair(
    alone: Sequence[Change], needed: float, capacity_bytes: float, needed_bytes: Callable[[Workload], float]
) -> Setting:
    """The first two changes with which the job fits, of those that would if each freed as much as it does alone; empty
    where `PAIRS` of them do not."""
    excess = needed - capacity_bytes
    likely = [(a, b) for a, b in combinations(alone, 2) if 2 * needed - a.needed - b.needed >= excess]
    for first, second in likely[:PAIRS]:
        both = _changed(first.workload, second.candidate, first.needed, needed_bytes)
        if both is not None and both.needed <= capacity_bytes:
            return first.setting | both.setting
    return {}


def _no_shards(workload: Workload) -> list[str]:
    layout = workload.parallelism
    if layout.zero and layout.replicas("dp") == 1:
        return [f"parallelism.zero: {layout.zero} saves nothing: dp x cp is 1, so that nobody shares a shard"]
    return []


def _together(
    workload: Workload, needed: float, capacity_bytes: float, needed_bytes: Callable[[Workload], float]
) -> str:
    """The first candidates, one laid over the other, with which the job fits; or what it needs with all of them."""
    chosen: Setting = {}
    for candidate in CANDIDATES:
        if (step := _changed(workload, candidate, needed, needed_bytes)) is None:
            continue
        workload, needed = step.workload, step.needed
        chosen |= step.setting
        if needed <= capacity_bytes:
            return f"together: {_words(chosen)}"
    return f"all of these together are not enough: {format_gib(needed)} would be needed"


def _words(setting: Setting) -> str:
    return ", ".join(f"{key}: {value if isinstance(value, str) else brief(value)}" for key, value in setting.items())
