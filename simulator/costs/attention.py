"""Seconds of a flash attention kernel: a share of the peak that saturates with the length, and the memory roofline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from simulator.config.profile import AttentionCurve, AttentionModel, GpuSpec
from simulator.costs.origin import Origin
from simulator.program import Attention

#: Queries that one thread block works on (FlashAttention-2, arXiv 2307.08691, section 3.3: blocks of 64 or 128).
BLOCK_QUERIES = 128


@dataclass(frozen=True)
class AttentionCost:
    """Prices `Attention` kernels on one kind of GPU."""

    spec: GpuSpec
    model: AttentionModel

    @cached_property
    def _peak(self) -> dict[str, float]:
        return {dtype: figure.value for dtype, figure in self.spec.peak_flops_per_s.items()}

    def seconds(self, kernel: Attention) -> float:
        """start + max(FLOPs / (peak * share * busy SMs), bytes / bandwidth).

        share = limit * L / (L + half_length), with L the keys that a query sees on average: half of them under a causal
        mask, whose lower speed at equal length comes from that. Fewer thread blocks than SMs leave SMs idle.
        """
        limit, half_length = self._curve(kernel)
        keys = kernel.pairs / kernel.q_len
        share = limit * keys / (keys + half_length)
        blocks = kernel.batch * kernel.heads * -(-kernel.q_len // BLOCK_QUERIES)
        share *= min(1.0, blocks / self.spec.sms)
        compute_s = kernel.flops / (self._peak[kernel.dtype] * share)
        memory_s = kernel.bytes / self.spec.memory_bandwidth_Bps.value
        return self.model.start_s.value + max(compute_s, memory_s)

    def origin(self, kernel: Attention) -> Origin:
        curves = self._curves(kernel)
        nearest = min(curves, key=lambda dim: (abs(dim - kernel.head_dim), dim))
        # Whole sequences were fitted: no part of the keys, no window.
        whole = kernel.q_len == kernel.kv_len and not kernel.window
        known = kernel.head_dim in curves and whole
        return Origin(curves[nearest].kind, curves[nearest].source, beyond=1.0 if known else math.inf)

    def _curves(self, kernel: Attention) -> Mapping[int, AttentionCurve]:
        return self.model.backward if kernel.backward else self.model.forward

    def _curve(self, kernel: Attention) -> tuple[float, float]:
        """Limit and half length at the kernel's head dimension, linear between fitted ones."""
        curves = self._curves(kernel)
        dims = sorted(curves)
        dim = min(max(kernel.head_dim, dims[0]), dims[-1])
        low = max(d for d in dims if d <= dim)
        high = min(d for d in dims if d >= dim)
        weight = (dim - low) / (high - low) if high > low else 0.0
        a, b = curves[low], curves[high]
        return a.limit + weight * (b.limit - a.limit), a.half_length + weight * (b.half_length - a.half_length)
