"""Seconds of a kernel that is bound by memory traffic: its bytes at the bandwidth that its class reaches.

The constants are fitted by `calibration.fit.memory`.
"""

from __future__ import annotations

import math
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
        share, start_s = _at_width(self.curves[kernel.op], kernel.width)
        return start_s + kernel.bytes / (share * self.spec.memory_bandwidth_Bps.value)

    def origin(self, kernel: Memory) -> Origin:
        curve = self.curves[kernel.op]
        outside = beyond(kernel.bytes, *curve.fitted_range) if curve.fitted_range and kernel.bytes else 1.0
        if kernel.width and curve.by_width:
            outside = max(outside, beyond(kernel.width, min(curve.by_width), max(curve.by_width)))
        return Origin(curve.kind, curve.source, beyond=outside)


def _at_width(curve: MemoryCurve, width: int) -> tuple[float, float]:
    """Share and start for rows of ``width`` elements; 0: of no known width."""
    known = sorted(curve.by_width)
    if not (width and known):
        return curve.share, curve.start_s
    width = min(max(width, known[0]), known[-1])
    low = max(w for w in known if w <= width)
    high = min(w for w in known if w >= width)
    weight = math.log(width / low) / math.log(high / low) if high > low else 0.0
    a, b = curve.by_width[low], curve.by_width[high]
    return a.share + weight * (b.share - a.share), a.start_s + weight * (b.start_s - a.start_s)
