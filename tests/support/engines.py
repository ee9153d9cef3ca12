"""Tests that both engines have to pass."""

from __future__ import annotations

from importlib import import_module

import pytest

from simulator.bounds import EngineChoice
from simulator.engine.engines import player

ENGINES: tuple[EngineChoice, ...] = ("compiled", "python")


@pytest.fixture(params=ENGINES)
def each_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EngineChoice:
    """Let all that a test plays be played by one engine, then by the other."""
    engine: EngineChoice = request.param
    module = import_module("simulator.engine.simulate")
    monkeypatch.setattr(module, "player", lambda asked, *jobs: player(engine, *jobs))
    return engine
