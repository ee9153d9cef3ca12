"""Runs that are made of simulated ones, and compared with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from calibration.__main__ import main
from calibration.compare.figures import Figures
from calibration.compare.kernels import PARTS
from simulator.api import run
from simulator.config import Workload
from simulator.config.profile import load_profiles
from simulator.step_result import StepResult
from simulator.traces.classes import CLASSES
from tests.support import runs

ROOT = Path(__file__).resolve().parents[2]

SLOWER = {"alone": 1.25, "ddp2": 1.0, "pp2": 0.8, "tp2": 1.6}

LAYOUTS: dict[str, dict[str, object]] = {
    "alone": {},
    "ddp2": {"dp": 2},
    "pp2": {"pp": 2, "schedule": "gpipe"},
    "tp2": {"tp": 2},
}


_STEPS: dict[str, StepResult] = {}


@pytest.fixture(scope="module")
def equal_jobs_are_played_once() -> Iterator[None]:
    """Let the comparisons of a file, each of which simulates the same few jobs, share their steps.

    Jobs are equal where their profiles are too. Steps are kept for the files that come later."""

    def play_once(workload: Workload) -> StepResult:
        profiles = load_profiles(workload.calibrations, workload.training)
        key = workload.model_dump_json() + repr(profiles)
        if key not in _STEPS:
            _STEPS[key] = run(workload)
        return _STEPS[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calibration.predict.predictions.run", play_once)
        yield


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs that went well, one that failed, one that was never made, one of another version of its file."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "measured").mkdir()
    for name, layout in LAYOUTS.items():
        runs.record(folder / "measured", runs.workload(folder, name, layout), SLOWER[name], more_memory=1.1)
    failed = runs.workload(folder, "tp4", {"tp": 4})
    runs.save(folder / "measured", failed, "failed", "2030-01-01T00:00:00+00:00", "CUDA out of\nmemory")
    runs.workload(folder, "dp4", {"dp": 4})
    changed = runs.workload(folder, "pp4", {"pp": 4})
    runs.record(folder / "measured", changed, 1.0)
    changed.write_text(changed.read_text() + "\n", encoding="utf-8")
    return folder


def compare(made: Path, out: Path, *more: str) -> int:
    workloads = [str(path) for path in sorted(made.glob("*.yaml"))]
    return main(["compare", *workloads, "--measured", str(made / "measured"), "--out", str(out), *more])


ONLY_TABLES = "--no-pictures"


def suite(comparison: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [suite for suite in comparison["suites"] if suite["suite"] == name]
    return found


@pytest.fixture(scope="session")
def predictions(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Predictions of three of the runs."""
    path = tmp_path_factory.mktemp("predicted") / "predictions.json"
    workloads = [str(made / f"{name}.yaml") for name in ("alone", "ddp2", "pp2")]
    assert main(["predict", *workloads, "--out", str(path)]) == 0
    return path


def with_value(*keys: Any, to: Any) -> Callable[[dict[str, Any]], Any]:
    """Puts a value into a record."""

    def change(record: dict[str, Any]) -> None:
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = to

    return change


def with_changed(made: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The records and timelines of the real runs once more, in ``folder``, the record of ``ddp2`` changed."""
    measured = folder / "measured"
    shutil.copytree(made / "measured", measured)
    record = json.loads((measured / "ddp2.json").read_text())
    change(record)
    (measured / "ddp2.json").write_text(json.dumps(record))
    return measured


def reasons_of(made: Path, folder: Path) -> dict[str, str]:
    """Return the reasons of two runs in ``folder``, of which one at least can be compared."""
    files = [str(made / f"{name}.yaml") for name in ("alone", "ddp2")]
    out = folder / "out"
    assert main(["compare", *files, "--measured", str(folder / "measured"), "--out", str(out), ONLY_TABLES]) == 0
    return {row["name"]: row["reason"] for row in json.loads((out / "comparison.json").read_text())["rows"]}


def figures(step_s: float) -> Figures:
    return Figures(step_s, None, (), dict.fromkeys((*CLASSES, *chain(*PARTS.values())), (0.0,)), None, None)
