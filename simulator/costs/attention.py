"""Seconds of a flash attention kernel: thread blocks over the SMs, each faster the more keys it sees, and the memory
roofline. Its constants are fitted by `calibration.fit.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from simulator.costs.origin import Origin, beyond
from simulator.hardware.gpu import GpuSpec
from simulator.hardware.kernels import AttentionCurve, AttentionModel
from simulator.program import Attention
from simulator.units import DTYPE_BYTES

#: Queries that one thread block works on (FlashAttention-2, arXiv 2307.08691, section 3.3: blocks of 64 or 128); in the
#: backward kernel keys.
BLOCK = 128


@dataclass(frozen=True)
class AttentionCost:
    """Prices of `Attention` kernels on one kind of GPU."""

    spec: GpuSpec
    model: AttentionModel

    @cached_property
    def _peak(self) -> dict[str, float]:
        return {dtype: figure.value for dtype, figure in self.spec.peak_flops_per_s.items()}

    def seconds(self, kernel: Attention) -> float:
        """Return start + max(all blocks / SMs + tail * longest block, longest block, bytes / bandwidth).

        All blocks take FLOPs / (peak / SMs * share), with share = limit * L / (L + half_length). L is the number of
        keys that a query sees on average: half of them under a causal mask. A block of ``BLOCK`` queries takes its part
        of that, with the random numbers of dropout and a bias. The longest is the one that sees most keys, which under
        a causal mask is twice the mean. While the last blocks finish, other SMs are idle. Around the backward kernel
        go others, which memory bounds (`around_bytes`).
        """
        all_s, longest_s = self._blocks_s(kernel)
        tail = self.model.tail["backward" if kernel.backward else "forward"].value
        memory_s = kernel.bytes / self.spec.memory_bandwidth_Bps.value
        around_s, around = 0.0, self.model.around
        if kernel.backward and around:
            around_s = around.start_s + around_bytes(kernel) / (around.share * self.spec.memory_bandwidth_Bps.value)
        return self.model.start_s.value + around_s + max(all_s / self.spec.sms + tail * longest_s, longest_s, memory_s)

    def busy_s(self, kernel: Attention) -> float:
        """Return the seconds of its blocks on all SMs together, as if none of them ever fell idle."""
        return self._blocks_s(kernel)[0] / self.spec.sms

    def _blocks_s(self, kernel: Attention) -> tuple[float, float]:
        """Return the seconds of all blocks one after another, and of the longest."""
        limit, half_length = self._curve(kernel)
        keys = kernel.pairs / kernel.q_len
        blocks = kernel.batch * kernel.heads * -(-kernel.q_len // BLOCK)
        all_s = kernel.flops * self.spec.sms / (self._peak[kernel.dtype] * limit) * (keys + half_length) / keys
        if kernel.dropout and (costs := self.model.dropout):
            scores = kernel.batch * kernel.heads * kernel.pairs
            all_s += scores * self.spec.sms * (costs.backward_s if kernel.backward else costs.forward_s)
        if kernel.bias and self.model.bias:
            all_s += kernel.batch * kernel.heads * kernel.pairs * self.spec.sms * self._bias_s(kernel)
        most = min(kernel.window or kernel.kv_len, kernel.kv_len)
        return all_s, all_s / blocks * (most + half_length) / (keys + half_length)

    def origin(self, kernel: Attention) -> Origin:
        """Return the origin of a price. Whole sequences were fitted: no part of the keys, no window."""
        shares, curves = self._shares(kernel), self._curves(kernel)
        nearest = min(shares or curves, key=lambda dim: (abs(dim - kernel.head_dim), dim))
        curve = self.model.fp32 if shares and self.model.fp32 else curves[nearest]
        if kernel.q_len != kernel.kv_len or kernel.window or curve.fitted_range is None:
            return Origin(curve.kind, curve.source, beyond=math.inf)
        outside = max(beyond(kernel.head_dim, nearest, nearest), beyond(kernel.q_len, *curve.fitted_range))
        return Origin(curve.kind, curve.source, beyond=outside)

    def _curves(self, kernel: Attention) -> Mapping[int, AttentionCurve]:
        return self.model.backward if kernel.backward else self.model.forward

    def _shares(self, kernel: Attention) -> Mapping[int, float]:
        """Return shares of the peak of CUDA cores by head dimension; none where the type's curve prices the kernel."""
        model = self.model.fp32
        if kernel.dtype != "fp32" or model is None or self.spec.fp32_flops_per_s is None:
            return {}
        return model.backward if kernel.backward else model.forward

    def _curve(self, kernel: Attention) -> tuple[float, float]:
        """Return limit and half length at the kernel's head dimension, linear between fitted ones.

        The limit is a share of the type's peak, which for fp32 is that of TF32. So a share of the peak of CUDA cores is
        turned into one. It goes for sequences of every length: its half length is 0.
        """
        shares, cores = self._shares(kernel), self.spec.fp32_flops_per_s
        if shares and cores:
            low, high, weight = _between(shares, kernel.head_dim)
            share = shares[low] + weight * (shares[high] - shares[low])
            return share * cores.value / self._peak["fp32"], 0.0
        curves = self._curves(kernel)
        low, high, weight = _between(curves, kernel.head_dim)
        a, b = curves[low], curves[high]
        return a.limit + weight * (b.limit - a.limit), a.half_length + weight * (b.half_length - a.half_length)

    def _bias_s(self, kernel: Attention) -> float:
        """Return the seconds of adding a bias to one score, linear between measured head dimensions."""
        costs = self.model.bias
        low, high, weight = _between(costs, kernel.head_dim)
        a, b = (costs[dim].backward_s if kernel.backward else costs[dim].forward_s for dim in (low, high))
        return a + weight * (b - a)


def _between(dims: Iterable[int], head_dim: int) -> tuple[int, int, float]:
    """Return the head dimensions around ``head_dim``, or the nearest one twice, and the weight of the higher one."""
    ordered = sorted(dims)
    dim = min(max(head_dim, ordered[0]), ordered[-1])
    low = max(d for d in ordered if d <= dim)
    high = min(d for d in ordered if d >= dim)
    return low, high, (dim - low) / (high - low) if high > low else 0.0


def around_bytes(kernel: Attention) -> float:
    """Return the bytes of the kernels around a flash attention's backward one.

    Before it each row's product of output and gradient is summed (FlashAttention-2, arXiv 2307.08691, algorithm 2). An
    fp32 gradient of the queries is cleared, to which blocks of keys add; after the kernel that is cast. Where heads
    share keys, each has gradients of its own for them, which are then added up. The kernels are cuDNN's
    ``compute_dot_do_o``, ``convert_dq_to_16bits`` and ``fmha_reduce_head``.
    """
    size, value_dim = DTYPE_BYTES[kernel.dtype], kernel.v_head_dim or kernel.head_dim
    rows, keys = kernel.batch * kernel.q_len * kernel.heads, kernel.batch * kernel.kv_len
    nbytes = rows * (2 * size * value_dim + (4 + 4 + size) * kernel.head_dim)
    if kernel.kv_heads < kernel.heads:
        nbytes += keys * (kernel.heads + kernel.kv_heads) * size * (kernel.head_dim + value_dim)
    return float(nbytes)
