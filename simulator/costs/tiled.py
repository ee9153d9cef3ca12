"""Seconds of kernels of tiles other than attention. Nothing of the sort was measured: all of it is assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from simulator.costs.attention import AttentionCost
from simulator.costs.origin import Origin
from simulator.hardware.gpu import GpuSpec
from simulator.program import Attention, Tiled


@dataclass(frozen=True)
class TiledCost:
    """Prices of `Tiled` kernels on one kind of GPU, by what its ``attention`` reaches.

    Such a kernel is what flash attention is over as many keys as a tile has: products on one SM, with elementwise work
    between. So it is given the share of the peak that attention reaches there.
    """

    attention: AttentionCost

    @property
    def spec(self) -> GpuSpec:
        """The GPU."""
        return self.attention.spec

    def seconds(self, kernel: Tiled) -> float:
        """Return launches * start + max(FLOPs / (peak * share of attention), bytes / bandwidth)."""
        like = self._alike(kernel)
        products_s = self.attention.busy_s(like) * kernel.flops / like.flops
        memory_s = kernel.bytes / self.spec.memory_bandwidth_Bps.value
        return kernel.launches * self.attention.model.start_s.value + max(products_s, memory_s)

    def origin(self, kernel: Tiled) -> Origin:
        """Return that the price is assumed."""
        source = "flash attention's speed over as many keys as a tile has; no kernel of the sort was measured"
        return Origin("assumed", source, beyond=math.inf)

    def _alike(self, kernel: Tiled) -> Attention:
        """Return attention inside one piece, whose queries all see all of its keys."""
        piece = kernel.chunk
        return Attention(
            1, 1, 1, piece, piece, kernel.width, causal=False, backward=kernel.backward, dtype=kernel.dtype
        )
