"""Measurements that fits are tried on."""

from __future__ import annotations

from pathlib import Path

from calibration.fit.cases import MeasuredCase

ENVIRONMENT = {
    "kind": "environment",
    "gpu": "NVIDIA H100 80GB HBM3",
    "date": "2026-01-02",
    "command": "measure",
    "torch": "2",
}

CHOICES = Path(__file__).resolve().parents[2] / "calibration/measurements/h200-sxm-141gb/one-gpu-choices.jsonl.gz"


def measured_case(kind: str, op: str, seconds: float, **values: float | str) -> MeasuredCase:
    return MeasuredCase(kind, op, values, (0,), {"time_s": seconds, **values})


PRODUCT = {"m": 8, "n": 8, "k": 8, "role": "fwd", "dtype": "bf16"}

SHARED = {
    "kind": "shared",
    "op": "mm",
    "params": PRODUCT | {"beside": "wait", "share": 0.5, "period_s": 0.02},
    "ranks": [0],
    "time_s": 1e-3,
    "share": 0.5,
    "other_s": 1e-3,
    "series_s": [1e-3, 1e-3],
    "sm_mhz": [1500, 1500],
    "power_w": [600, 600],
}
