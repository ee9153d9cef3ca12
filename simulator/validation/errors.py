"""Errors of every row of every suite, as last recorded by `simulator.validation.record`."""

from __future__ import annotations

import json
from functools import lru_cache

from simulator.validation.suites import DATA

RECORD = DATA / "errors.json"


@lru_cache
def recorded() -> dict[str, dict[str, float]]:
    """suite -> row -> (predicted - measured) / measured, as last recorded."""
    errors: dict[str, dict[str, float]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return errors
