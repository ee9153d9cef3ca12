"""Seconds of a kernel that is bound by memory traffic: its bytes at the bandwidth that its class reaches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from simulator.config.cited import Share
from simulator.config.profile import GpuSpec, MemoryModel
from simulator.costs.origin import Origin
from simulator.program import Memory


@dataclass(frozen=True)
class MemoryCost:
    """Prices `Memory` kernels on one kind of GPU."""

    spec: GpuSpec
    model: MemoryModel

    @cached_property
    def _share(self) -> dict[str, Share]:
        return dict(self.model.bandwidth_fraction.items())

    def seconds(self, kernel: Memory) -> float:
        """start + bytes / (share * peak bandwidth): half of the share is reached where the bytes take ``start_s``."""
        share = self._share[kernel.op].value
        return self.model.start_s.value + kernel.bytes / (share * self.spec.memory_bandwidth_Bps.value)

    def origin(self, kernel: Memory) -> Origin:
        share = self._share[kernel.op]
        return Origin(share.kind, share.source)
