"""Data parallelism: what is sharded, and how gradients travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.config.workload import Workload


def warnings(workload: Workload) -> Iterator[str]:
    """Sharding over nobody."""
    if workload.parallelism.zero and workload.parallelism.replicas("dp") == 1:
        yield "parallelism.zero saves nothing: with dp * cp 1 there is no replica to share the optimizer state with"
