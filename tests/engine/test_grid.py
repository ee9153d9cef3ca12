"""Every schedule x data-parallel mode x split of a layer runs as it should, or stands in REFUSALS.md."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from simulator.api import run
from simulator.config import load_workload
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.schedules import SCHEDULES
from tests.support.jobs import job
from tests.support.unadvised import without_advice  # noqa: F401

DATA_PARALLEL: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "allreduce-no-overlap": {"overlap": {"grad_reduce": False}},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "zero3-kept": {"zero": 3, "reshard_after_forward": False},
    "hsdp": {"zero": 3, "hsdp": 2, "dp": 4},
    "compressed": {"grad_compression": "int8"},
    "offload": {"offload": {"optimizer": "cpu"}},
    "parameter_server": {"data_parallel": "parameter_server"},
    "async": {"data_parallel": "async"},
}
SPLITS: dict[str, dict[str, Any]] = {"tp": {"tp": 2}, "cp": {"cp": 2}, "ep": {"ep": 2}}
GRID = list(product(SCHEDULES, DATA_PARALLEL, SPLITS))
#: Every schedule with every fourth mode, in turn, and the splits in turn.
SAMPLE = [
    (schedule, data, list(SPLITS)[(i + j // 4) % len(SPLITS)])
    for i, schedule in enumerate(SCHEDULES)
    for j, data in enumerate(DATA_PARALLEL)
    if (i + j) % 4 == 0
]


def point(schedule: str, data: str, split: str) -> dict[str, Any]:
    """4 layers on 2 pipeline ranks, two replicas and more, 4 micro-batches each."""
    workload = job(model__layers=4)
    section = {"pp": 2, "dp": 2, "schedule": schedule, "vpp": SCHEDULES[schedule].chunks or 2, "bucket_bytes": 400_000}
    workload["parallelism"] = section | DATA_PARALLEL[data] | SPLITS[split]
    workload["training"]["global_batch"] = 4 * workload["parallelism"]["dp"]
    if split == "ep":
        workload["model"]["moe"] = {"experts": 4, "top_k": 2, "ffn_hidden": 256}
    return workload


def refusals() -> list[tuple[str, ...]]:
    """Rows of the table in REFUSALS.md: what, error text, reason, source."""
    text = (Path(__file__).resolve().parents[2] / "REFUSALS.md").read_text(encoding="utf-8")
    lines = [line.replace(r"\|", "\0").strip("|").split("|") for line in text.splitlines() if line[:1] == "|"]
    return [tuple(cell.strip().replace("\0", "|") for cell in cells) for cells in lines[2:]]


@pytest.mark.usefixtures("without_advice")
@pytest.mark.parametrize(
    ("schedule", "data", "split"),
    [pytest.param(*where, marks=() if where in SAMPLE else pytest.mark.slow) for where in GRID],
)
def test_a_point_runs_or_is_refused_with_a_reason(schedule: str, data: str, split: str) -> None:
    """A job that runs can have happened: the invariants hold, every exposed second is part of the step."""
    try:
        workload = load_workload(point(schedule, data, split))
    except InputError as error:
        message = str(error)
        assert any(re.search(says.strip("`").strip(), message) for _, says, _, _ in refusals()), message
        return
    result = run(workload)
    check(result.program, result.played)
    report = result.to_dict()
    cut = report["time_breakdown_s"]
    leaves = [seconds for key, seconds in cut.items() if key != "exposed"] + list(cut["exposed"].values())
    assert min(leaves) >= 0
    assert sum(leaves) == pytest.approx(report["step_time_s"], rel=1e-9)
    assert 0 <= report["bubble_fraction"] < 1


@pytest.mark.parametrize("points", [SAMPLE, pytest.param(GRID, marks=pytest.mark.slow)], ids=["sample", "grid"])
def test_most_of_the_grid_runs(points: list[tuple[str, str, str]]) -> None:
    """At least four of five points."""

    def runs(schedule: str, data: str, split: str) -> bool:
        try:
            load_workload(point(schedule, data, split))
        except InputError:
            return False
        return True

    assert sum(runs(*where) for where in points) >= 0.8 * len(points)


def test_every_refusal_has_its_reason_and_source() -> None:
    for row in refusals():
        assert len(row) == 4
        assert all(row)
