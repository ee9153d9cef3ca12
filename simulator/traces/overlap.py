"""How much of a rank's communication runs beside its other work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.arrays import Bools, Floats
from simulator.timeline import covered_s


@dataclass(frozen=True, slots=True)
class BusyTime:
    """Seconds of a rank in which anything runs, any computing kernel, and any communication.

    ``exposed_s``: communication that nothing else covers. ``overlap``: share of communication beside computing kernels;
    None without communication.
    """

    busy_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    overlap: float | None


def busy_time(start_s: Floats, end_s: Floats, communicates: Bools, computes: Bools) -> BusyTime:
    """Return the busy time of a rank's ops; each of the arrays has one entry per op."""

    def covered(chosen: Bools) -> float:
        return covered_s(start_s[chosen], end_s[chosen])

    busy_s, compute_s, communication_s = covered_s(start_s, end_s), covered(computes), covered(communicates)
    both_s = max(compute_s + communication_s - covered(computes | communicates), 0.0)
    return BusyTime(
        busy_s=busy_s,
        compute_s=compute_s,
        communication_s=communication_s,
        exposed_s=busy_s - covered(~communicates),
        overlap=both_s / communication_s if communication_s else None,
    )


def mean_overlap(overlaps: Sequence[float | None], ranks: Sequence[int] | None = None) -> float | None:
    """Return the mean overlap of the ranks that communicate; None where none does.

    ``ranks``: for how many ranks each overlap stands; None: for one.
    """
    counts = [1] * len(overlaps) if ranks is None else ranks
    communicating = [(overlap, count) for overlap, count in zip(overlaps, counts, strict=True) if overlap is not None]
    return (
        sum(overlap * count for overlap, count in communicating) / sum(count for _, count in communicating)
        if communicating
        else None
    )
