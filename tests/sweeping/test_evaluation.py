"""Outcomes of points: the figures of `run`, keys that follow from all that figures follow from, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.output.sweep_figures import FIGURES
from simulator.sweeping.evaluation import evaluate
from simulator.sweeping.key import FIGURELESS
from simulator.sweeping.outcome import Status
from simulator.sweeping.point import Point
from tests.support.jobs import job
from tests.support.sweeps import SMALLEST, write_job

JOBS: dict[str, dict[str, Any]] = {
    "pipeline": job(parallelism={"tp": 2, "pp": 2, "dp": 2}),
    "steady period": job(parallelism={"pp": 2, "schedule": "zb_h2"}),
    "too large": job(model={"layers": 8, "hidden": 8192, "heads": 64, "vocab": 1024}),
    "offloaded": job(parallelism={"dp": 2, "zero": 1, "offload": {"optimizer": "cpu"}}),
    "priced": job(training__total_tokens=1e9, cluster={"name": "dgx_a100", "price_per_gpu_hour": 2.0}),
}


@pytest.mark.parametrize("kind", JOBS)
def test_figures_are_those_of_run(kind: str) -> None:
    """Under the same names, with four more: the share of exposed communication, what memory is left, the ends of the
    interval in which the step would be measured. Jobs without stages have no bubble."""
    figures = evaluate(Point(0, JOBS[kind], {})).figures
    report = simulator.run(JOBS[kind]).to_dict()
    everything = report | report["memory"] | report.get("run", {})
    exposed = sum(report["time_breakdown_s"]["exposed"].values())
    everything["exposed_communication_fraction"] = exposed / report["step_time_s"]
    everything["headroom_bytes"] = report["memory"]["capacity_bytes"] - report["memory"]["peak_bytes"]
    ends = ("step_time_low_s", "step_time_high_s")
    judged = report["accuracy"] is not None
    if judged:
        everything |= dict(zip(ends, report["accuracy"]["interval_s"], strict=True))
    assert dict(figures) == {name: everything[name] for name in figures}
    priced = set() if kind == "priced" else {"days", "gpu_hours", "cost"}
    unstaged = {"bubble_fraction"} if report["bubble_fraction"] is None else set()
    assert (report["parallelism"]["pp"] == 1) == bool(unstaged)
    assert set(FIGURES) - set(figures) == priced | unstaged | (set() if judged else set(ends))
    assert figures["fits"] is (kind != "too large")
    assert [type(figures[name]) for name in figures] == [FIGURES[name].kind for name in figures]


def test_headroom_is_that_of_the_fullest_gpu_of_unlike_ones() -> None:
    """The GPU with most bytes need not be the one with least left."""
    groups = [{"count": 1, "node": "dgx_a100"}, {"count": 1, "node": "dgx_h200"}]
    unlike = job(
        parallelism={"dp": 16}, cluster={"name": "both", "groups": groups, "fabric": {"kind": "fat_tree", "radix": 64}}
    )
    figures = evaluate(Point(0, unlike, {})).figures
    stages = simulator.run(unlike).memories
    assert figures["headroom_bytes"] == min(one.capacity - one.total for one in stages)
    assert len({one.capacity for one in stages}) == 2


def test_a_refused_point_says_why_and_names_no_option() -> None:
    outcome = evaluate(Point(0, job(), {"parallelism.tp": 3}))
    assert (outcome.status, outcome.figures) == (Status.REFUSED, {})
    assert outcome.error.startswith("parallelism.tp: 8 heads do not divide by tp 3; found: 3; allowed: 1, 2, 4, 8")


def test_a_refused_point_names_a_shipped_workload_and_no_path_of_this_machine() -> None:
    """96 layers of the file do not divide over 5 stages."""
    error = evaluate(Point(0, "gpt175b_3d", {"parallelism.pp": 5})).error
    assert error.startswith("gpt175b_3d: parallelism.layers_per_stage: 96 layers do not divide evenly")
    assert "/" not in error


def test_a_refused_point_of_a_file_has_its_path(tmp_path: Path) -> None:
    path = write_job(tmp_path, training={"seq": 0, "global_batch": 2})
    assert evaluate(Point(0, path, {})).error.startswith(f"{path}: training.seq: is out of range")


def test_several_reasons_are_told_in_one_line() -> None:
    outcome = evaluate(Point(0, SMALLEST, {"model.layers": 0, "training.seq": 0}))
    assert outcome.error.count("is out of range") == 2
    assert "\n" not in outcome.error


def test_what_only_a_simulation_finds_out_is_a_refusal_too() -> None:
    """A search for a schedule without memory for a single micro-batch."""
    tight = job(parallelism={"pp": 2, "schedule": "zb_auto", "zb_memory_limit": 1e-6})
    outcome = evaluate(Point(0, tight, {}))
    assert outcome.status == Status.REFUSED
    assert "zb_memory_limit" in outcome.error


def test_a_simulator_that_breaks_down_fails_one_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("simulator.sweeping.evaluation.run_step", breaks)
    outcome = evaluate(Point(0, SMALLEST, {}))
    assert outcome.status == Status.FAILED
    assert outcome.error.startswith("the simulator broke down: ZeroDivisionError: by nothing (breaks, line ")


def test_a_point_that_is_finished_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    key = evaluate(Point(0, SMALLEST, {})).key
    monkeypatch.setattr("simulator.sweeping.evaluation.run_step", None)
    assert evaluate(Point(0, SMALLEST, {}), {key}).status == Status.KEPT


def key(workload: Any, **changes: Any) -> str:
    return evaluate(Point(0, workload, {name.replace("__", "."): value for name, value in changes.items()})).key


def test_points_that_come_to_the_same_job_have_one_key(tmp_path: Path) -> None:
    """Defaults written out, numbers written otherwise, a file in place of a mapping, another name."""
    whole = key(SMALLEST)
    assert key(SMALLEST, parallelism__tp=1, training__seq=128.0, parallelism__schedule="1f1b") == whole
    assert key(write_job(tmp_path, "other")) == whole
    assert key({**SMALLEST, "note": "x"}) == whole


def test_whatever_figures_follow_from_changes_the_key(tmp_path: Path) -> None:
    from simulator.config import catalog

    profile = tmp_path / "mine.yaml"
    text = (catalog.FOLDERS["profile"] / "a100-sxm-80gb.yaml").read_text()
    profile.write_text(text.replace("name: a100-sxm-80gb", "name: mine"))
    keys = [
        key(SMALLEST),
        key(SMALLEST, seed=1),
        key(SMALLEST, model__layers=2),
        key(SMALLEST, cluster__nodes=2),
        key(SMALLEST, cluster__node={"nics": {"bandwidth_bps": 1e9}}),
        key(SMALLEST, calibration=str(profile)),
        key(SMALLEST, training__attention_kernel="flash2"),
        key(SMALLEST, stack="a100-vtrain"),
    ]
    profile.write_text(text.replace("name: a100-sxm-80gb", "name: mine").replace("date: ", "date: 1"))
    assert len({*keys, key(SMALLEST, calibration=str(profile))}) == len(keys) + 1


def test_a_schedule_of_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    def written(order: str) -> str:
        (tmp_path / "s.csv").write_text(order)
        return key(job(parallelism__pp=2, training__global_batch=2), parallelism__schedule=str(tmp_path / "s.csv"))

    gpipe, alternating = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert written(gpipe) != written(alternating)


def test_another_version_of_the_simulator_has_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(SMALLEST)
    monkeypatch.setattr("simulator.sweeping.key.simulator_version", lambda: "0.0.0")
    assert key(SMALLEST) != before


def test_packages_whose_sources_do_not_count_are_those_that_no_step_needs() -> None:
    """A process that simulates two steps imports all others, and two of those that do not count: pictures, sweeps."""
    code = """
import sys
from simulator.sweeping.evaluation import evaluate
from simulator.sweeping.point import Point
whole = {"parallelism.pp": 1, "parallelism.vpp": 1, "parallelism.schedule": "1f1b"}
for workload in ("gpt22b_tp8", "mixtral_8x7b"):
    assert evaluate(Point(0, workload, {"model.layers": 4, **whole})).figures
print(*{name.split(".")[1] for name in sys.modules if name.startswith("simulator.")})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages = {path.parent.name for path in Path(simulator.__file__).parent.glob("*/*.py")}
    needed = packages & set(done.stdout.split()) - {"output", "sweeping"}
    assert set(FIGURELESS) == packages - needed


def test_outcomes_are_plain_data() -> None:
    outcome = evaluate(Point(0, SMALLEST, {}))
    json.dumps(dict(outcome.figures), allow_nan=False)


@pytest.mark.parametrize(("cluster", "judged"), [("dgx_a100", True), ("mi300x", False)])
def test_a_point_has_an_interval_where_steps_like_it_were_measured(cluster: str, judged: bool) -> None:
    figures = evaluate(Point(0, "gpt22b_tp8", {"cluster": cluster, "model.layers": 4})).figures
    assert ("step_time_low_s" in figures) is judged


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("training.adapters", {"rank": 8, "targets": ["q", "v"]}, {"rank": 8, "targets": ["v", "q"]}),
        ("model.biases", ["qkv", "o"], ["o", "qkv"]),
        ("training.freeze", ["embedding", "head"], ["head", "embedding"]),
    ],
)
def test_lists_of_the_same_in_another_order_are_one_job(key: str, one: object, other: object) -> None:
    """Two settings of a sweep that differ in the order of such a list share one simulation; without its last they are
    two jobs."""
    keys = [evaluate(Point(0, SMALLEST, {key: value})).key for value in (one, other)]
    assert keys[0] == keys[1]
    fewer = {**one, "targets": one["targets"][:1]} if isinstance(one, dict) else list(one)[:1]  # type: ignore[call-overload]
    assert evaluate(Point(0, SMALLEST, {key: fewer})).key != keys[0]
