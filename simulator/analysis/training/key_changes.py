"""Changes of a job that advice tries: on memory (`simulator.analysis.training.advice`) and on speed
(`simulator.advising`), which each choose among these.

Each function yields a change of one kind as a user would type it, several, or none. Whoever tries one finds out whether
it is legal for a job, and whether it changes the job at all: some set what the job has already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from simulator.config import Workload
from simulator.config.rules.numbers import divisors
from simulator.schedules import SCHEDULES

#: Dotted keys and their values, as a user would set them.
KeyChange = Mapping[str, Any]
KeyChanges = Callable[[Workload], Iterator[KeyChange]]

#: Numbers of chunks that are tried beyond the job's own.
_MORE_CHUNKS = 2


def always(key: str, value: object) -> KeyChanges:
    """Return the change that sets ``key``, whatever the job has."""

    def change(workload: Workload) -> Iterator[KeyChange]:
        yield {key: value}

    return change


def flash(workload: Workload) -> Iterator[KeyChange]:
    if workload.model.attention != "flash":
        yield {"model.attention": "flash"}


def sequence_parallel(workload: Workload) -> Iterator[KeyChange]:
    """Split what tensor parallelism leaves whole, which takes the place of `scatter_gather_p2p`."""
    layout = workload.parallelism
    if layout.tp > 1 and not layout.sequence_parallel:
        instead = {"parallelism.scatter_gather_p2p": False} if layout.scatter_gather_p2p else {}
        yield {"parallelism.sequence_parallel": True} | instead


def larger_micro_batch(workload: Workload) -> Iterator[KeyChange]:
    yield {"training.micro_batch": 2 * workload.training.micro_batch}


def smaller_micro_batch(workload: Workload) -> Iterator[KeyChange]:
    if workload.training.micro_batch > 1:
        yield {"training.micro_batch": workload.training.micro_batch // 2}


def less_recompute(workload: Workload) -> Iterator[KeyChange]:
    order = ("full", "selective", "none") if workload.model.keeps_scores else ("full", "none")
    now = workload.training.recompute.granularity
    yield from ({"training.recompute": less} for less in order[order.index(now) + 1 if now in order else -1 :])


def selective_recompute(workload: Workload) -> Iterator[KeyChange]:
    if workload.training.recompute.granularity == "none" and workload.model.keeps_scores:
        yield {"training.recompute": "selective"}


def all_gpus(workload: Workload) -> Iterator[KeyChange]:
    """Share the state among all GPUs of the nodes, where the file gives neither their number nor that of replicas."""
    layout = workload.parallelism
    if layout.zero and "dp" not in layout.model_fields_set and workload.nodes is None:
        yield {"cluster.nodes": workload.cluster.n_nodes}


def higher_zero(workload: Workload) -> Iterator[KeyChange]:
    """Raise the ZeRO stage; pipelines stop at stage 1, as higher ones gather and scatter for every micro-batch."""
    layout = workload.parallelism
    if layout.zero < 2:
        yield {"parallelism.zero": min(layout.zero + 1, 2 if layout.pp == 1 else 1)}


def fully_sharded(workload: Workload) -> Iterator[KeyChange]:
    """Shard parameters; not with a pipeline, which would gather and scatter for every micro-batch."""
    if workload.parallelism.pp == 1:
        yield {"parallelism.zero": 3}


def reshard(workload: Workload) -> Iterator[KeyChange]:
    if workload.parallelism.zero == 3:
        yield {"parallelism.reshard_after_forward": True}


def reduced_each_time(workload: Workload) -> Iterator[KeyChange]:
    """Reduce the gradients of every micro-batch, so that no rank keeps whole ones; torch's pipelines cannot."""
    if workload.adds_whole_gradients and not workload.stage_runtime.keeps_units:
        yield {"parallelism.sync_each_micro_batch": True}


def reduced_once(workload: Workload) -> Iterator[KeyChange]:
    """Reduce the gradients of the last micro-batch alone, where whole ones can be added up."""
    several = workload.parallelism.zero == 3 and workload.microbatches > 1
    if several and workload.replication.fully_sharded and not workload.adds_whole_gradients:
        yield {"parallelism.sync_each_micro_batch": False}


def faster_sharding(workload: Workload) -> Iterator[KeyChange]:
    """Shard the optimizer, or shard less, and gather further ahead."""
    layout = workload.parallelism
    if layout.replicas("dp") == 1:
        return
    if layout.zero == 0:
        yield {"parallelism.zero": 1}
    if layout.zero == 3:
        yield {"parallelism.zero": 2}
        yield {"parallelism.prefetch": layout.prefetch + 1}
        if layout.reshard_after_forward:
            yield {"parallelism.reshard_after_forward": False}
        if layout.hsdp is None and layout.dp > workload.cluster.gpus_per_node:
            yield {"parallelism.hsdp": workload.cluster.gpus_per_node}


def leaner_schedule(workload: Workload) -> Iterator[KeyChange]:
    """Choose the schedule that claims to hold least and claims no larger bubble.

    It neither splits backward passes nor changes when weights are updated.
    """
    layout = workload.parallelism
    if layout.pp == 1:
        return
    shape = (layout.pp, workload.microbatches, layout.vpp)
    idle = layout.pipeline_schedule.bubble(*shape, 1, 1, 1)
    peaks: dict[str, int] = {}
    for name, schedule in SCHEDULES.items():
        if schedule.splits or not schedule.drains or schedule.check(*shape) is not None:
            continue
        bubble, in_flight = schedule.bubble(*shape, 1, 1, 1), [schedule.peak(*shape, rank) for rank in range(layout.pp)]
        if bubble is not None and (idle is None or bubble <= idle):
            peaks[name] = max(peak for peak in in_flight if peak is not None)
    if peaks:
        yield {"parallelism.schedule": min(peaks, key=peaks.__getitem__)}


def more_chunks(workload: Workload) -> Iterator[KeyChange]:
    """Interleave, or interleave finer: the bubble shrinks with the number of chunks (arXiv 2104.04473, 2.2)."""
    layout = workload.parallelism
    if layout.pp == 1 or layout.schedule not in ("1f1b", "interleaved"):
        return
    finer = (chunks for chunks in divisors(workload.model.layers // layout.pp) if chunks > layout.vpp)
    for chunks in islice(finer, _MORE_CHUNKS):
        yield {"parallelism.schedule": "interleaved", "parallelism.vpp": chunks}


def split_backward(workload: Workload) -> Iterator[KeyChange]:
    if workload.parallelism.pp > 1 and workload.parallelism.schedule == "1f1b":
        yield {"parallelism.schedule": "zb_h1"}


def exchanged_sizes(workload: Workload) -> Iterator[KeyChange]:
    """Double one of the tensor, pipeline and data-parallel sizes, and halve another; tensors are split inside nodes."""
    sizes = {axis: int(getattr(workload.parallelism, axis)) for axis in ("tp", "pp", "dp")}
    for halved in sizes:
        for doubled in sizes:
            too_wide = doubled == "tp" and 2 * sizes["tp"] > workload.cluster.gpus_per_node
            if halved != doubled and sizes[halved] % 2 == 0 and not too_wide:
                yield {f"parallelism.{halved}": sizes[halved] // 2, f"parallelism.{doubled}": 2 * sizes[doubled]}


def more_expert_parallelism(workload: Workload) -> Iterator[KeyChange]:
    if workload.model.moe is not None:
        yield {"parallelism.ep": 2 * workload.parallelism.ep}


def less_expert_parallelism(workload: Workload) -> Iterator[KeyChange]:
    if workload.model.moe is not None and workload.parallelism.ep > 1:
        yield {"parallelism.ep": workload.parallelism.ep // 2}


def more_tensor_parallelism(workload: Workload) -> Iterator[KeyChange]:
    """Double the tensor parallelism inside a node; across nodes it would be far too slow."""
    wider = 2 * workload.parallelism.tp
    if wider <= workload.cluster.gpus_per_node:
        yield {"parallelism.tp": wider} | _gpus_for_twice_the_model_parallelism(workload)


def more_pipeline_parallelism(workload: Workload) -> Iterator[KeyChange]:
    yield {"parallelism.pp": 2 * workload.parallelism.pp} | _gpus_for_twice_the_model_parallelism(workload)


def more_context_parallelism(workload: Workload) -> Iterator[KeyChange]:
    yield {"parallelism.cp": 2 * workload.parallelism.cp} | _gpus_for_twice_the_model_parallelism(workload)


def other_context_parallelism(workload: Workload) -> Iterator[KeyChange]:
    if workload.parallelism.cp > 1:
        yield {"parallelism.cp_method": "ulysses" if workload.parallelism.cp_method == "ring" else "ring"}


def more_replicas(workload: Workload) -> Iterator[KeyChange]:
    """Double the replicas that share a state; the batch stays, or doubles where it cannot be split so."""
    layout, half = workload.parallelism, workload.microbatches // 2
    if not layout.zero:
        return
    split = 2 * half == workload.microbatches and layout.pipeline_schedule.check(layout.pp, half, layout.vpp) is None
    larger = {} if split else {"training.global_batch": 2 * workload.training.global_batch}
    yield {"parallelism.dp": 2 * layout.dp} | larger | _twice_the_gpus(workload)


def overlap(flag: str) -> KeyChanges:
    """Return the change that hides one kind of communication behind computation."""

    def change(workload: Workload) -> Iterator[KeyChange]:
        if not getattr(workload.parallelism.overlap, flag):
            yield {f"parallelism.overlap.{flag}": True}

    return change


def other_buckets(workload: Workload) -> Iterator[KeyChange]:
    nbytes = workload.parallelism.bucket_bytes
    yield from ({"parallelism.bucket_bytes": other} for other in (4 * nbytes, nbytes // 4) if other)


def fused_optimizer(workload: Workload) -> Iterator[KeyChange]:
    if workload.training.optimizer.implementation in ("foreach", "for_loop"):
        yield {"training.optimizer.implementation": "fused"}


def compiled(workload: Workload) -> Iterator[KeyChange]:
    yield {"framework.compile": True}


def _gpus_for_twice_the_model_parallelism(workload: Workload) -> dict[str, Any]:
    """Halve the replicas on the same GPUs, or else double the GPUs."""
    dp = workload.parallelism.dp
    return {"parallelism.dp": dp // 2} if dp % 2 == 0 else _twice_the_gpus(workload)


def _twice_the_gpus(workload: Workload) -> dict[str, Any]:
    nodes = workload.cluster.nodes_for(2 * workload.n_ranks)
    return {"cluster.nodes": nodes} if nodes > workload.cluster.n_nodes else {}
