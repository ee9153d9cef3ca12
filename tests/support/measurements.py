"""Rows of measurements, and processes that make them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def row(m: int, **more: object) -> dict[str, Any]:
    return {"kind": "matmul", "op": "mm", "params": {"m": m}, "ranks": [0], **more}


def measure(out: Path, *arguments: str) -> str:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "calibration", "measure", "--device", "cpu", "--smoke", "--out", str(out), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr
