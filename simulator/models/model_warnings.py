"""What runs, and is probably not meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator import config
from simulator.models.routing import dropped_share

if TYPE_CHECKING:
    from simulator.config import Workload

#: Shares below this are printed as 0.0 %.
_SHOWN = 0.0005


def warnings(workload: Workload) -> list[str]:
    """All that is known before a step is played: of what the files say, and of the model that they come to."""
    return [*config.warnings(workload), *_dropping(workload)]


def _dropping(workload: Workload) -> Iterator[str]:
    if (dropped := dropped_share(workload)) >= _SHOWN:
        yield f"model.moe.capacity_factor: experts drop {dropped:.1%} of their tokens; MFU counts them as worked on"
