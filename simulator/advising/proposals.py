"""Proposals: single changes that may make a step faster, and the part of its time that each can shorten.

All keep the model, the batch, the GPUs and the numerical result of a step; what is illegal for a job is refused when it
is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from simulator.analysis.training.stage_split import split_setting
from simulator.config import Workload
from simulator.config.rules.numbers import divisors

#: Dotted keys and their values, as a user would set them.
KeyChange = Mapping[str, Any]

#: A proposal is tried where it can shorten this share of the step.
WORTH = 0.01
#: Parts of `time_breakdown_s` that another layout can shorten.
_ALL = ("compute", "recompute", "optimizer", "tp", "cp", "ep", "pp", "dp", "host", "bubble")
#: Numbers of chunks that are tried beyond the job's own.
_MORE_CHUNKS = 2


@dataclass(frozen=True)
class Proposal:
    """A change of dotted keys, and the parts of `time_breakdown_s` that it can shorten."""

    change: KeyChange
    shortens: tuple[str, ...]

    def seconds(self, breakdown: Mapping[str, Any]) -> float:
        """Return the seconds of a step that the change can shorten: more than these it cannot save."""
        return float(
            sum(breakdown[part] if part in breakdown else breakdown["exposed"][part] for part in self.shortens)
        )


def _another_split(workload: Workload, split: Sequence[int] | None) -> Iterator[KeyChange]:
    if split:
        yield split_setting(workload, split)


def _more_chunks(workload: Workload) -> Iterator[KeyChange]:
    """Interleave, or interleave finer: the bubble shrinks with the number of chunks (arXiv 2104.04473, 2.2)."""
    layout = workload.parallelism
    if layout.pp == 1 or layout.schedule not in ("1f1b", "interleaved"):
        return
    finer = (chunks for chunks in divisors(workload.model.layers // layout.pp) if chunks > layout.vpp)
    for chunks in islice(finer, _MORE_CHUNKS):
        yield {"parallelism.schedule": "interleaved", "parallelism.vpp": chunks}


def _split_backward(workload: Workload) -> Iterator[KeyChange]:
    if workload.parallelism.pp > 1 and workload.parallelism.schedule == "1f1b":
        yield {"parallelism.schedule": "zb_h1"}


def _less_recompute(workload: Workload) -> Iterator[KeyChange]:
    order = ("full", "selective", "none")
    now = workload.training.recompute.granularity
    yield from ({"training.recompute": less} for less in order[order.index(now) + 1 if now in order else 2 :])


def _micro_batch(workload: Workload) -> Iterator[KeyChange]:
    size = workload.training.micro_batch
    yield from ({"training.micro_batch": other} for other in (2 * size, size // 2) if other)


def _other_layouts(workload: Workload) -> Iterator[KeyChange]:
    """Double one of the tensor, pipeline and data-parallel sizes, and halve another; tensors are split inside nodes."""
    sizes = {axis: int(getattr(workload.parallelism, axis)) for axis in ("tp", "pp", "dp")}
    for halved in sizes:
        for doubled in sizes:
            too_wide = doubled == "tp" and 2 * sizes["tp"] > workload.cluster.gpus_per_node
            if halved != doubled and sizes[halved] % 2 == 0 and not too_wide:
                yield {f"parallelism.{halved}": sizes[halved] // 2, f"parallelism.{doubled}": 2 * sizes[doubled]}


def _sequence_parallel(workload: Workload) -> Iterator[KeyChange]:
    if workload.parallelism.tp > 1 and not workload.parallelism.sequence_parallel:
        yield {"parallelism.sequence_parallel": True}


def _overlap(flag: str) -> Callable[[Workload], Iterator[KeyChange]]:
    def change(workload: Workload) -> Iterator[KeyChange]:
        if not getattr(workload.parallelism.overlap, flag):
            yield {f"parallelism.overlap.{flag}": True}

    return change


def _buckets(workload: Workload) -> Iterator[KeyChange]:
    nbytes = workload.parallelism.bucket_bytes
    yield from ({"parallelism.bucket_bytes": other} for other in (4 * nbytes, nbytes // 4) if other)


def _sharding(workload: Workload) -> Iterator[KeyChange]:
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


def _experts(workload: Workload) -> Iterator[KeyChange]:
    if workload.model.moe is not None:
        ep = workload.parallelism.ep
        yield from ({"parallelism.ep": other} for other in (2 * ep, ep // 2) if other)


def _context(workload: Workload) -> Iterator[KeyChange]:
    if workload.parallelism.cp > 1:
        yield {"parallelism.cp_method": "ulysses" if workload.parallelism.cp_method == "ring" else "ring"}


def _flash(workload: Workload) -> Iterator[KeyChange]:
    if workload.model.attention != "flash":
        yield {"model.attention": "flash"}


def _fused_optimizer(workload: Workload) -> Iterator[KeyChange]:
    if workload.training.optimizer.implementation in ("foreach", "for_loop"):
        yield {"training.optimizer.implementation": "fused"}


def _compiled(workload: Workload) -> Iterator[KeyChange]:
    if not workload.framework.compile:
        yield {"framework.compile": True}


#: Kinds of changes, and the parts of a step that each can shorten.
_KINDS: tuple[tuple[Callable[[Workload], Iterator[KeyChange]], tuple[str, ...]], ...] = (
    (_more_chunks, ("bubble",)),
    (_split_backward, ("bubble",)),
    (_less_recompute, ("recompute", "tp", "ep", "cp", "bubble")),
    (_micro_batch, _ALL),
    (_other_layouts, _ALL),
    (_sequence_parallel, ("compute", "tp")),
    (_overlap("grad_reduce"), ("dp", "bubble")),
    (_overlap("param_gather"), ("dp", "bubble")),
    (_overlap("tp"), ("tp", "bubble")),
    (_overlap("p2p"), ("pp", "bubble")),
    (_overlap("ep"), ("ep", "bubble")),
    (_buckets, ("dp",)),
    (_sharding, ("dp", "optimizer")),
    (_experts, ("ep", "compute", "bubble")),
    (_context, ("cp", "bubble")),
    (_flash, ("compute", "recompute", "bubble")),
    (_fused_optimizer, ("optimizer", "host")),
    (_compiled, ("compute", "recompute", "host")),
)


def proposals(workload: Workload, breakdown: Mapping[str, Any], split: Sequence[int] | None) -> list[Proposal]:
    """Return what is worth a simulation: first what keeps the layout, and of these the largest part of the step.

    ``breakdown``: `time_breakdown_s` of the job. ``split``: layers per stage that are known to be better, if any.
    """
    step = sum(seconds for part, seconds in breakdown.items() if part != "exposed") + sum(breakdown["exposed"].values())
    listed = [Proposal(change, ("bubble",)) for change in _another_split(workload, split)]
    listed += [Proposal(change, shortens) for kind, shortens in _KINDS for change in kind(workload)]
    worth = [one for one in listed if one.seconds(breakdown) >= WORTH * step]
    return sorted(worth, key=lambda one: (one.shortens == _ALL, -float(f"{one.seconds(breakdown):.6g}")))
