"""Seconds of a matrix product: tiles in waves over the SMs, a memory roofline, and the power limit.

The picture behind it is NVIDIA's ("Matrix Multiplication Background User's Guide"; arXiv 2301.03598 for slices of k). A
kernel cuts the output into tiles, and every SM works on one tile at a time. A last wave that is not full costs as much
as a full one. Its constants are fitted by `calibration.fit.matmul`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Floats
from simulator.costs.origin import Origin, beyond
from simulator.hardware.gpu import GpuSpec
from simulator.hardware.kernels import UNSCALED, MatmulModel, MatmulSize
from simulator.program import GroupedMatmul, Matmul
from simulator.units import OPERAND_BYTES

#: Slices that a kernel may cut k into, so that tiles too few for many waves still fill the SMs.
SPLITS = np.array((1, 2, 3, 4, 6, 8, 12, 16), dtype=float)

Product = Matmul | GroupedMatmul


@dataclass(frozen=True)
class Products:
    """Kernels as columns: one row each, and for the sizes of their products a column per group (of no product: 0)."""

    kernels: tuple[Product, ...]
    m: Floats
    n: Floats
    k: Floats
    count: Floats
    flops: Floats
    nbytes: Floats
    written: Floats  # bytes per element of the output
    read: Floats  # likewise, of an output that is added to
    grouped: NDArray[np.bool_]

    @classmethod
    def from_kernels(cls, kernels: Sequence[Product]) -> Products:
        """Return kernels as columns."""
        groups = [_groups(kernel) for kernel in kernels]
        widest = max(1, *map(len, groups)) if groups else 1
        sizes = np.array([[*some, *[(1, 1, 1, 0)] * (widest - len(some))] for some in groups], dtype=float)
        m, n, k, count = np.moveaxis(sizes, 2, 0)
        return cls(
            kernels=tuple(kernels),
            m=m,
            n=n,
            k=k,
            count=count,
            flops=np.array([kernel.flops for kernel in kernels]),
            nbytes=np.array([kernel.bytes for kernel in kernels]),
            written=np.array([OPERAND_BYTES[x.out_dtype or x.dtype] for x in kernels]),
            read=np.array([OPERAND_BYTES[x.out_dtype or x.dtype] * float(x.accumulate) for x in kernels]),
            grouped=np.array([isinstance(kernel, GroupedMatmul) for kernel in kernels]),
        )


@dataclass(frozen=True)
class MatmulCost:
    """Prices of matrix products on one kind of GPU.

    ``lost_sms``: SMs that something else holds. The library does not know, and cuts products as for all of them.
    """

    spec: GpuSpec
    model: MatmulModel
    lost_sms: int = 0

    @cached_property
    def _tiles(self) -> tuple[Floats, Floats, Floats, Floats, NDArray[np.bool_]]:
        """Rows, columns, efficiency, factor of the choice, and whether it is for single products only, of each tile in
        both orientations."""
        sides = [tuple(int(side) for side in name.split("x")) for name in self.model.tile_efficiency]
        largest = max(rows * columns for rows, columns in sides)
        tiles = []
        for (rows, columns), (name, efficiency) in zip(sides, self.model.tile_efficiency.items(), strict=True):
            factor = (largest / (rows * columns)) ** self.model.large_tile_preference
            single = name not in self.model.grouped.tiles
            tiles += [(a, b, efficiency, factor, single) for a, b in dict.fromkeys([(rows, columns), (columns, rows)])]
        rows_, columns_, efficiencies, factors, singles = np.array(tiles, dtype=float).T
        return rows_, columns_, efficiencies, factors, singles > 0

    def _barred_tiles(self, products: Products) -> NDArray[np.bool_]:
        """Return which tiles the library would not take for a kernel's groups, an array of (kernels, tiles)."""
        grouped, (rows, columns, *_) = self.model.grouped, self._tiles
        if grouped.narrow_up_to is None:
            return np.zeros((len(products.kernels), len(rows)), dtype=bool)
        areas = [math.prod(int(side) for side in name.split("x")) for name in (grouped.tiles[0], grouped.tiles[-1])]
        groups = np.maximum(products.count.sum(axis=1), 1.0)
        m, n = ((sizes * products.count).sum(axis=1) / groups for sizes in (products.m, products.n))
        area = np.where(np.minimum(m, n) <= grouped.narrow_up_to, areas[1], areas[0])
        other: NDArray[np.bool_] = rows * columns != area[:, None]
        return other

    @cached_property
    def _rates(self) -> dict[tuple[str, str, str, bool], float]:
        """FLOP/s at the boost clock inside an ideal tile, by type, role, scaling, and whether grouped."""
        rates: dict[tuple[str, str, str, bool], float] = {}
        scaled = {str(scaling): one.speed for scaling, one in self.model.scaled.items()}
        for dtype, speeds in self.model.layout_speed.items():
            for role, speed in speeds.items():
                single = self.spec.peak_flops_per_s[dtype].value * speed.value
                factors = dict.fromkeys(("", *UNSCALED), 1.0)
                if dtype == "fp8":
                    factors |= {scaling: by_role[role] for scaling, by_role in scaled.items()}
                for scaling, factor in factors.items():
                    rates[dtype, role, scaling, False] = single * factor
                    rates[dtype, role, scaling, True] = single * factor * self.model.grouped.speed[role]
        return rates

    @cached_property
    def _sustained(self) -> dict[str, float]:
        return {dtype: figure.value for dtype, figure in self.model.sustained_flops_per_s.items()}

    def seconds(self, kernel: Product) -> float:
        """Return the kernel's seconds among others on a GPU that is busy for long, launch not included."""
        return float(self.lasting_seconds(Products.from_kernels([kernel]))[0])

    def lasting_seconds(self, products: Products) -> Floats:
        """Return (burst^p + limited^p)^(1/p), with limited = FLOPs / what the power limit sustains."""
        limited_s = products.flops / np.array([self._sustained[kernel.dtype] for kernel in products.kernels])
        p = self.model.power_exponent
        return _both(self.burst_seconds(products), limited_s, p)

    def burst_seconds(self, products: Products) -> Floats:
        """Return seconds at the boost clock, before the power limit has lowered it.

        A tile with s slices of k needs waves = ceil(tiles * s / SMs). A wave costs
        2 * tile * (k / s) / (peak * efficiency * speed / SMs), its pipeline start, and the store of its tile. Speed is
        that of the type and of the operands' layout. Tile time c and memory time b overlap as (c^q + b^q)^(1/q). Slices
        are then summed through memory. The library chooses by a heuristic that favours large tiles. The candidate with
        the smallest time * (largest tile / tile)^preference is taken, which is not always the fastest.

        A grouped kernel's SMs take tiles of all groups in turn (CUTLASS, examples/24_gemm_grouped). Waves are thus
        counted over all of them together, and a wave lasts as long as the mean tile. The kernel does not cut k.
        """
        model, sms = self.model, self.spec.sms
        rows, columns, efficiency, factor, single = self._tiles
        counts = (
            np.ceil(products.m[:, :, None] / rows)
            * np.ceil(products.n[:, :, None] / columns)
            * products.count[:, :, None]
        )
        tiles = counts.sum(axis=1)  # of each kernel, by tile
        k = (counts * products.k[:, :, None]).sum(axis=1) / np.maximum(tiles, 1.0)
        rate = np.array(
            [
                self._rates[x.dtype, x.role, x.scaling, grouped]
                for x, grouped in zip(products.kernels, products.grouped, strict=True)
            ]
        )
        per_k_s = 2.0 * sms * rows * columns / (rate[:, None] * efficiency)
        moved_s = products.written / model.store_Bps_per_sm + products.read / model.load_Bps_per_sm
        per_wave_s = model.wave_start_s + rows * columns * moved_s[:, None]
        split = SPLITS if not products.grouped.all() else SPLITS[:1]
        wave_s = (per_k_s * k)[:, :, None] / split + per_wave_s[:, :, None]
        memory_s = products.nbytes / (model.memory_fraction * self.spec.memory_bandwidth_Bps.value)
        # One fp32 slice, written and read.
        partial_s = 8.0 * (products.m * products.n * products.count).sum(axis=1) / model.split_sum_Bps
        summed_s = np.where(split > 1, model.split_start_s + split * partial_s[:, None, None], 0.0)

        def on(free: int) -> Floats:
            tile_s = np.ceil(tiles[:, :, None] * split / free) * wave_s
            return _both(tile_s, memory_s[:, None, None], model.overlap_exponent) + summed_s

        seconds = on(sms)
        uncut = products.grouped[:, None] | (tiles >= 4 * sms)
        barred = (split > 1) & (uncut[:, :, None] | (k[:, :, None] < split * model.min_k_per_split))
        barred |= (products.grouped[:, None] & (single | self._barred_tiles(products)))[:, :, None]
        choice = np.where(barred, np.inf, seconds * factor[:, None]).reshape(len(rate), -1).argmin(axis=1)
        seconds = on(sms - self.lost_sms) if self.lost_sms else seconds
        chosen: Floats = seconds.reshape(len(rate), -1)[np.arange(len(rate)), choice]
        groups_s = model.grouped.start_s + products.count.sum(axis=1) * model.grouped.group_s
        start_s = model.start_s + np.where(products.grouped, groups_s, 0.0)
        return np.maximum(start_s + np.where(products.count.any(axis=1), chosen, 0.0), self._unaligned_s(products))

    @cached_property
    def _unaligned_rates(self) -> dict[tuple[str, str], float]:
        """FLOP/s of kernels that load element by element, by type and role; none where they were not measured."""
        model, share = self.model.unaligned, 1 - self.lost_sms / self.spec.sms
        if model is None:
            return {}
        return {
            (dtype, role): figure.value * speed * share
            for dtype, figure in self.spec.peak_flops_per_s.items()
            for role, speed in model.speed.items()
        }

    def loads_by_element(self, kernel: Matmul) -> bool:
        """Return True where cuBLAS takes a kernel that loads element by element, and the profile has its speed."""
        return not is_aligned(kernel) and (kernel.dtype, kernel.role) in self._unaligned_rates

    def _unaligned_s(self, products: Products) -> Floats:
        """Return seconds of kernels that load element by element; 0 for other products."""
        rates = np.array(
            [
                self._unaligned_rates.get((kernel.dtype, kernel.role), np.inf)
                if isinstance(kernel, Matmul) and not is_aligned(kernel)
                else np.inf
                for kernel in products.kernels
            ]
        )
        seconds: Floats = np.where(np.isinf(rates), 0.0, self.model.start_s) + products.flops / rates
        return seconds

    def origin(self, kernel: Product) -> Origin:
        """Return the origin of a price.

        Measured are types (or others with the same peak) and sizes inside ``fitted_range``. Sizes of grouped products
        are added up over the groups."""
        cited = self.model.grouped if isinstance(kernel, GroupedMatmul) else self.model
        peaks = {str(dtype): figure.value for dtype, figure in self.spec.peak_flops_per_s.items()}
        ranges = self.model.fitted_range.items()
        alike = {str(dtype): sizes for dtype, sizes in ranges if peaks[dtype] == peaks[kernel.dtype]}
        if not alike:
            return Origin(cited.kind, cited.source, beyond=math.inf)
        ranges_of_type = alike.get(kernel.dtype) or next(iter(alike.values()))
        outside = (beyond(size, *ranges_of_type[name]) for name, size in _sizes(kernel).items())
        return Origin(cited.kind, cited.source, beyond=max(outside))


def _sizes(kernel: Product) -> dict[MatmulSize, int]:
    if isinstance(kernel, Matmul):
        return {"m": kernel.m, "n": kernel.n, "k": kernel.k, "batch": kernel.batch}
    tokens = sum(kernel.tokens)
    if kernel.role == "wgrad":
        return {"m": kernel.n, "n": kernel.k, "k": tokens}
    return {"m": tokens, "n": kernel.n, "k": kernel.k}


#: Of m, n and k those that rows of an operand or of the output are long, by role. Rows of all three lie in memory as
#: in y = x W^T, dx = dy W and dW = dy^T x.
ROW_LENGTHS = {"fwd": ("n", "k"), "dgrad": ("n", "k"), "wgrad": ("m", "n")}
#: Elements of 16 bits in the 16 bytes that Hopper's and Ampere's copies into shared memory take at once.
ALIGNMENT = 8


def is_aligned(kernel: Matmul) -> bool:
    """Return True where all rows that ``kernel`` reads and writes start at multiples of 16 bytes.

    Only types of 16 bits are looked at: others were not measured.

    >>> is_aligned(Matmul(8192, 50257, 768)), is_aligned(Matmul(8191, 50264, 768))
    (False, True)
    """
    sixteen = OPERAND_BYTES[kernel.dtype] == 2
    return not sixteen or all(getattr(kernel, size) % ALIGNMENT == 0 for size in ROW_LENGTHS[kernel.role])


def _both(a: Floats, b: Floats, exponent: float) -> Floats:
    """Return (a^q + b^q)^(1/q), scaled by the larger so that it neither overflows nor vanishes."""
    larger, smaller = np.maximum(a, b), np.minimum(a, b)
    if exponent == np.inf:
        return larger
    total: Floats = larger * (1.0 + (smaller / np.maximum(larger, 1e-300)) ** exponent) ** (1.0 / exponent)
    return total


def _groups(kernel: Product) -> tuple[tuple[int, int, int, int], ...]:
    """Return the products that a kernel is made of, as (m, n, k, how many of them)."""
    if isinstance(kernel, Matmul):
        return ((kernel.m, kernel.n, kernel.k, kernel.batch),)
    counted = Counter((product.m, product.n, product.k) for product in kernel.products)
    return tuple((*sizes, count) for sizes, count in counted.items())
