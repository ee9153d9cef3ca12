"""Results of a step, a bare schedule and shared jobs: what all have in common."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import simulator
from simulator.api import run
from simulator.output.summary import opening
from tests.support.jobs import job
from tests.support.traces import trace_problems


def shared() -> simulator.SharedResult:
    return simulator.share([job(parallelism__dp=2), job(parallelism__dp=2, parallelism__pp=2)])


#: One of every kind of result.
RESULTS: dict[str, Callable[[], simulator.Result]] = {
    "step": lambda: simulator.run(job(parallelism__pp=2)),
    "schedule": lambda: simulator.schedule("zb_h1", 2, 4),
    "shared": shared,
}


@pytest.mark.parametrize("kind", RESULTS)
def test_every_result_has_figures_rows_a_picture_and_a_few_lines(kind: str) -> None:
    result = RESULTS[kind]()
    assert isinstance(result, simulator.Result)
    answer = result.to_dict()
    assert list(answer)[:3] == ["schema_version", "command", "warnings"]
    assert (answer["schema_version"], answer["command"]) == (1, "schedule" if kind == "schedule" else "run")
    assert answer["warnings"] == result.warnings
    json.dumps(answer, allow_nan=False)
    assert {"rank", "lane", "name", "start_s", "end_s"} <= set(result.timeline.columns)
    assert isinstance(result.gantt(), Figure)
    assert 1 <= len(repr(result).splitlines()) <= 24


@pytest.mark.parametrize(
    ("kind", "files"), [("step", ["t.json"]), ("schedule", ["t.json"]), ("shared", ["t.1.json", "t.2.json"])]
)
def test_every_result_writes_a_trace(kind: str, files: list[str], tmp_path: Path) -> None:
    """Shared jobs write one each, as ranks of one would be taken for ranks of another."""
    RESULTS[kind]().save_trace(tmp_path / "t.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    for name in files:
        assert trace_problems(tmp_path / name) == []


def test_traces_of_shared_jobs_keep_both_suffixes(tmp_path: Path) -> None:
    shared().save_trace(tmp_path / "t.json.gz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.1.json.gz", "t.2.json.gz"]


def test_rows_of_shared_jobs_are_those_of_each_under_its_name() -> None:
    result = shared()
    rows = result.timeline
    assert rows.columns[0] == "job"
    for one in result.results:
        assert len(rows[rows["job"] == one.job_name]) == one.spans.n_rows


def test_a_picture_of_shared_jobs_has_a_panel_each() -> None:
    result = shared()
    titles = [axes.get_title(loc="left") for axes in result.gantt().axes]
    assert titles == [f"{number}. {one.title}" for number, one in enumerate(result.results, 1)]


def test_one_gpu_is_not_gpus() -> None:
    assert " on 1 GPU of " in opening(run(job(training__global_batch=4)).to_dict())
