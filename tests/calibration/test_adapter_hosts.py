"""Hosts pay for adapters and 4-bit weights as narrow steps on three machines tell."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean

import pytest

from calibration.fit.hosts import Pace, issued_in_step
from simulator.config import load_workload
from simulator.config.profile import load_profile
from simulator.costs import launch
from simulator.lowering import build_program

CALIBRATION = Path(__file__).parents[2] / "calibration"
PROFILE = load_profile("h200-sxm-141gb")


def steps(kind: str) -> list[tuple[float, float, float]]:
    """Return of each step of a ``kind`` its seconds, those simulated without calls for 4-bit weights, and such calls.

    All are at the pace that was probed beside the step; calls are counted as so many of the profile's host.
    """
    told = PROFILE.provenance
    assert told is not None
    usual = Pace(told.host_forward_s or 0.0, told.host_backward_s or 0.0)
    prices = launch.launch_seconds(PROFILE.host.launch_s["hugging_face"]) | {"graph": 0.0, "dequantize": 0.0}
    rows = []
    with (CALIBRATION / "measurements" / "adapter-hosts.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row["workload"].startswith(f"hh1_{kind}_"):
                continue
            pace = (
                1e-3 * float(row["probe_forward_ms"]) / usual.forward,
                1e-3 * float(row["probe_backward_ms"]) / usual.backward,
            )
            program = build_program(load_workload(CALIBRATION / "runs" / "hosts" / f"{row['workload']}.yaml"))
            issued = issued_in_step(program.roles[program.role_of[0]])
            others = sum(n * prices[name] * pace[autograd] for (name, autograd), n in issued.items())
            calls = sum(n * pace[autograd] for (name, autograd), n in issued.items() if name == "dequantize")
            rows.append((1e-3 * float(row["step_ms"]), others, calls))
    return rows


def test_adapters_cost_their_ops_and_no_more() -> None:
    """PEFT's modules in Python show in no mean over six steps: the ops that they launch are within a tenth of them."""
    errors = [simulated / measured - 1 for measured, simulated, _ in steps("lora")]
    assert len(errors) == 6
    assert abs(fmean(errors)) < 0.1


def test_a_call_for_a_4_bit_weight_costs_what_is_left_of_steps() -> None:
    """Least squares of relative errors over seven steps with one unknown are sum(a b) / sum(a a). Here a is the calls
    of a step and b what is left of it, both over its seconds."""
    rows = steps("qlora")
    assert len(rows) == 7
    parts = [(calls / measured, (measured - others) / measured) for measured, others, calls in rows]
    fitted = sum(a * b for a, b in parts) / sum(a * a for a, _ in parts)
    shipped = PROFILE.host.launch_s["hugging_face"].around_s["dequantize"]
    assert shipped == pytest.approx(fitted, rel=0.02)
    without = fmean(abs(b) for _, b in parts)
    assert fmean(abs(a * shipped - b) for a, b in parts) < without / 2
