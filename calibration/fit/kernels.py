"""Kernels: matrix products, attention, and what memory traffic bounds."""

from __future__ import annotations

from calibration.fit import attention, matmul, memory
from calibration.fit.cases import Cases
from calibration.fit.part import Part
from simulator.config.profile import Profile


def fit(cases: Cases, profile: Profile) -> Part:
    """The section ``kernels``."""
    parts = [one.fit(cases, profile) for one in (matmul, attention, memory)]
    figures = {key: value for part in parts for key, value in part.figures.items()}
    return Part(figures, [point for part in parts for point in part.points])
