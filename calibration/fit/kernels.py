"""Kernels: matrix products, attention, and what memory traffic bounds."""

from __future__ import annotations

import statistics
from typing import Any

from calibration.fit import attention, matmul, memory
from calibration.fit.cases import Cases
from calibration.fit.part import ProfilePart, rounded
from calibration.measure.store import key_of
from simulator.hardware.profile import Profile

SHORT_S = 20e-6  # of longer kernels a gap is lost in what differs from run to run


def fit(cases: Cases, profile: Profile) -> ProfilePart:
    """The section ``kernels``."""
    parts = [one.fit(cases, profile) for one in (matmul, attention, memory)]
    figures = {key: value for part in parts for key, value in part.figures.items()} | _gap(cases)
    return ProfilePart(figures, [point for part in parts for point in part.points])


def _gap(cases: Cases) -> dict[str, Any]:
    """Return the median seconds between kernels in a stream that never runs dry, as ``kernels.gap_s``.

    A gap is the time from kernel to kernel less the kernel's own, as a profiler sees it. The median is over short
    kernels that memory bounds, whose speed does not follow the clock.
    """
    timed = {key_of(dict(case.row)): case for case in cases.rows_of("memory") if case.seconds < SHORT_S}
    gaps = [
        (timed[key].seconds - sum(seconds for _, seconds in case.row["kernels"])) / len(case.row["kernels"])
        for case in cases.rows_of("kernels", "memory")
        if (key := str(case.params["of"])) in timed and case.row["kernels"]
    ]
    return {"kernels.gap_s": {"value": rounded(statistics.median(gaps)), **cases.cited}} if gaps else {}
