"""Proposals: changes that may make a step faster, and the part of its time that each can shorten.

All keep the model, the batch, the GPUs and the numerical result of a step; what is illegal for a job is refused when it
is tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.analysis.training import key_changes
from simulator.analysis.training.key_changes import KeyChange, KeyChanges, overlap
from simulator.analysis.training.stage_split import split_setting
from simulator.config import Workload

#: A proposal is tried where it can shorten this share of the step.
LEAST_SHORTENED = 0.01
#: Parts of `time_breakdown_s` that another layout can shorten.
_ALL = ("compute", "recompute", "optimizer", "tp", "cp", "ep", "pp", "dp", "host", "bubble")


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


#: Kinds of changes, and the parts of a step that each can shorten.
_KINDS: tuple[tuple[KeyChanges, tuple[str, ...]], ...] = (
    (key_changes.more_chunks, ("bubble",)),
    (key_changes.split_backward, ("bubble",)),
    (key_changes.less_recompute, ("recompute", "tp", "ep", "cp", "bubble")),
    (key_changes.larger_micro_batch, _ALL),
    (key_changes.smaller_micro_batch, _ALL),
    (key_changes.exchanged_sizes, _ALL),
    (key_changes.sequence_parallel, ("compute", "tp")),
    (overlap("grad_reduce"), ("dp", "bubble")),
    (overlap("param_gather"), ("dp", "bubble")),
    (overlap("tp"), ("tp", "bubble")),
    (overlap("p2p"), ("pp", "bubble")),
    (overlap("ep"), ("ep", "bubble")),
    (key_changes.other_buckets, ("dp",)),
    (key_changes.faster_sharding, ("dp", "optimizer")),
    (key_changes.reduced_once, ("dp",)),
    (key_changes.more_expert_parallelism, ("ep", "compute", "bubble")),
    (key_changes.less_expert_parallelism, ("ep", "compute", "bubble")),
    (key_changes.other_context_parallelism, ("cp", "bubble")),
    (key_changes.flash, ("compute", "recompute", "bubble")),
    (key_changes.fused_optimizer, ("optimizer", "host")),
    (key_changes.compiled, ("compute", "recompute", "host")),
)


def proposals(workload: Workload, breakdown: Mapping[str, Any], split: Sequence[int] | None) -> list[Proposal]:
    """Return what is worth a simulation: first what shortens some parts of a step alone, largest first.

    ``breakdown``: `time_breakdown_s` of the job. ``split``: layers per stage that are known to be better, if any.
    """
    step = sum(seconds for part, seconds in breakdown.items() if part != "exposed") + sum(breakdown["exposed"].values())
    listed = [Proposal(split_setting(workload, split), ("bubble",))] if split else []
    listed += [Proposal(change, shortens) for kind, shortens in _KINDS for change in kind(workload)]
    worth = [one for one in listed if one.seconds(breakdown) >= LEAST_SHORTENED * step]
    return sorted(worth, key=lambda one: (one.shortens == _ALL, -float(f"{one.seconds(breakdown):.6g}")))
