"""Kernels of a case: names (cuBLAS's say the tile and the slices of k) and seconds, from the profiler.

They are measured last of all, as a profiler that has run once may slow everything after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from calibration.measure.case import Case, Level

PROFILED = ("matmul", "attention", "memory", "launch")


def cases(level: Level, measured: Iterable[Case]) -> Iterator[Case]:
    """One case for each measured one that it looks into."""
    for case in measured:
        if level != "quick" and case.kind in PROFILED:
            yield Case("kernels", case.kind, {"of": case.key})
