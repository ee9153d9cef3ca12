"""All that is measured, in order: the same list at every rank."""

from __future__ import annotations

from collections.abc import Collection

from calibration.measure import (
    attention,
    collectives,
    copies,
    interference,
    kernels,
    launch,
    layers,
    matmul,
    memory,
    moving,
    shared,
    sustained,
)
from calibration.measure.case import ALONE, TOGETHER, Case, Level, shuffled

MODULES_ALONE = dict(zip(ALONE, (launch, copies, matmul, attention, memory, sustained, shared), strict=True))
MODULES_TOGETHER = dict(zip(TOGETHER, (collectives, interference, moving), strict=True))


def plan(level: Level, kinds: Collection[str], world: int, local: int, groups: collectives.Sizes = ()) -> list[Case]:
    """Return the cases of ``kinds`` for ``world`` ranks, ``local`` of them on each node.

    Collectives, alone and beside kernels, are in ``groups`` of so many ranks, see `collectives.groups`.
    """
    alone = [
        case for name, module in MODULES_ALONE.items() if name in kinds for case in shuffled(module.cases(level, world))
    ]
    if "layers" in kinds:
        alone += sorted(shuffled(layers.cases(level, world)), key=lambda case: len(case.ranks))
    together: list[Case] = []
    for name, module in MODULES_TOGETHER.items():
        if name in kinds and world > 1:
            # Group by group, as each starts its communicator when first used.
            cases = shuffled(module.cases(level, world, local, groups))
            together += sorted(cases, key=lambda case: (len(case.ranks), case.ranks))
    profiled = [*kernels.cases(level, alone)] if "kernels" in kinds else []
    return alone + together + profiled
