"""Environment of training that tests start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a team of four processes found in all jobs."""
    return team_of(4, tmp_path_factory.mktemp("team") / "found.json")


def team_of(world: int, path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.training", str(path), str(world)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(path.read_text())
    return results
