"""Pipeline schedules, stages and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

from simulator.config.rules.numbers import around, divisors, listed, nearest_multiple, shown, split
from simulator.config.rules.scale import gpus_of_workers
from simulator.errors import InputError
from simulator.input_files import brief
from simulator.schedules import SCHEDULES
from simulator.units import counted

if TYPE_CHECKING:
    from simulator.config.parallelism import Parallelism
    from simulator.config.workload import Workload


#: Forward and backward passes of one pipeline in one step: more are refused before anything is built.
MAX_ACTIONS = 10_000_000


def even_split(layers: int, layout: Parallelism) -> tuple[int, ...]:
    """Layers per stage where the file gives none, embedding and loss counted as layers where it says so. Raises
    `InputError` that proposes a split where it is not even."""
    stages = layout.pp * layout.vpp
    counted = layers + layout.account_for_embedding + layout.account_for_loss
    if counted % stages == 0:
        return tuple(_without_ends([counted // stages] * stages, layout))
    if counted < stages:
        raise InputError(
            f"{layers} layers are too few for {stages} stages (pp {layout.pp} x vpp {layout.vpp})",
            key="parallelism.pp",
            found=layout.pp,
            allowed=f"pp * vpp at most {counted}",
        )
    even = [number for number in divisors(counted) if number % layout.pp == 0 or number % layout.vpp == 0]
    allowed = [f"{stages} numbers whose sum is {layers}", *([f"pp * vpp one of {listed(even)}"] if even else [])]
    what = f"{layers} layers" if counted == layers else f"{counted} layers, embedding and loss counted as asked,"
    raise InputError(
        f"{what} do not divide evenly over {stages} stages (pp {layout.pp} x vpp {layout.vpp})",
        key="parallelism.layers_per_stage",
        allowed=", or ".join(allowed),
        fix=_uneven_split(counted, layout),
    )


def _uneven_split(counted: int, layout: Parallelism) -> str:
    """Return the split nearest to the one asked for; keys that ask for an even one cannot stand beside it."""
    ends = [f"{key}: false" for key in ("account_for_embedding", "account_for_loss") if getattr(layout, key)]
    sizes = _without_ends(split(counted, layout.pp * layout.vpp), layout)
    return " and ".join([*ends, f"layers_per_stage: {shown(sizes)}"])


def _without_ends(counts: list[int], layout: Parallelism) -> list[int]:
    """Layers alone, of what counts embedding and loss too."""
    counts[0] -= layout.account_for_embedding
    counts[-1] -= layout.account_for_loss
    return counts


def problems(workload: Workload) -> Iterator[InputError]:
    """Schedules and chunks that do not go together, and orders of the axes that are none."""
    layout = workload.parallelism
    chunks = layout.pipeline_schedule.chunks
    chunked = ", ".join(name for name, schedule in SCHEDULES.items() if schedule.chunks is None)
    if chunks is not None and layout.vpp != chunks:
        yield InputError(
            f"the schedule {layout.schedule} has {'one chunk' if chunks == 1 else f'{chunks} chunks'} per rank",
            key="parallelism.vpp",
            found=layout.vpp,
            allowed=f"{chunks}, or schedule: {chunked}",
            fix=f"schedule: {chunked}" if chunks == 1 else f"vpp: {chunks}",
        )
    elif chunks != 1 and layout.pipeline_schedule.size is None and (layout.vpp == 1 or layout.pp == 1):
        key, size = ("vpp", layout.vpp) if layout.vpp == 1 else ("pp", layout.pp)
        yield InputError(
            f"the schedule {layout.schedule} needs several chunks per rank and several ranks",
            key=f"parallelism.{key}",
            found=size,
            allowed=">= 2, or schedule: 1f1b with vpp: 1",
            fix=f"{key}: 2",
        )
    if layout.pipeline_schedule.search is None and layout.zb_memory_limit != 1:
        searched = ", ".join(name for name, schedule in SCHEDULES.items() if schedule.search)
        yield InputError(
            f"has no meaning with the schedule {layout.schedule}",
            key="parallelism.zb_memory_limit",
            found=layout.zb_memory_limit,
            fix=f"schedule: {searched}",
        )
    if layout.zero == 3 and not layout.pipeline_schedule.drains:
        yield InputError(
            f"the schedule {layout.schedule} keeps whole earlier versions of the weights, which zero 3 does not hold",
            key="parallelism.zero",
            found=layout.zero,
            allowed="0, 1 or 2, or a schedule that drains, such as 1f1b",
            fix="zero: 1",
        )
    yield from _rank_order_problems(layout)


def _rank_order_problems(layout: Parallelism) -> Iterator[InputError]:
    axes = layout.rank_order.split("-")
    needed = {"tp", "dp", "pp"} | {axis for axis, size in (("cp", layout.cp), ("ep", layout.ep)) if size > 1}
    if len(set(axes)) != len(axes) or not needed <= set(axes) <= {"tp", "cp", "ep", "dp", "pp"}:
        yield InputError(
            "is no order of the axes",
            key="parallelism.rank_order",
            found=layout.rank_order,
            allowed="tp, dp and pp (and cp, ep where they are not 1) once each, joined by '-'",
            fix="rank_order: tp-cp-ep-dp-pp",
        )


def layout_problems(workload: Workload) -> Iterator[InputError]:
    """Stages against layers, and the batch against the schedule."""
    model, training, layout = workload.model, workload.training, workload.parallelism
    stages = layout.pp * layout.vpp
    if len(layout.layers_per_stage) != stages or sum(layout.layers_per_stage) != model.layers:
        proposal = f"layers_per_stage: {shown(split(model.layers, stages))}" if stages <= model.layers else None
        yield InputError(
            f"{len(layout.layers_per_stage)} stages with {sum(layout.layers_per_stage)} layers",
            key="parallelism.layers_per_stage",
            found=list(layout.layers_per_stage[:64]),
            allowed=f"{stages} numbers (pp {layout.pp} x vpp {layout.vpp}) whose sum is {model.layers}",
            fix=proposal,
        )
    elif 0 in layout.layers_per_stage[1:-1]:
        yield InputError(
            f"stage {layout.layers_per_stage.index(0, 1)} has nothing to do",
            key="parallelism.layers_per_stage",
            found=list(layout.layers_per_stage[:64]),
            allowed="0 for the first stage, which has the embedding, and for the last, which has the loss",
        )
    elif training.recompute.layers is not None and training.recompute.layers > max(layout.layers_per_stage):
        yield InputError(
            "no stage has so many layers",
            key="training.recompute.layers",
            found=training.recompute.layers,
            allowed=f"at most {max(layout.layers_per_stage)}",
        )
    counted = [key for key in ("account_for_embedding", "account_for_loss") if getattr(layout, key)]
    if counted and not _is_even(model.layers, layout):
        yield InputError(
            "splits the layers evenly with embedding or loss counted as one; layers_per_stage splits them otherwise",
            key=f"parallelism.{counted[0]}",
            found=brief(True),
            allowed="one of the two, not both",
            fix=f"leave {' and '.join(counted)} out, or layers_per_stage",
        )
    yield from _batch_problems(workload)


def _is_even(layers: int, layout: Parallelism) -> bool:
    """Return whether the layers are split as they would be without ``layers_per_stage``."""
    try:
        return layout.layers_per_stage == even_split(layers, layout)
    except InputError:
        return False


def _batch_problems(workload: Workload) -> Iterator[InputError]:
    training, layout = workload.training, workload.parallelism
    batch, once = training.global_batch, training.micro_batch * layout.dp
    if batch % once:
        other = f", or micro_batch: {gcd(batch // layout.dp, training.micro_batch)}" if batch % layout.dp == 0 else ""
        dp, idle = divmod(gpus_of_workers(layout, workload.cluster, workload.nodes), layout.model_parallel)
        if dp and not other and not idle and batch % (training.micro_batch * dp) == 0:  # every GPU has a rank
            other = f", or dp: {dp}"
        yield InputError(
            f"does not divide by micro_batch {training.micro_batch} x dp {layout.dp} = {once}",
            key="training.global_batch",
            found=batch,
            allowed=f"a multiple of {once}",
            fix=f"global_batch: {nearest_multiple(batch, once)}{other}",
        )
        return
    microbatches = workload.microbatches
    if microbatches * layout.pp * layout.vpp > MAX_ACTIONS:
        yield InputError(
            f"makes {counted(microbatches, 'micro-batch', 'es')} over {layout.pp * layout.vpp} stages",
            key="training.global_batch",
            found=batch,
            allowed=f"micro-batches * pp * vpp at most {MAX_ACTIONS:,}",
            fix="a larger micro_batch",
        )
    schedule = layout.pipeline_schedule
    if schedule.search and layout.zb_memory_limit * min(microbatches, layout.pp) < 1:
        yield InputError(
            "leaves no room for a micro-batch",
            key="parallelism.zb_memory_limit",
            found=layout.zb_memory_limit,
            allowed=f"at least {1 / min(microbatches, layout.pp):.3g}",
        )
    reason = schedule.check(layout.pp, microbatches, layout.vpp)
    if reason is not None:
        works = [m for m in around(microbatches) if schedule.check(layout.pp, m, layout.vpp) is None]
        if not works:
            yield InputError(reason, key="parallelism.schedule", found=layout.schedule, fix="schedule: 1f1b")
            return
        yield InputError(
            f"makes {counted(microbatches, 'micro-batch', 'es')}; {layout.schedule} {reason}",
            key="training.global_batch",
            found=batch,
            allowed=", ".join(str(m * once) for m in sorted(works[:2])),
            fix=f"global_batch: {works[0] * once}, or schedule: 1f1b with vpp: 1",
        )


def warnings(workload: Workload) -> Iterator[str]:
    """A split backward pass beside recomputation."""
    layout = workload.parallelism
    if layout.pipeline_schedule.splits and workload.training.recompute.granularity != "none":
        yield (
            f"{layout.schedule} splits the backward pass: recomputation runs before the input gradient, and what the "
            "weight gradient needs of it is held until that has run"
        )
