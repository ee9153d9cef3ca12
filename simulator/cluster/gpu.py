"""GPUs of a cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU number ``index`` of node ``node``; ``speed_scale`` multiplies its speed (1: as its type), ``host_speed``
    that at which its host issues ops (1: as the calibrated one), ``autograd_speed`` that in backward passes again."""

    name: str
    node: int
    index: int
    type: str
    speed_scale: float = 1.0
    host_speed: float = 1.0
    autograd_speed: float = 1.0
