"""Warnings of a job that runs, but is probably not what its user means."""

from __future__ import annotations

from collections.abc import Iterator

from simulator import config
from simulator.config import Workload
from simulator.models.flops import hardware_flops_per_step
from simulator.models.routing import dropped_share

#: Shares below this are printed as 0.0 %.
_SHOWN = 0.0005


def warnings(workload: Workload) -> list[str]:
    """Return the warnings that need no step: of the files' keys, and of the model that follows from them."""
    return [*config.warnings(workload), *_useless_recompute(workload), *_dropping(workload)]


def _useless_recompute(workload: Workload) -> Iterator[str]:
    """Yield a warning, with its price, where attention is computed again though it keeps no scores."""
    training = workload.training
    recompute = training.recompute
    alone = recompute.granularity == "selective" and recompute.modules == ("core_attn",)
    if alone and not workload.model.keeps_scores:
        without = training.model_copy(update={"recompute": recompute.model_copy(update={"granularity": "none"})})
        keeping = hardware_flops_per_step(workload.model_copy(update={"training": without}))
        more = hardware_flops_per_step(workload) / keeping - 1
        yield (
            "selective recompute saves almost nothing, as flash attention keeps no scores; it computes attention's "
            f"forward pass again, {more:.1%} more FLOPs than with training.recompute=none"
        )


def _dropping(workload: Workload) -> Iterator[str]:
    """Yield a warning where experts drop tokens."""
    if (dropped := dropped_share(workload)) >= _SHOWN:
        yield f"model.moe.capacity_factor: experts drop {dropped:.1%} of their tokens; MFU counts them as worked on"
