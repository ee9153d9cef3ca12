"""What would make a job fit into memory: other settings, and about what each would need."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from simulator import model
from simulator.analysis.memory import RankMemory, communicators, overhead_bytes
from simulator.build.layout import layout
from simulator.config import Workload, altered
from simulator.config.files import brief
from simulator.errors import InputError
from simulator.schedules import SCHEDULES, Slot
from simulator.units import format_gib

#: Dotted keys and their values, as a user would set them.
Setting = dict[str, Any]


def needed_bytes(workload: Workload) -> float:
    """Device memory of the job's fullest rank, without simulating it: the state, what the passes of the schedule's
    order hold at most, and the overhead. Exact where nothing holds activations but these passes."""
    parallelism, placed = workload.parallelism, layout(workload)
    members = communicators(placed.groups)
    most = [0] * parallelism.pp
    for rank, stage in enumerate(placed.pipeline_rank):
        most[stage] = max(most[stage], members[rank])
    # Steps that run on as one hold most once all ranks have micro-batches of their own.
    steps = 1 if parallelism.plan.drains else 1 + math.ceil(parallelism.pp / workload.microbatches)
    order = parallelism.plan.over(parallelism.pp, workload.microbatches, parallelism.vpp, steps)
    return max(
        model.state_bytes(workload, rank).total + _held_bytes(workload, slots) + overhead_bytes(most[rank])
        for rank, slots in enumerate(order)
    )


def _held_bytes(workload: Workload, slots: Sequence[Slot]) -> float:
    """The most that a pipeline rank's passes hold (see `model.pass_bytes`)."""
    n_stages = workload.parallelism.n_stages
    stages = {action.stage for slot in slots for action in slot}
    parts = {stage: model.stage_parts(workload, stage % n_stages) for stage in stages}
    held = most = 0.0
    for slot in slots:
        for action in slot:
            moved = model.pass_bytes(parts[action.stage], action.kind)
            held += moved.alloc
            most = max(most, held + moved.workspace)
            held -= moved.free
    return most


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
    if wider > workload.cluster.node.gpus.count:
        return {}
    return {"parallelism.tp": wider} | _place_for_twice_the_model_parallel(workload)


def _pipeline(workload: Workload) -> Setting:
    return {"parallelism.pp": 2 * workload.parallelism.pp} | _place_for_twice_the_model_parallel(workload)


def _place_for_twice_the_model_parallel(workload: Workload) -> Setting:
    """Half the replicas on the same GPUs, or else twice the GPUs."""
    dp, cluster = workload.parallelism.dp, workload.cluster
    if dp % 2 == 0:
        return {"parallelism.dp": dp // 2}
    nodes = math.ceil(2 * workload.n_ranks / cluster.node.gpus.count)
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
    _tensor_parallel,
    _pipeline,
)


def changed(workload: Workload, candidate: Callable[[Workload], Setting]) -> tuple[Setting, Workload, float] | None:
    """What a candidate sets, the job then, and the bytes that it needs; None where that is not legal or no less."""
    setting = candidate(workload)
    try:
        other = altered(workload, setting)
    except InputError:
        return None
    needed = needed_bytes(other)
    return (setting, other, needed) if needed < needed_bytes(workload) else None


def advice(memories: Sequence[RankMemory], capacity_bytes: float, workload: Workload) -> list[str]:
    """Plain words on what would make the fullest rank fit: which stage lacks how much, and what each of `CANDIDATES`
    gives; where none suffices alone, the first of them that do together. Empty where everything fits."""
    worst = max(memories, key=lambda memory: memory.total)
    excess = worst.total - capacity_bytes
    if excess <= 0:
        return []
    lines = [
        f"stage {worst.stage} needs {format_gib(worst.total)}, {format_gib(excess)} more than the "
        f"{format_gib(capacity_bytes)} of its GPU"
    ]
    alone = [found for candidate in CANDIDATES if (found := changed(workload, candidate)) is not None]
    for setting, _, needed in alone:
        verdict = "enough" if needed <= capacity_bytes else "not enough alone"
        lines.append(f"{_words(setting)} would free about {format_gib(max(worst.total - needed, 0.0))}: {verdict}")
    if alone and all(needed > capacity_bytes for _, _, needed in alone):
        lines.append(_together(workload, capacity_bytes))
    return lines


def _together(workload: Workload, capacity_bytes: float) -> str:
    """The first candidates, one laid over the other, with which the job fits; or what it needs with all of them."""
    chosen: Setting = {}
    needed = needed_bytes(workload)
    for candidate in CANDIDATES:
        if (step := changed(workload, candidate)) is None:
            continue
        setting, workload, needed = step
        chosen |= setting
        if needed <= capacity_bytes:
            return f"together: {_words(chosen)}"
    return f"all of these together are not enough: about {format_gib(needed)} would be needed"


def _words(setting: Setting) -> str:
    return ", ".join(f"{key}: {value if isinstance(value, str) else brief(value)}" for key, value in setting.items())
