"""Expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.config.workload import Workload


def problems(workload: Workload) -> Iterator[InputError]:
    """Expert parallelism is not there yet."""
    if workload.parallelism.ep > 1:
        yield InputError("is not supported yet", key="parallelism.ep", found=workload.parallelism.ep, allowed="1")
