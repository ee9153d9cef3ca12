"""Cases to measure: a `Case` is one line of the plan and of the results."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

Scalar = str | int | float | bool
#: smoke: one small case per kind of op, to see that everything runs; quick: minutes; full: what a profile is fitted to.
Level = Literal["smoke", "quick", "full"]
LEVELS: tuple[Level, ...] = ("smoke", "quick", "full")
#: Kinds that one GPU suffices for, in the order of measuring: host costs first, before a profiler has run.
ALONE = ("launch", "copy", "matmul", "attention", "memory", "sustained", "shared")
TOGETHER = ("collective", "interference", "moving")
#: Of `Case`. Modules of these kinds need torch; what names the kinds does not.
KINDS = (*ALONE, "layers", *TOGETHER, "kernels")


@dataclass(frozen=True)
class Case:
    """A case: ``kind`` names the module that measures it, ``op`` the operation, ``params`` its sizes.

    ``ranks`` take part.     ``limit_s``: after so many seconds it counts as hung.
    """

    kind: str
    op: str
    params: dict[str, Scalar] = field(default_factory=dict)
    ranks: tuple[int, ...] = (0,)
    limit_s: float = 30.0

    @property
    def key(self) -> str:
        """Says the whole case; equal keys are the same measurement.

        >>> Case("matmul", "mm", {"m": 64, "role": "fwd"}).key
        'matmul/mm m=64 role=fwd'
        """
        ranks = [] if self.ranks == (0,) else [f"ranks={','.join(map(str, self.ranks))}"]
        return " ".join([f"{self.kind}/{self.op}", *(f"{name}={value}" for name, value in self.params.items()), *ranks])


@dataclass(frozen=True)
class Work:
    """Something that can be timed: ``run(i)`` issues it on the ``i``-th of ``sets`` sets of buffers.

    ``flops`` and ``nbytes`` are those of one run (matrix products alone; each tensor read or written once), 0 where
    they say nothing. ``launches``: about how many kernels a run launches.
    """

    run: Callable[[int], object]
    flops: float = 0.0
    nbytes: float = 0.0
    launches: int = 1
    sets: int = 1


class UnavailableError(Exception):
    """This machine or this version of PyTorch cannot do what the case asks for."""


def shuffled(cases: Iterable[Case]) -> list[Case]:
    """Each case once, in an order that is always the same: drifting clocks must not look like an effect of size."""
    unique = list({case.key: case for case in cases}.values())
    random.Random(0).shuffle(unique)
    return unique
