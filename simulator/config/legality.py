"""What a workload may not say: every check that looks at more than one key, and what it proposes instead."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from simulator.config.cluster import MAX_GPUS, ClusterSpec, cluster_problems
from simulator.config.files import brief
from simulator.errors import InputError
from simulator.schedules import SCHEDULES

if TYPE_CHECKING:
    from simulator.config.workload import Parallelism, Workload

#: Forward and backward passes of one pipeline in one step: more are refused before anything is built.
MAX_ACTIONS = 10_000_000
#: Numbers in the largest tensor of a micro-batch, before it is split.
MAX_TENSOR = 10**15


def divisors(number: int) -> list[int]:
    """Ascending.

    >>> divisors(28)
    [1, 2, 4, 7, 14, 28]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest(wanted: int, allowed: list[int]) -> int:
    """The allowed value closest to the wanted one by ratio, the larger of two equally close.

    >>> nearest(5, [1, 2, 4, 8]), nearest(3, [1, 2, 4])
    (4, 4)
    """
    return min(allowed, key=lambda value: (abs(math.log(value / wanted)), -value))


def split(layers: int, stages: int) -> list[int]:
    """``layers`` over ``stages`` as evenly as can be, the larger stages first (the last one also has the loss).

    >>> split(30, 4)
    [8, 8, 7, 7]
    """
    base, rest = divmod(layers, stages)
    return [base + 1] * rest + [base] * (stages - rest)


def even_split(layers: int, layout: Parallelism) -> tuple[int, ...]:
    """Layers per stage where the file gives none. Raises `InputError` that proposes a split where it is not even."""
    stages = layout.pp * layout.vpp
    if layers % stages == 0:
        return (layers // stages,) * stages
    allowed = [p for p in divisors(layers) if p % layout.vpp == 0]
    if layers < stages:
        raise InputError(
            f"{layers} layers are too few for {stages} stages (pp {layout.pp} x vpp {layout.vpp})",
            key="parallelism.pp",
            found=layout.pp,
            allowed=f"pp * vpp at most {layers}",
        )
    proposal = split(layers, stages)
    raise InputError(
        f"{layers} layers do not divide evenly over {stages} stages (pp {layout.pp} x vpp {layout.vpp})",
        key="parallelism.layers_per_stage",
        allowed=f"{stages} numbers whose sum is {layers}, or pp * vpp one of {_listed(allowed)}",
        fix=f"layers_per_stage: {_shown(proposal)}",
    )


def replicas(layout: Parallelism, cluster: ClusterSpec) -> int:
    """dp where the file gives the cluster's nodes instead. Raises `InputError` where the GPUs do not divide."""
    model_parallel = layout.tp * layout.pp
    if cluster.n_gpus % model_parallel == 0:
        return cluster.n_gpus // model_parallel
    if cluster.n_gpus < model_parallel:
        raise too_small(cluster, model_parallel, f"tp {layout.tp} x pp {layout.pp}")
    per_node = cluster.node.gpus.count
    step = model_parallel // math.gcd(model_parallel, per_node)
    nodes = nearest(cluster.nodes, [max(1, cluster.nodes // step) * step, (cluster.nodes // step + 1) * step])
    raise InputError(
        f"{cluster.n_gpus} GPUs ({cluster.nodes} nodes of {per_node}) do not divide by tp * pp = {model_parallel}",
        key="parallelism.dp",
        allowed=f"tp * pp one of {_listed(divisors(cluster.n_gpus))}, or nodes a multiple of {step}, or dp given",
        fix=f"cluster.nodes: {nodes}",
    )


def too_small(cluster: ClusterSpec, ranks: int, what: str) -> InputError:
    """The error of ``ranks`` (explained by ``what``) that need more GPUs than the cluster has."""
    needed = math.ceil(ranks / cluster.node.gpus.count)
    return InputError(
        f"{what} needs {ranks:,} GPUs, {cluster.nodes} nodes of {cluster.name} have {cluster.n_gpus:,}",
        key="cluster.nodes",
        found=cluster.nodes,
        allowed=f">= {needed}",
        fix=f"cluster.nodes: {needed}",
    )


def check_scale(ranks: int) -> None:
    """Raise `InputError` for more ranks than can be simulated, before anything of that size exists."""
    if ranks > MAX_GPUS:
        raise InputError(
            f"tp * pp * dp makes {ranks:,} ranks",
            key="parallelism",
            allowed=f"at most {MAX_GPUS:,} GPUs",
            fix="a smaller dp, pp or tp",
        )


def model_problems(workload: Workload) -> Iterator[InputError]:
    """What is wrong whatever the cluster: sizes of the model against each other and against tp, and the schedule."""
    model, training, layout = workload.model, workload.training, workload.parallelism
    recompute, optimizer = training.recompute, training.optimizer
    if "head_dim" not in model.model_fields_set and model.hidden % model.heads:
        yield InputError(
            f"hidden {model.hidden} does not divide by it, and head_dim is not given",
            key="model.heads",
            found=model.heads,
            allowed=_listed(divisors(model.hidden)),
            fix=f"heads: {nearest(model.heads, divisors(model.hidden))}",
        )
    widest = max(model.hidden, model.ffn_hidden, model.vocab, model.heads * model.head_dim, model.heads * training.seq)
    if (numbers := training.micro_batch * training.seq * widest) > MAX_TENSOR:
        yield InputError(
            f"makes tensors of {numbers:.1e} numbers (micro_batch * seq * the widest of the model, or heads * seq)",
            key="training.micro_batch",
            found=training.micro_batch,
            allowed=f"at most {MAX_TENSOR:.0e} numbers",
        )
    if model.heads % model.kv_heads:
        yield InputError(
            f"heads {model.heads} does not divide by it",
            key="model.kv_heads",
            found=model.kv_heads,
            allowed=_listed(divisors(model.heads)),
            fix=f"kv_heads: {nearest(model.kv_heads, divisors(model.heads))}",
        )
    else:
        yield from islice(_tp_problems(workload), 1)
    if layout.sequence_parallel and layout.scatter_gather_p2p:
        yield InputError(
            "sequence parallelism already sends 1/tp of the activation",
            key="parallelism.scatter_gather_p2p",
            found=brief(True),
            allowed="false, or sequence_parallel: false",
        )
    if training.precision == "fp32" and "master_weights" in optimizer.model_fields_set and optimizer.master_weights:
        yield InputError(
            "fp32 weights have no copy in fp32",
            key="training.optimizer.master_weights",
            found=brief(True),
            allowed="false",
        )
    if training.gradient_accumulation_fusion and training.implementation != "fused":
        yield InputError(
            f"the products of implementation {training.implementation} do not add to a buffer",
            key="training.gradient_accumulation_fusion",
            found=brief(True),
            allowed="false, or implementation: fused",
        )
    if recompute.layers is not None and recompute.granularity != "full":
        yield InputError(
            f"has no meaning with granularity {recompute.granularity}",
            key="training.recompute.layers",
            found=recompute.layers,
            fix="granularity: full",
        )
    yield from _schedule_problems(layout)
    yield from _rank_order_problems(layout)


def _tp_problems(workload: Workload) -> Iterator[InputError]:
    """What tp does not divide, the most telling first: one change of tp may mend them all."""
    model, training, layout = workload.model, workload.training, workload.parallelism
    tp = layout.tp
    if model.heads % tp:
        yield _heads_do_not_split(workload)
    if model.kv_heads % tp and tp % model.kv_heads:
        allowed = _head_splits(workload)
        yield InputError(
            f"neither tp {tp} nor kv_heads {model.kv_heads} divides the other",
            key="parallelism.tp",
            found=tp,
            allowed=_listed(allowed),
            fix=f"tp: {nearest(tp, allowed)}",
        )
    if model.ffn_hidden % tp:
        yield InputError(
            f"tp {tp} does not divide it",
            key="model.ffn_hidden",
            found=model.ffn_hidden,
            allowed=f"a multiple of {tp}",
            fix=f"ffn_hidden: {_nearest_multiple(model.ffn_hidden, tp)}",
        )
    if layout.sequence_parallel and training.seq % tp:
        yield InputError(
            f"sequence parallelism splits it over tp {tp}, which does not divide it",
            key="training.seq",
            found=training.seq,
            allowed=f"a multiple of {tp}, or sequence_parallel: false",
            fix=f"seq: {_nearest_multiple(training.seq, tp)}",
        )


def _head_splits(workload: Workload) -> list[int]:
    """Sizes of tp that divide the query heads, and divide or are divided by the key and value heads."""
    kv_heads = workload.model.kv_heads
    return [tp for tp in divisors(workload.model.heads) if kv_heads % tp == 0 or tp % kv_heads == 0]


def _heads_do_not_split(workload: Workload) -> InputError:
    model, layout = workload.model, workload.parallelism
    allowed = _head_splits(workload)
    instead = f"tp: {nearest(layout.tp, allowed)}"
    if layout.pp == 1 and layout.vpp == 1 and layout.tp <= model.layers:
        instead += f"; or tp: 1 with dp: {layout.dp * layout.tp}, or with pp: {layout.tp}"
        if model.layers % layout.tp:
            instead += f" and layers_per_stage: {_shown(split(model.layers, layout.tp))}"
    return InputError(
        f"{model.heads} heads do not divide by tp {layout.tp}",
        key="parallelism.tp",
        found=layout.tp,
        allowed=_listed(allowed),
        fix=instead,
    )


def _schedule_problems(layout: Parallelism) -> Iterator[InputError]:
    chunks = layout.plan.chunks
    chunked = ", ".join(name for name, schedule in SCHEDULES.items() if schedule.chunks is None)
    if chunks is not None and layout.vpp != chunks:
        yield InputError(
            f"the schedule {layout.schedule} has {'one chunk' if chunks == 1 else f'{chunks} chunks'} per rank",
            key="parallelism.vpp",
            found=layout.vpp,
            allowed=f"{chunks}, or schedule: {chunked}",
            fix=f"schedule: {chunked}" if chunks == 1 else f"vpp: {chunks}",
        )
    elif chunks != 1 and (layout.vpp == 1 or layout.pp == 1):
        key, found = ("vpp", layout.vpp) if layout.vpp == 1 else ("pp", layout.pp)
        yield InputError(
            f"the schedule {layout.schedule} needs several chunks per rank and several ranks",
            key=f"parallelism.{key}",
            found=found,
            allowed=">= 2, or schedule: 1f1b with vpp: 1",
            fix=f"{key}: 2",
        )


def _rank_order_problems(layout: Parallelism) -> Iterator[InputError]:
    axes = layout.rank_order.split("-")
    if len(set(axes)) != len(axes) or not {"tp", "dp", "pp"} <= set(axes) <= {"tp", "cp", "ep", "dp", "pp"}:
        yield InputError(
            "is no order of the axes",
            key="parallelism.rank_order",
            found=layout.rank_order,
            allowed="tp, dp and pp (and cp, ep, of size 1) once each, joined by '-'",
            fix="rank_order: tp-cp-ep-dp-pp",
        )


def layout_problems(workload: Workload) -> Iterator[InputError]:
    """What is wrong between the resolved layout, the batch and the cluster."""
    model, training, layout, cluster = workload.model, workload.training, workload.parallelism, workload.cluster
    if workload.n_ranks > cluster.n_gpus:
        yield too_small(cluster, workload.n_ranks, f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}")
    for problem in cluster_problems(cluster):
        problem.key = f"cluster.{problem.key}"
        yield problem

    stages = layout.pp * layout.vpp
    if len(layout.layers_per_stage) != stages or sum(layout.layers_per_stage) != model.layers:
        proposal = f"layers_per_stage: {_shown(split(model.layers, stages))}" if stages <= model.layers else None
        yield InputError(
            f"{len(layout.layers_per_stage)} stages with {sum(layout.layers_per_stage)} layers",
            key="parallelism.layers_per_stage",
            found=list(layout.layers_per_stage[:64]),
            allowed=f"{stages} numbers (pp {layout.pp} x vpp {layout.vpp}) whose sum is {model.layers}",
            fix=proposal,
        )
    elif training.recompute.layers is not None and training.recompute.layers > max(layout.layers_per_stage):
        yield InputError(
            "no stage has so many layers",
            key="training.recompute.layers",
            found=training.recompute.layers,
            allowed=f"at most {max(layout.layers_per_stage)}",
        )
    yield from _batch_problems(workload)


def _batch_problems(workload: Workload) -> Iterator[InputError]:
    training, layout = workload.training, workload.parallelism
    batch, once = training.global_batch, training.micro_batch * layout.dp
    if batch % once:
        dps = [dp for dp in divisors(batch) if batch % (training.micro_batch * dp) == 0]
        other = f", or dp: {nearest(layout.dp, dps)}" if dps else ""
        yield InputError(
            f"does not divide by micro_batch {training.micro_batch} x dp {layout.dp} = {once}",
            key="training.global_batch",
            found=batch,
            allowed=f"a multiple of {once}",
            fix=f"global_batch: {_nearest_multiple(batch, once)}{other}",
        )
        return
    microbatches = workload.microbatches
    if microbatches * layout.pp * layout.vpp > MAX_ACTIONS:
        yield InputError(
            f"makes {microbatches:,} micro-batches over {layout.pp * layout.vpp} stages",
            key="training.global_batch",
            found=batch,
            allowed=f"micro-batches * pp * vpp at most {MAX_ACTIONS:,}",
            fix="a larger micro_batch",
        )
    schedule = layout.plan
    reason = schedule.check(layout.pp, microbatches, layout.vpp)
    if reason is not None:
        works = [m for m in _around(microbatches) if schedule.check(layout.pp, m, layout.vpp) is None]
        if not works:
            yield InputError(reason, key="parallelism.schedule", found=layout.schedule, fix="schedule: 1f1b")
            return
        yield InputError(
            f"makes {microbatches} micro-batches; {layout.schedule} {reason}",
            key="training.global_batch",
            found=batch,
            allowed=", ".join(str(m * once) for m in sorted(works[:2])),
            fix=f"global_batch: {works[0] * once}, or schedule: 1f1b with vpp: 1",
        )


def _around(number: int) -> Iterator[int]:
    """Whole numbers above 0, nearest to ``number`` first, as far as twice ``number`` and a schedule's usual round."""
    for distance in range(1, number + 1025):
        if number - distance > 0:
            yield number - distance
        yield number + distance


def warnings(workload: Workload) -> list[str]:
    """What runs, and is probably not meant."""
    layout, cluster, notes = workload.parallelism, workload.cluster, []
    if cluster.n_gpus > workload.n_ranks:
        notes.append(f"{cluster.n_gpus - workload.n_ranks} of the {cluster.n_gpus} GPUs of the cluster have no rank")
    if layout.zero and layout.dp == 1:
        notes.append("parallelism.zero saves nothing: with dp 1 there is no replica to share the optimizer state with")
    if layout.plan.splits and workload.training.recompute.granularity != "none":
        notes.append(
            f"{layout.schedule} splits the backward pass: recomputation runs before the input gradient, and what the "
            "weight gradient needs of it is held until that has run"
        )
    if workload.training.recompute.granularity == "selective" and workload.model.attention == "flash":
        notes.append("selective recompute saves almost nothing: flash attention keeps no scores to recompute")
    return notes


def _nearest_multiple(number: int, step: int) -> int:
    return max(1, round(number / step)) * step


def _listed(numbers: list[int]) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 24 else [*shown[:22], "...", shown[-1]])


def _shown(sizes: list[int]) -> str:
    return str(sizes) if len(sizes) <= 64 else f"[{sizes[0]}, {sizes[1]}, ... {sizes[-1]}]"
