"""Skeleton: collectives."""

from __future__ import annotations

from calibration.fit.cases import Cases
from calibration.fit.part import Part
from simulator.config.profile import Profile


def fit(cases: Cases, profile: Profile) -> Part:
    return Part({})
