"""Prices of kernels, and where they come from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Origin:
    """The source of a price. ``kind`` is measured, published, datasheet, assumed or exact, ``source`` the citation.

    ``beyond``: the factor between a size of the kernel and the nearest size that was measured; 1: inside what was,
    infinite: nothing of that sort was measured.
    """

    kind: str
    source: str
    beyond: float = 1.0

    @property
    def extrapolated(self) -> bool:
        """The kernel's shape or type lies outside what was fitted."""
        return self.beyond > 1


class KernelCost(Protocol):
    """Prices of one class of kernels: pure functions of the kernel."""

    def seconds(self, kernel: Any) -> float: ...

    def origin(self, kernel: Any) -> Origin: ...


def beyond(size: float, low: float, high: float) -> float:
    """Return the factor by which ``size`` lies outside a range; 1 inside.

    >>> beyond(5, 2, 8), beyond(16, 2, 8), beyond(0.5, 2, 8)
    (1.0, 2.0, 4.0)
    """
    if size <= 0:
        return math.inf
    return max(1.0, size / high, low / size)
