"""Where a cost comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """``kind`` is measured, published, datasheet, assumed or exact; ``source`` is the citation.

    ``extrapolated``: the kernel's shape, batch or type lies outside what the figure was fitted on.
    """

    kind: str
    source: str
    extrapolated: bool = False
