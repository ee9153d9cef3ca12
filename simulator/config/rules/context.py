"""Context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.config.workload import Workload


def problems(workload: Workload) -> Iterator[InputError]:
    """Context parallelism is not there yet."""
    if workload.parallelism.cp > 1:
        yield InputError("is not supported yet", key="parallelism.cp", found=workload.parallelism.cp, allowed="1")
