"""Seconds of a matrix product: tiles in waves over the SMs, a memory roofline, and the power limit.

The picture behind it (NVIDIA, "Matrix Multiplication Background User's Guide"; arXiv 2301.03598 for slices of k): a
kernel cuts the output into tiles, every SM works on one tile at a time, and a last wave that is not full costs as much
as a full one. Its constants are fitted by ``calibration/fit_matmul.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from simulator.config.profile import GpuSpec, MatmulModel
from simulator.costs.origin import Origin
from simulator.program import GroupedMatmul, Matmul
from simulator.units import DTYPE_BYTES

#: Slices that a kernel may cut k into, so that tiles too few for many waves still fill the SMs.
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class MatmulCost:
    """Prices `Matmul` kernels on one kind of GPU."""

    spec: GpuSpec
    model: MatmulModel

    @cached_property
    def _tiles(self) -> tuple[tuple[int, int, float, float], ...]:
        """(rows, columns, efficiency, factor of the choice) for each tile in both orientations."""
        sides = [tuple(int(side) for side in name.split("x")) for name in self.model.tile_efficiency]
        largest = max(rows * columns for rows, columns in sides)
        shapes = []
        for (rows, columns), efficiency in zip(sides, self.model.tile_efficiency.values(), strict=True):
            factor = (largest / (rows * columns)) ** self.model.large_tile_preference
            shapes += [(a, b, efficiency, factor) for a, b in dict.fromkeys([(rows, columns), (columns, rows)])]
        return tuple(shapes)

    @cached_property
    def _peak(self) -> dict[str, float]:
        return {dtype: figure.value for dtype, figure in self.spec.peak_flops_per_s.items()}

    @cached_property
    def _sustained(self) -> dict[str, float]:
        return {dtype: figure.value for dtype, figure in self.model.sustained_flops_per_s.items()}

    @cached_property
    def _layout(self) -> dict[str, float]:
        return {role: figure.value for role, figure in self.model.layout_speed.items()}

    def seconds(self, kernel: Matmul | GroupedMatmul) -> float:
        """The kernel's time among others on a GPU that is busy for long, launch not included.

        (burst^p + limited^p)^(1/p), with limited = FLOPs / what the power limit sustains.
        """
        burst_s = self.burst_seconds(kernel) / self._layout[kernel.role]
        limited_s = kernel.flops / self._sustained[kernel.dtype]
        p = self.model.power_exponent
        return float((burst_s**p + limited_s**p) ** (1 / p))

    def burst_seconds(self, kernel: Matmul | GroupedMatmul) -> float:
        """The time at the boost clock, before the power limit has lowered it.

        For each tile and number of slices s of k:
        waves = ceil(tiles * s / SMs), and a wave costs 2 * tile * (k / s) / (peak * efficiency / SMs), its pipeline
        start, and the store of its tile. Tile time c and memory time b overlap as (c^q + b^q)^(1/q); slices are then
        summed through memory. cuBLAS chooses by a heuristic that favours large tiles, so the candidate with the
        smallest time * (largest tile / tile)^preference is taken, which is not always the fastest.

        A grouped kernel's SMs take tiles of all groups in turn (CUTLASS, examples/24_gemm_grouped), so that waves are
        counted over all of them together; a wave lasts as long as the mean tile. It does not cut k.
        """
        model, sms = self.model, self.spec.sms
        groups = _groups(kernel)
        if not groups:
            return model.start_s
        out_bytes = DTYPE_BYTES[kernel.out_dtype or kernel.dtype] * (2 if kernel.accumulate else 1)
        flop_s = 2.0 * sms / self._peak[kernel.dtype]
        store_s = out_bytes / model.store_Bps_per_sm
        q = model.overlap_exponent
        memory_q = (kernel.bytes / (model.memory_fraction * self.spec.memory_bandwidth_Bps.value)) ** q
        partial_s = (
            8.0 * sum(m * n * batch for m, n, _, batch in groups) / model.split_sum_Bps
        )  # one fp32 slice, written and read
        grouped = isinstance(kernel, GroupedMatmul)
        best_cost, best_s = math.inf, math.inf
        for rows, columns, efficiency, factor in self._tiles:
            counts = [-(-m // rows) * -(-n // columns) * batch for m, n, _, batch in groups]
            tiles = sum(counts)
            k = sum(count * group[2] for count, group in zip(counts, groups, strict=True)) / tiles
            area = rows * columns
            per_k_s = area * flop_s / efficiency
            per_wave_s = model.wave_start_s + area * store_s
            for split in SPLITS:
                if split > 1 and (grouped or tiles >= 4 * sms or k < split * model.min_k_per_split):
                    break
                waves = -(-tiles * split // sms)
                tile_s = waves * (per_k_s * k / split + per_wave_s)
                if tile_s * factor >= best_cost:  # the memory's share only adds to it
                    continue
                seconds = (tile_s**q + memory_q) ** (1 / q)
                if split > 1:
                    seconds += model.split_start_s + split * partial_s
                if seconds * factor < best_cost:
                    best_cost, best_s = seconds * factor, seconds
        return best_s + model.start_s

    def origin(self, kernel: Matmul | GroupedMatmul) -> Origin:
        """What was fitted: single products inside ``fitted_range``, of the fitted type or one with the same peak."""
        if isinstance(kernel, GroupedMatmul):
            return Origin(self.model.kind, self.model.source, extrapolated=True)
        sizes = {"m": kernel.m, "n": kernel.n, "k": kernel.k}
        inside = all(low <= sizes[name] <= high for name, (low, high) in self.model.fitted_range.items())
        same_rate = self._peak[kernel.dtype] == self._peak[self.model.fitted_dtype]
        outside = not inside or not same_rate or kernel.batch > 1
        return Origin(self.model.kind, self.model.source, extrapolated=outside)


def _groups(kernel: Matmul | GroupedMatmul) -> tuple[tuple[int, int, int, int], ...]:
    """The products that a kernel is made of, as (m, n, k, how many of them)."""
    if isinstance(kernel, Matmul):
        return ((kernel.m, kernel.n, kernel.k, kernel.batch),)
    counted = Counter((product.m, product.n, product.k) for product in kernel.products)
    return tuple((*sizes, count) for sizes, count in counted.items())
