"""Seconds of a kernel that is bound by memory traffic: its bytes at the bandwidth that its class reaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from simulator.config.profile import GpuSpec, Implementation, MemoryCurve, MemoryModel
from simulator.costs.origin import Origin, beyond
from simulator.program import Memory


@dataclass(frozen=True)
class MemoryCost:
    """Prices `Memory` kernels on one kind of GPU. ``curves``: by class."""

    spec: GpuSpec
    curves: Mapping[str, MemoryCurve]

    @classmethod
    def of(cls, spec: GpuSpec, model: MemoryModel, implementation: Implementation) -> MemoryCost:
        """Of the kernels that ``implementation`` launches."""
        curves: dict[str, MemoryCurve] = dict(model.eager.items())
        if implementation != "eager":
            curves.update(model.fused.items())
        return cls(spec, curves)

    def seconds(self, kernel: Memory) -> float:
        """start + bytes / (share * peak bandwidth): half of the share is reached where the bytes take ``start_s``."""
        curve = self.curves[kernel.op]
        return curve.start_s + kernel.bytes / (curve.share * self.spec.memory_bandwidth_Bps.value)

    def origin(self, kernel: Memory) -> Origin:
        curve = self.curves[kernel.op]
        outside = beyond(kernel.bytes, *curve.fitted_range) if curve.fitted_range and kernel.bytes else 1.0
        return Origin(curve.kind, curve.source, beyond=outside)
