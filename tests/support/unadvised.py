"""Reports without advice, for tests of what a step comes to."""

from __future__ import annotations

import pytest


@pytest.fixture
def without_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out of reports what takes more simulations.

    That is another split of the layers, what would make a job fit, and the step on slower hosts.
    """
    monkeypatch.setattr("simulator.analysis.training.report.HOST_MATTERS", 1.0)
    monkeypatch.setattr("simulator.step_result._better_split", lambda result, now: None)
    monkeypatch.setattr("simulator.step_result.advice", lambda memories, workload, needed_bytes: [])
