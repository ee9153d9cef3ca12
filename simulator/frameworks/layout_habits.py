"""Layouts that users of a framework choose among."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayoutHabits:
    """Values of a layout's keys that users of a framework choose among; `llmsim init` looks no further.

    ``zero`` and ``recompute`` are these values. ``one_stage``: no pipelines. ``one_rank_layers``: no tensor
    parallelism. ``begins_sharded``: a search begins at the last stage of ``zero``, without which some jobs are refused.
    """

    zero: tuple[int, ...]
    recompute: tuple[str, ...] = ("none", "full")
    one_stage: bool = True
    one_rank_layers: bool = False
    begins_sharded: bool = False

    @property
    def values(self) -> dict[str, list[Any]]:
        """Values by key, as a search takes them."""
        single = {"pp": [1]} if self.one_stage else {}
        single |= {"tp": [1]} if self.one_rank_layers else {}
        return {**single, "zero": [*self.zero], "recompute": [*self.recompute]}
