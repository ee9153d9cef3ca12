"""Reports without advice, for tests of what a step comes to."""

from __future__ import annotations

import pytest


@pytest.fixture
def without_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out of reports what takes more simulations: another split of the layers, and what would make a job fit."""
    monkeypatch.setattr("simulator.api._better_split", lambda result: None)
    monkeypatch.setattr("simulator.api.advice", lambda memories, workload, needed_bytes: [])
