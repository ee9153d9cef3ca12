"""Seconds of a kernel that is bound by memory traffic: its bytes at the bandwidth that its class reaches, or what
its SMs take to find them.

The constants are fitted by `calibration.fit.memory`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from simulator.costs.origin import Origin, beyond
from simulator.hardware.gpu import GpuSpec
from simulator.hardware.kernels import MemoryCurve, MemoryModel
from simulator.program import Memory
from simulator.units import DTYPE_BYTES


@dataclass(frozen=True)
class MemoryCost:
    """Prices `Memory` kernels on one kind of GPU. ``curves``: by class."""

    spec: GpuSpec
    curves: Mapping[str, MemoryCurve]

    @classmethod
    def from_sections(cls, spec: GpuSpec, model: MemoryModel, sections: Iterable[str]) -> MemoryCost:
        """Return the prices of the kernels in ``sections`` of a profile; a later section replaces classes of an earlier
        one. Casts to 4 bits are priced as those to 8 bits by their bytes: nobody has measured them apart."""
        curves: dict[str, MemoryCurve] = {}
        for section in sections:
            curves.update(getattr(model, section))
        narrow = {
            f"fp4_{name.removeprefix('fp8_')}": curve for name, curve in curves.items() if name.startswith("fp8_")
        }
        return cls(spec, narrow | curves)

    def seconds(self, kernel: Memory) -> float:
        """Return start + bytes / (share * peak bandwidth), or ``element_s`` for each element written if that is longer.

        Half of the share is reached where the bytes take ``start_s``. Sums over columns start with the values that
        threads add one after another, and with slices."""
        curve = self.curves[kernel.op]
        _, start_s = _at_width(curve, kernel.width)
        if curve.columns and kernel.width:
            rows = kernel.read_bytes / (DTYPE_BYTES[kernel.dtype] * kernel.width)
            number, values = slices(round(rows), kernel.width, self.spec.sms * self.spec.threads_per_sm)
            start_s += values * curve.columns.value_s + number * curve.columns.slice_s
        return start_s * max(kernel.launches, 1) + max(self.moving_s(kernel), self._search_s(kernel))

    def moving_s(self, kernel: Memory) -> float:
        """Return the seconds of its bytes at the share of the bandwidth that its class has."""
        share = _at_width(self.curves[kernel.op], kernel.width)[0]
        return kernel.bytes / (share * self.spec.memory_bandwidth_Bps.value)

    def _search_s(self, kernel: Memory) -> float:
        elements = kernel.elements or kernel.write_bytes / DTYPE_BYTES[kernel.dtype]
        return (self.curves[kernel.op].element_s or 0.0) * elements

    def share(self, kernel: Memory) -> float:
        """Return the share of the peak bandwidth that a kernel reaches once it has begun.

        It is its class's, less where finding the operands takes longer than moving them."""
        moving_s, search_s = self.moving_s(kernel), self._search_s(kernel)
        share = _at_width(self.curves[kernel.op], kernel.width)[0]
        return share * moving_s / search_s if search_s > moving_s else share

    def origin(self, kernel: Memory) -> Origin:
        curve = self.curves[kernel.op]
        outside = beyond(kernel.bytes, *curve.fitted_range) if curve.fitted_range and kernel.bytes else 1.0
        if kernel.width and curve.by_width:
            outside = max(outside, beyond(kernel.width, min(curve.by_width), max(curve.by_width)))
        return Origin(curve.kind, curve.source, beyond=outside)


def slices(rows: int, width: int, threads: int) -> tuple[int, int]:
    """Return the slices of rows into which PyTorch cuts a sum over the rows of a matrix, and a thread's values.

    ``threads``: as many as the GPU holds at once. Blocks of 32 x 4 threads take 4 columns a thread; the 4 divide the
    rows from 64 on (aten/src/ATen/native/cuda/Reduce.cuh, ``setReduceConfig``). Only where a thread is left with 256
    values or more do blocks divide them too. There are as many as fill the GPU, but none leaves a thread fewer than 16.

    >>> slices(512, 1024, 132 * 2048), slices(1024, 1024, 132 * 2048), slices(8192, 4096, 132 * 2048)
    ((1, 128), (16, 16), (66, 32))
    """
    values = -(-rows // 4) if rows >= 64 else rows
    across = -(-width // 128)
    at_once = threads // 128
    number = 1
    if values >= 256 and across <= at_once:
        number = max(min(-(-at_once // across), -(-values // 16)), -(-values // 256))
    return number, -(-values // number)


def _at_width(curve: MemoryCurve, width: int) -> tuple[float, float]:
    """Return share and start for rows of ``width`` elements; 0: of no known width."""
    widths = sorted(curve.by_width)
    if not (width and widths):
        return curve.share, curve.start_s
    width = min(max(width, widths[0]), widths[-1])
    low = max(w for w in widths if w <= width)
    high = min(w for w in widths if w >= width)
    weight = math.log(width / low) / math.log(high / low) if high > low else 0.0
    a, b = curve.by_width[low], curve.by_width[high]
    return a.share + weight * (b.share - a.share), a.start_s + weight * (b.start_s - a.start_s)
