"""Warnings of a job that runs, but is probably not what its user means."""

from __future__ import annotations

from collections.abc import Iterator

from simulator import config
from simulator.config import Workload
from simulator.models.routing import dropped_share

#: Shares below this are printed as 0.0 %.
_SHOWN = 0.0005


def warnings(workload: Workload) -> list[str]:
    """Return the warnings that need no step: of the files' keys, and of the model that follows from them."""
    return [*config.warnings(workload), *_dropping(workload)]


def _dropping(workload: Workload) -> Iterator[str]:
    """Yield a warning where experts drop tokens."""
    if (dropped := dropped_share(workload)) >= _SHOWN:
        yield f"model.moe.capacity_factor: experts drop {dropped:.1%} of their tokens; MFU counts them as worked on"
