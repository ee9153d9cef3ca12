"""`python -m calibration predict` and `compare`: every run has a row, what was predicted before is told from the rest.

Runs are made here from simulated ones (`runs.record`), slower by a known factor, so that every error is known: of a run
that takes f times as long, (simulated - measured) / measured is 1 / f - 1.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from calibration.__main__ import main
from calibration.commits import commit_of, first_with, sha256
from calibration.compare.comparison import Row, class_s, order, shares, suites
from calibration.compare.figures import Figures, pipelines, simulated_figures
from calibration.compare.hosts import with_host
from calibration.compare.kernels import PARTS, Kernels, binned, measured_kernels, simulated_kernels
from calibration.compare.measured import read_measured
from calibration.compare.meetings import Meetings, meetings
from calibration.compare.record import Memory
from calibration.compare.software import with_software
from calibration.fit.hosts import Pace, probe_of
from calibration.predict.predictions import read_predictions
from simulator.api import run
from simulator.cluster import build_cluster
from simulator.config import load_workload
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.traces.classes import CLASSES, simulated_class
from simulator.validation.suite import Bounds
from tests.support import runs

ROOT = Path(__file__).resolve().parents[2]
SLOWER = {"alone": 1.25, "ddp2": 1.0, "pp2": 0.8, "tp2": 1.6}
LAYOUTS: dict[str, dict[str, object]] = {
    "alone": {},
    "ddp2": {"dp": 2},
    "pp2": {"pp": 2, "schedule": "gpipe"},
    "tp2": {"tp": 2},
}


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def compared(made: Path) -> dict[str, Any]:
    assert compare(made, made / "out") == 0
    return json.loads((made / "out" / "comparison.json").read_text())


def compare(made: Path, out: Path, *more: str) -> int:
    workloads = [str(path) for path in sorted(made.glob("*.yaml"))]
    return main(["compare", *workloads, "--measured", str(made / "measured"), "--out", str(out), *more])


ONLY_TABLES = "--no-pictures"


def suite(comparison: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [suite for suite in comparison["suites"] if suite["suite"] == name]
    return found


@pytest.mark.parametrize(
    ("reason", "says"), [("", ""), ("another program\nwas on the GPU", "another program was on the GPU")]
)
def test_memory_is_not_compared_where_the_record_says_why(tmp_path: Path, reason: str, says: str) -> None:
    """Step times of such a run are compared all the same: it took 1.25 times as long as simulated."""
    (tmp_path / "measured").mkdir()
    path = runs.workload(tmp_path, "alone", {})
    runs.record(tmp_path / "measured", path, 1.25, more_memory=2.0)
    file = tmp_path / "measured" / "alone.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(record | {"memory_reason": reason}), encoding="utf-8")
    assert compare(tmp_path, tmp_path / "out", ONLY_TABLES) == 0
    comparison = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
    (row,) = suite(comparison, "peak allocated memory")["rows"]
    assert suite(comparison, "step time")["rows"][0]["error"] == pytest.approx(1 / 1.25 - 1)
    assert says in (row["skipped"] or "")
    assert row["error"] == (None if says else pytest.approx(1 / 2 - 1))
    assert ("memory not compared" in (tmp_path / "out" / "table.txt").read_text(encoding="utf-8")) == bool(says)


def test_errors_are_what_the_runs_were_made_with(compared: dict[str, Any]) -> None:
    """Step times and every class of kernel are off by 1 / f - 1, memory by 1 / 1.1 - 1, whatever the layout; the
    bubble, a share, stays the same, exposed communication and MFU change with f."""
    expected = {name: 1 / f - 1 for name, f in SLOWER.items()}
    for found in compared["suites"]:
        of_memory = found["suite"] == "peak allocated memory"
        for row in found["rows"]:
            if row["error"] is not None:
                assert row["error"] == pytest.approx(1 / 1.1 - 1 if of_memory else expected[row["id"]], abs=1e-6)
    for data in compared["rows"]:
        row = Row.from_dict(data)
        if row.measured is None or row.simulated is None:
            continue
        f = SLOWER[row.name]
        assert row.profiled == pytest.approx(1.03)
        assert row.measured.exposed_s == pytest.approx(row.simulated.exposed_s * f)
        assert row.measured.mfu == pytest.approx(row.simulated.mfu / f)
        assert row.measured.bubble == (None if row.simulated.bubble is None else pytest.approx(row.simulated.bubble))
        assert (row.simulated.bubble is not None) == (row.name == "pp2")


def probed(folder: Path, workload: Path, ranks: Sequence[dict[str, Any]], **more: object) -> None:
    """A record of a run that tells of its hosts."""
    told = [{"rank": rank, "kernels": [], **one} for rank, one in enumerate(ranks)]
    more |= {"n_gpus": len(told), "step_time_s": {"median": 1.0, "spread": 0.0}, "ranks": told}
    runs.save(folder, workload, "ok", "2030-01-01", **more)


@pytest.mark.parametrize("slower", [1.0, 2.0, 5.0])
def test_a_run_is_simulated_on_hosts_as_fast_as_its_own(slower: float, made: Path, tmp_path: Path) -> None:
    """Two ranks of two steps, each between two probes: at first the second one's host is slower, then the first one's,
    ``slower`` than the profile has it in the mean, forward half as much; these count, unless the command says
    otherwise. Of a record that does not tell forward from backward both are as slow. Of a profile that tells what its
    own host took for the probe, that counts."""
    path = made / "pp2.yaml"
    workload = load_workload(path)
    usual = probe_of(Costs.from_profile(load_profile("h100-sxm-80gb"), workload.software))
    slow = Pace(usual.forward * slower / 2, usual.backward * slower)
    fast = Pace(*(1e-6 * seconds for seconds in slow))
    probes = [[fast, fast, slow], [slow, slow, fast]]
    probes[0][2] = Pace(2 * slow.forward, 2 * slow.backward)

    def speeds(ranks: list[dict[str, Any]], calibration: str) -> tuple[float, float]:
        probed(tmp_path, path, [{"host": one} for one in ranks])
        changes = with_host(tmp_path, path, {"cluster": "dgx_h100", "calibration": calibration})
        node = load_workload(path, changes).cluster.node_at(0)
        return node.host_speed, node.host_speed * node.autograd_speed

    told = [{"probe_s": [sum(p) for p in one], "probe_forward_s": [p.forward for p in one]} for one in probes]
    assert speeds(told, "h100-sxm-80gb") == pytest.approx((2 / slower, 1 / slower), rel=1e-3)
    whole = [{"probe_s": one["probe_s"]} for one in told]
    both = sum(usual) / sum(slow)
    assert speeds(whole, "h100-sxm-80gb") == pytest.approx((both, both), rel=1e-3)
    data = yaml.safe_load((ROOT / "calibration/profiles/h100-sxm-80gb.yaml").read_text())
    data["provenance"] |= {"host_forward_s": 3 * usual.forward, "host_backward_s": 5 * usual.backward}
    (tmp_path / "told.yaml").write_text(yaml.safe_dump(data | {"name": "told"}))
    assert speeds(told, str(tmp_path / "told.yaml")) == pytest.approx((6 / slower, 5 / slower), rel=1e-3)
    # Stages of a pipeline do not do the same: each is simulated on its own host.
    steady = [{"host": {"probe_s": [n * sum(usual)] * 2}, "place": {"pp": n - 1}} for n in (1, 2)]
    probed(tmp_path, path, steady)
    apart = build_cluster(load_workload(path, with_host(tmp_path, path, {"cluster": "dgx_h100"})).cluster)
    assert [on.host_speed for on in apart.gpus[:2]] == pytest.approx([1.0, 0.5], rel=1e-3)
    said = {"cluster.node.host_speed": 1.0}
    assert with_host(tmp_path, path, said) == said
    # Of a host whose autograd the command tells the record tells the rest.
    said = {"cluster.node.autograd_speed": 0.01}
    of_both = with_host(tmp_path, path, said)
    assert of_both["cluster.node.autograd_speed"] == 0.01
    assert of_both["cluster.node.host_speed"] == with_host(tmp_path, path, {})["cluster.node.host_speed"]
    assert not any("autograd_speed" in one for one in of_both["cluster.overrides"])
    assert with_host(tmp_path, made / "alone.yaml", {}) == {}


@pytest.mark.parametrize(("version", "batched"), [("2.11.0", True), ("2.12.1", False)])
def test_predictions_are_for_a_machine_like_that_of_runs_made_before(
    version: str, batched: bool, made: Path, tmp_path: Path
) -> None:
    """Hosts of three runs that take 2, 3 and 10 times as long forward as the profile's, and twice that backward: the
    middle one counts, of a pipeline its slower stage. A failed run tells nothing of hosts."""
    path = made / "alone.yaml"
    workload = load_workload(path)
    usual = probe_of(Costs.from_profile(load_profile("h100-sxm-80gb"), workload.software))

    def host(slower: float) -> dict[str, Any]:
        pace = Pace(slower * usual.forward, 2 * slower * usual.backward)
        return {"host": {"probe_s": [sum(pace)] * 2, "probe_forward_s": [pace.forward] * 2}}

    stages = {2.0: [host(2.0)], 3.0: [host(1.0) | {"place": {"pp": 0}}, host(3.0) | {"place": {"pp": 1}}]}
    for slower, ranks in {**stages, 10.0: [host(10.0)]}.items():
        named = tmp_path / f"run{slower:.0f}.yaml"
        named.write_text(path.read_text())
        probed(tmp_path, named, ranks, environment={"torch": version})
    runs.save(tmp_path, path, "failed", "2030-01-01", environment={"torch": version})
    command = ["predict", str(path), "--out", str(tmp_path / "out.txt"), "--like", str(tmp_path)]
    assert main([*command, "--set", "calibration=h100-sxm-80gb"]) == 0
    changes = json.loads((tmp_path / "out.txt").read_text())["changes"]
    assert changes.pop("parallelism.batch_p2p", False) == batched
    assert changes.pop("calibration") == "h100-sxm-80gb"
    assert changes == pytest.approx({"cluster.node.host_speed": 1 / 3, "cluster.node.autograd_speed": 0.5}, rel=1e-3)
    assert main([*command, "--set", "cluster.node.host_speed=0.8"]) == 0
    assert json.loads((tmp_path / "out.txt").read_text())["changes"]["cluster.node.host_speed"] == 0.8


def test_predictions_like_runs_that_were_not_probed_are_refused(made: Path, tmp_path: Path, capsys: Any) -> None:
    runs.save(tmp_path, made / "alone.yaml", "failed", "2030-01-01")
    command = ["predict", str(made / "alone.yaml"), "--out", str(tmp_path / "out.txt"), "--like", str(tmp_path)]
    assert main(command) == 2
    assert "no run there was probed" in capsys.readouterr().err
    assert not (tmp_path / "out.txt").exists()


@pytest.mark.parametrize(
    ("version", "batched"),
    [("2.11.0+cu130", True), ("2.9.1", True), ("2.12.0", False), ("2.13.0a0", False), ("", False)],
)
def test_pipelines_send_as_the_pytorch_of_the_run_does(version: str, batched: bool, tmp_path: Path) -> None:
    """In batches up to 2.11, unless the command says otherwise; GPipe waits for what it posts either way."""
    changes = {"calibration": "h100-sxm-80gb"}
    for schedule in ("interleaved", "gpipe"):
        path = runs.workload(tmp_path, schedule, {"pp": 2, "vpp": 1 + (schedule != "gpipe"), "schedule": schedule})
        runs.save(tmp_path, path, "failed", "2030-01-01", environment={"torch": version} if version else {})
        found = with_software(tmp_path, path, changes)
        assert found == {**changes, **({"parallelism.batch_p2p": True} if batched and schedule != "gpipe" else {})}
        said = {"parallelism.batch_p2p": False}
        assert with_software(tmp_path, path, said) == said


def test_no_run_is_left_out_and_no_mean_stands_alone(compared: dict[str, Any], made: Path) -> None:
    found = suite(compared, "step time")
    reasons = {row["id"]: row["skipped"] for row in found["rows"]}
    assert reasons == {
        **dict.fromkeys(LAYOUTS),
        "tp4": "failed: CUDA out of memory",
        "dp4": "not run",
        "pp4": "the workload file, or one that it names, has changed since it was run",
    }
    errors = [1 / f - 1 for f in SLOWER.values()]
    assert found["mean_abs"] == pytest.approx(np.mean(np.abs(errors)))
    assert found["median_abs"] == pytest.approx(np.median(np.abs(errors)))
    assert found["max_abs"] == pytest.approx(np.max(np.abs(errors)))
    assert found["bias"] == pytest.approx(np.mean(errors))
    text = (made / "out" / "table.txt").read_text()
    for name, reason in reasons.items():
        assert name in text
        assert (reason or "") in text
    with (made / "out" / "table.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert [row["run"] for row in table] == sorted(reasons, key=lambda name: (bool(reasons[name]), name))
    by_name = {row["run"]: row for row in table}
    assert float(by_name["tp2"]["step_time_s_error"]) == pytest.approx(1 / 1.6 - 1, rel=1e-4)
    assert by_name["tp4"]["reason"] == reasons["tp4"]
    assert by_name["tp4"]["step_time_s_measured"] == ""


def test_a_run_whose_steps_differ_stays_in_the_table_and_is_no_steady_one(made: Path, tmp_path: Path) -> None:
    """Steps that spread by a quarter of their median: two of three runs are steady."""
    measured = tmp_path / "measured"
    shutil.copytree(made / "measured", measured)
    runs.record(measured, made / "ddp2.yaml", 2.0, spread=0.25)
    workloads = [str(made / f"{name}.yaml") for name in ("alone", "ddp2", "pp2")]
    main(["compare", *workloads, "--measured", str(measured), "--out", str(tmp_path / "out"), ONLY_TABLES])
    comparison = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {row["name"]: row["spread"] for row in comparison["rows"]} == {"alone": 0.0, "ddp2": 0.25, "pp2": 0.0}
    assert [row["id"] for row in suite(comparison, "step time")["rows"]] == ["alone", "ddp2", "pp2"]
    steady = suite(comparison, "step time, steady runs")
    assert [row["id"] for row in steady["rows"]] == ["alone", "pp2"]
    assert steady["max_abs"] < suite(comparison, "step time")["max_abs"] == pytest.approx(0.5)


def test_pictures_are_drawn_of_what_was_measured(compared: dict[str, Any], made: Path) -> None:
    out = made / "out"
    drawn = sorted(str(path.relative_to(out)) for path in out.rglob("*.png"))
    assert drawn == ["classes.png", "figures.png", "step_times.png"] + [
        f"timelines/{name}.png" for name in sorted(LAYOUTS)
    ]
    assert all(path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 5_000 for path in out.rglob("*.png"))


@pytest.mark.parametrize(("max_mean", "max_row"), [(None, None), (30, None), (29, 40), (100, 38), (100, 37), (20, 100)])
def test_exit_status_says_whether_bounds_are_kept(
    made: Path, tmp_path: Path, max_mean: int | None, max_row: int | None
) -> None:
    """Errors are 20, 0, 25 and 37.5 %, so 20.6 in the mean; of four runs none is skipped."""
    bounds = [f"--max-{name}={value}" for name, value in (("mean", max_mean), ("row", max_row)) if value is not None]
    workloads = [str(made / f"{name}.yaml") for name in LAYOUTS]
    status = main(
        ["compare", *workloads, "--measured", str(made / "measured"), "--out", str(tmp_path), ONLY_TABLES, *bounds]
    )
    kept = (max_mean is None or max_mean >= 20.625) and (max_row is None or max_row >= 37.5)
    assert status == (0 if kept else 1)


def test_skipping_more_than_a_tenth_fails_a_bounded_comparison(made: Path, tmp_path: Path) -> None:
    assert compare(made, tmp_path, ONLY_TABLES, "--max-mean=100", "--max-row=100") == 1


def test_a_comparison_of_nothing_fails(made: Path, tmp_path: Path, capsys: Any) -> None:
    """With bounds or without; where there is one run, bounds alone say what may be missing."""
    (tmp_path / "none").mkdir()
    command = ["compare", *(str(made / f"{name}.yaml") for name in ("dp4", "tp4")), "--out", str(tmp_path / "out")]
    for folder in (tmp_path / "none", made / "measured"):
        assert main([*command, "--measured", str(folder)]) == 1
        assert "step time: no row could be compared (2 skipped)" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("*.png"))


def test_a_trial_without_gpus_is_no_measurement(made: Path, tmp_path: Path) -> None:
    """It has a row, with the reason, and a part in no mean and picture."""
    with_changed(made, tmp_path, lambda record: record["environment"].pop("gpu"))
    found = reasons_of(made, tmp_path, pictures=True)
    assert found == {"alone": "", "ddp2": "measured without a GPU"}
    comparison = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {one["n_skipped"] for one in comparison["suites"]} == {1}
    assert [path.name for path in (tmp_path / "out" / "timelines").iterdir()] == ["alone.png"]


def test_a_reason_makes_no_table_wider(compared: dict[str, Any], made: Path) -> None:
    """Reasons stand below it."""
    text = (made / "out" / "table.txt").read_text()
    head, *rows = text.split("\n\n")[1].splitlines()
    assert head.startswith(" run")
    assert len(rows) == len(compared["rows"]) + 1
    assert "failed: CUDA" not in "\n".join(rows)
    assert "\nnot compared:\n  dp4: not run\n" in text


@pytest.fixture(scope="module")
def predictions(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Predictions of three of the runs."""
    path = tmp_path_factory.mktemp("predicted") / "predictions.json"
    workloads = [str(made / f"{name}.yaml") for name in ("alone", "ddp2", "pp2")]
    assert main(["predict", *workloads, "--out", str(path)]) == 0
    return path


class TestPredictedBefore:
    """Predictions count as made before a run where they are in a commit that is older than the run, and unchanged."""

    @pytest.fixture
    def repository(self, predictions: Path, tmp_path: Path) -> Path:
        self.git(tmp_path, "init", "-q")
        shutil.copy(predictions, tmp_path)
        return tmp_path

    def git(self, folder: Path, *arguments: str, date: str | None = None) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        dated = os.environ | ({"GIT_COMMITTER_DATE": date} if date else {})
        try:
            subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, env=dated)
        except FileNotFoundError:
            pytest.skip("git is not installed")

    def commit(self, folder: Path, name: str = "predictions.json") -> None:
        self.git(folder, "add", name)
        self.git(folder, "commit", "-q", "-m", "predictions")

    def rows(
        self, made: Path, folder: Path, *more: str, changes: Sequence[str] = ()
    ) -> tuple[dict[str, Any], dict[str, str]]:
        files = [str(folder / name) for name in ("predictions.json", *more)]
        compare(made, folder / "out", ONLY_TABLES, *changes, *(f"--predictions={file}" for file in files))
        comparison = json.loads((folder / "out" / "comparison.json").read_text())
        return comparison, {row["name"]: row["not_before"] for row in comparison["rows"] if not row["reason"]}

    def test_committed_before(self, made: Path, repository: Path) -> None:
        """The runs are dated 2030."""
        self.commit(repository)
        comparison, why = self.rows(made, repository)
        assert why == {"alone": "", "ddp2": "", "pp2": "", "tp2": "not among the predictions"}
        found = suite(comparison, "step time, predicted before the run")
        assert [row["id"] for row in found["rows"]] == ["alone", "ddp2", "pp2"]
        assert found["max_abs"] == pytest.approx(0.25)
        known = commit_of(repository / "predictions.json")
        assert known is not None
        text = (repository / "out" / "table.txt").read_text()
        assert f"predictions committed: {known.id[:12]}" in text
        assert "measured runs: not committed" in text
        assert "measured: 2030-01-01" in text
        assert "measured by: python -m calibration train" in text
        assert "hardware: NVIDIA H100 80GB HBM3, torch 2.11" in text

    def test_not_committed_or_changed_since(self, made: Path, repository: Path) -> None:
        assert set(self.rows(made, repository)[1].values()) >= {"the predictions are not committed"}
        self.commit(repository)
        with (repository / "predictions.json").open("a") as stream:
            stream.write("\n")
        comparison, why = self.rows(made, repository)
        assert why["alone"] == "the predictions were changed and not committed"
        assert suite(comparison, "step time, predicted before the run")["mean_abs"] is None

    def test_runs_that_were_predicted_later_have_a_file_and_a_commit_of_their_own(
        self, made: Path, repository: Path, capsys: Any
    ) -> None:
        """What is committed first stays so when more runs are predicted; no run counts twice."""
        self.commit(repository)
        later = repository / "later.json"
        assert main(["predict", str(made / "tp2.yaml"), "--out", str(later)]) == 0
        _, why = self.rows(made, repository, "later.json")
        assert why == {"alone": "", "ddp2": "", "pp2": "", "tp2": "the predictions are not committed"}
        self.commit(repository, "later.json")
        comparison, why = self.rows(made, repository, "later.json")
        assert set(why.values()) == {""}
        assert len(suite(comparison, "step time, predicted before the run")["rows"]) == 4
        first, second = (commit_of(repository / name) for name in ("predictions.json", "later.json"))
        said = comparison["commits"]
        assert said["predictions of predictions.json committed"] == str(first)
        assert said["predictions of later.json committed"] == str(second)

    def test_the_last_prediction_before_a_run_counts(self, made: Path, repository: Path, tmp_path: Path) -> None:
        """Committed at noon, at one and at two; of the runs, dated by hand, one is of half past one, one of today."""
        for hour, factor in ((12, 2), (13, 3), (14, 4)):
            path = repository / f"{hour}.json"
            content = json.loads((repository / "predictions.json").read_text())
            for row in content["predictions"]:
                row["figures"]["step_time_s"] *= factor
            path.write_text(json.dumps(content))
            self.git(repository, "add", path.name)
            self.git(repository, "commit", "-q", "-m", path.stem, date=f"2030-01-01T{hour}:00:00+00:00")
        measured = tmp_path / "measured"
        shutil.copytree(made / "measured", measured)
        runs.record(measured, made / "alone.yaml", 1.0, date="2030-01-01T13:30:00+00:00")
        files = [f"--predictions={repository / f'{hour}.json'}" for hour in (14, 12, 13)]
        arguments = ["--measured", str(measured), "--out", str(tmp_path / "out"), ONLY_TABLES, *files]
        main(["compare", str(made / "alone.yaml"), *arguments])
        (row,) = json.loads((tmp_path / "out" / "comparison.json").read_text())["rows"]
        assert row["committed"]["step_time_s"] == pytest.approx(3 * row["simulated"]["step_time_s"])

    def test_what_all_were_predicted_with_is_told(self, made: Path, repository: Path) -> None:
        """A host measured before the runs makes other predictions than the profile's."""
        path, host = repository / "predictions.json", "cluster.node.host_speed"
        assert main(["predict", str(made / "alone.yaml"), "--set", f"{host}=0.01", "--out", str(path)]) == 0
        self.commit(repository)
        comparison, _ = self.rows(made, repository)
        assert comparison["commits"]["predictions made with"] == f"--set {host}=0.01"
        (row,) = (row for row in comparison["rows"] if row["name"] == "alone")
        assert row["committed"]["step_time_s"] > 2 * row["simulated"]["step_time_s"]

    def test_predicted_for_another_gpu(self, made: Path, repository: Path) -> None:
        self.commit(repository)
        on_h200s = with_changed(made, repository, _put("environment", "gpu", to="NVIDIA H200"))
        arguments = ["--measured", str(on_h200s), "--out", str(repository / "out"), ONLY_TABLES]
        arguments += ["--predictions", str(repository / "predictions.json"), "--set", "cluster=hgx_h200_4gpu"]
        assert main(["compare", str(made / "ddp2.yaml"), *arguments]) == 0
        (row,) = json.loads((repository / "out" / "comparison.json").read_text())["rows"]
        assert (row["reason"], row["not_before"]) == ("", "predicted for h100-sxm-80gb")

    def test_what_counts_is_the_first_commit_of_what_it_says(self, repository: Path) -> None:
        """Later predictions may be committed and taken back."""
        path = repository / "predictions.json"
        self.commit(repository)
        first, text = first_with(path), path.read_text()
        for content in (text + "\n", text):
            path.write_text(content)
            self.commit(repository)
        last = commit_of(path)
        assert first is not None
        assert last is not None
        assert last.id != first.id
        assert first_with(path) == first

    def test_committed_after_the_run(self, made: Path, repository: Path, tmp_path: Path) -> None:
        self.commit(repository)
        measured = tmp_path / "measured"
        measured.mkdir()
        runs.record(measured, made / "alone.yaml", 1.0, date="2020-01-01T00:00:00+00:00")
        arguments = ["--measured", str(measured), "--out", str(tmp_path / "out"), ONLY_TABLES]
        main(["compare", str(made / "alone.yaml"), *arguments, "--predictions", str(repository / "predictions.json")])
        (row,) = json.loads((tmp_path / "out" / "comparison.json").read_text())["rows"]
        assert "after the run of 2020-01-01" in row["not_before"]

    def test_what_was_predicted_then_is_held_against_the_run_and_a_changed_profile_is_told(
        self, made: Path, repository: Path
    ) -> None:
        """The simulator may have been improved since: the suite of predictions has the figures of then."""
        path = repository / "predictions.json"
        content = json.loads(path.read_text())
        for row in content["predictions"]:
            row["figures"]["step_time_s"] *= 2
        content["profiles"] = dict.fromkeys(content["profiles"], "0" * 64)
        path.write_text(json.dumps(content))
        self.commit(repository)
        comparison, _ = self.rows(made, repository)
        then = {row["id"]: row["error"] for row in suite(comparison, "step time, predicted before the run")["rows"]}
        assert then == pytest.approx({name: 2 / SLOWER[name] - 1 for name in ("alone", "ddp2", "pp2")})
        assert "has changed since the predictions: 0000000000000000 then" in comparison["warnings"][0]


def test_predictions_say_what_they_came_from(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    assert main(["predict", str(made / "pp2.yaml"), "--out", str(path)]) == 0
    content = json.loads(path.read_text())
    (row,) = content["predictions"]
    result = run(made / "pp2.yaml")
    assert Figures.from_dict(row["figures"]) == simulated_figures(result)
    assert row["time_breakdown_s"] == result.to_dict()["time_breakdown_s"]
    assert set(content["profiles"]) == {"h100-sxm-80gb"}
    assert datetime.datetime.fromisoformat(content["date"]).tzinfo is not None


def _put(*keys: Any, to: Any) -> Callable[[dict[str, Any]], Any]:
    """Puts a value into a record."""

    def change(record: dict[str, Any]) -> None:
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = to

    return change


def _probes(*of_ranks: tuple[list[float], list[float]]) -> Callable[[dict[str, Any]], Any]:
    """Puts probes of all ranks, and the forward ones, into a record."""

    def change(record: dict[str, Any]) -> None:
        for rank, (whole, forward) in zip(record["ranks"], of_ranks, strict=True):
            rank["host"] = {"probe_s": whole, "probe_forward_s": forward}

    return change


GOOD = ([0.08, 0.08], [0.03, 0.03])


def test_bytes_that_earlier_runs_left_are_not_the_runs() -> None:
    assert Memory(steady_allocated_bytes=10, left_allocated_bytes=4).run_bytes == 10 - 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_put("format", to=2), "format: no record of a run found: 2"),
        (_put("name", to="tp2"), "is of another run"),
        (_put("date", to=5), "date:"),
        (_put("environment", to=[]), "environment:"),
        (_put("step_time_s", "median", to=math.nan), "step_time_s.median: must be a finite number"),
        (_put("step_time_s", "median", to=math.inf), "step_time_s.median"),
        (_put("step_time_s", "median", to="abc"), "step_time_s.median"),
        (_put("step_time_s", "median", to=-1.0), "step_time_s.median: is out of range"),
        (lambda record: record.pop("step_time_s"), "step_time_s: a required key"),
        (lambda record: record["ranks"].pop(), "ranks: not one entry for each rank"),
        (lambda record: record["ranks"].append(record["ranks"][0]), "ranks: not one entry for each rank"),
        (_put("ranks", to={"a": 1}), "ranks"),
        (_put("ranks", 0, "memory", "steady_allocated_bytes", to=0), "ranks[0].memory.steady_allocated_bytes"),
        (_put("ranks", 0, "memory", "left_allocated_bytes", to=10**15), "ranks.memory.left_allocated_bytes"),
        (_put("ranks", 0, "memory", to={}), "ranks.memory: not of all ranks alike"),
        (_put("ranks", 1, "kernels", 0, "seconds", to=math.nan), "ranks[1].kernels[0].seconds"),
        (_put("ranks", 1, "kernels", 0, "class", to="foo"), "ranks[1].kernels[0].class"),
        (_put("ranks", 1, "kernels", 0, "seconds", to=1.0), "is not the timeline of this run"),
        (_probes(GOOD, ([0.08] * 3, [0.03] * 3)), "host.probe_s: not of all ranks alike"),
        (_probes(GOOD, ([0.08] * 2, [0.03])), "unlike numbers"),
        (_probes(([0.08], [0.03]), ([0.08], [0.03])), "only one probe"),
        (_probes(GOOD, ([0.0] * 2, [0.0] * 2)), "ranks[1].host.probe_s[0]: is out of range"),
        (_probes(GOOD, ([0.08] * 2, [0.08] * 2)), "not less than probe_s"),
        (_probes(GOOD, ([math.nan] * 2, [0.03] * 2)), "ranks[1].host.probe_s[0]"),
    ],
)
def test_a_record_that_cannot_be_used_has_its_reason(
    made: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    assert words in reason_of(made, with_changed(made, tmp_path, change))


def with_changed(made: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The records and timelines of the real runs once more, in ``folder``, the record of ``ddp2`` changed."""
    measured = folder / "measured"
    shutil.copytree(made / "measured", measured)
    record = json.loads((measured / "ddp2.json").read_text())
    change(record)
    (measured / "ddp2.json").write_text(json.dumps(record))
    return measured


def reason_of(made: Path, measured: Path) -> str:
    path = made / "ddp2.yaml"
    return read_measured(measured, path, load_workload(path), Meetings({}, {})).reason


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        ("NVIDIA H100 80GB HBM3", ""),
        ("NVIDIA H200", "run on NVIDIA H200, simulated on h100-sxm-80gb"),
        ("NVIDIA GeForce RTX 4090", "run on NVIDIA GeForce RTX 4090, simulated on h100-sxm-80gb"),
        (None, "measured without a GPU"),
    ],
)
def test_a_run_on_other_gpus_is_not_compared(gpu: str | None, reason: str, made: Path, tmp_path: Path) -> None:
    environment = {"torch": "2.11"} | ({"gpu": gpu} if gpu else {})
    assert reason_of(made, with_changed(made, tmp_path, _put("environment", to=environment))) == reason


@pytest.mark.parametrize(
    ("nvls", "cluster", "sharp"),
    [
        (True, "hgx_h100_4gpu", True),
        (False, "hgx_h100_4gpu", None),
        (False, "dgx_h100", False),
        (True, "dgx_h100", None),
        (None, "dgx_h100", None),
    ],
)
def test_switches_sum_up_where_they_did_in_the_run(
    nvls: bool | None, cluster: str, sharp: bool | None, tmp_path: Path
) -> None:
    """The key is set where the cluster says otherwise; of a GPU alone it says nothing, nor where the command does."""
    key, changes = "cluster.node.nvlink.sharp", {"cluster": cluster}
    for name, layout in (("tp2", {"tp": 2}), ("one", {})):
        path = runs.workload(tmp_path, name, layout)
        runs.save(tmp_path, path, "failed", "2030-01-01", environment={"nvls": nvls})
        expected = {} if sharp is None or name == "one" else {key: sharp}
        assert with_software(tmp_path, path, changes) == {**changes, **expected}
        said = {**changes, key: not sharp}
        assert with_software(tmp_path, path, said) == said


def test_a_run_goes_by_the_name_that_its_workload_says(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(json.dumps({"name": "ddp2", **json.loads((made / "ddp2.yaml").read_text())}))
    measured = with_changed(made, tmp_path, _put("workload", "sha256", to=sha256(path.read_text())))
    found = read_measured(measured, path, load_workload(path), Meetings({}, {}))
    assert (found.reason, found.record is not None) == ("", True)


def test_a_name_that_no_file_can_have_is_refused(made: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(json.dumps({"name": "a/b", **json.loads((made / "ddp2.yaml").read_text())}))
    assert main(["predict", str(path), "--out", str(tmp_path / "p.json")]) == 2
    assert "file.yaml: name: a run's files cannot be called so" in capsys.readouterr().err


def test_a_run_of_another_model_in_the_file_that_its_workload_names_is_not_compared(made: Path, tmp_path: Path) -> None:
    """The workload's text stays as it is. A key that the record does not have yet says nothing."""
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 512,
        "num_attention_heads": 8,
        "intermediate_size": 1024,
        "vocab_size": 1024,
    }
    data = json.loads((made / "alone.yaml").read_text()) | {"model": {"hf_config": "config.json"}}
    path = tmp_path / "w.yaml"
    path.write_text(json.dumps(data))
    reasons = []
    for layers in (4, 5):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        if layers == 4:
            runs.record(tmp_path, path, 1.0)
            record = json.loads((tmp_path / "w.json").read_text())
            record["workload"]["resolved"] = load_workload(path).model_dump(mode="json")
            del record["workload"]["resolved"]["training"]["grad_dtype"]
            (tmp_path / "w.json").write_text(json.dumps(record))
        known = load_workload(path)
        reasons.append(read_measured(tmp_path, path, known, meetings(run(known))).reason)
    assert reasons == ["", "the workload file, or one that it names, has changed since it was run"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_put("step_time_s", "median", to=math.nan), "step_time_s.median: must be a finite number"),
        (_probes(([1e9] * 2, [5e8] * 2), ([1e9] * 2, [5e8] * 2)), "its probes give no speed of a host"),
    ],
)
def test_one_bad_record_leaves_the_others(
    made: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    with_changed(made, tmp_path, change)
    found = reasons_of(made, tmp_path)
    assert words in found["ddp2"]
    assert found["alone"] == ""


def reasons_of(made: Path, folder: Path, *, pictures: bool = False) -> dict[str, str]:
    """Of two runs in ``folder``, of which one at least can be compared."""
    files = [str(made / f"{name}.yaml") for name in ("alone", "ddp2")]
    out, flags = folder / "out", [] if pictures else [ONLY_TABLES]
    assert main(["compare", *files, "--measured", str(folder / "measured"), "--out", str(out), *flags]) == 0
    return {row["name"]: row["reason"] for row in json.loads((out / "comparison.json").read_text())["rows"]}


def _end(line: str, end: str) -> str:
    return f"{line.rpartition(',')[0]},{end}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text, _: text[:1], "is not the timeline of this run"),
        (lambda text, _: text + text[1:], "is not the timeline of this run"),
        (lambda text, _: [line for line in text if not line.startswith("1")], "is not the timeline of this run"),
        (lambda _, other: other, "is not the timeline of this run"),
        (lambda text, _: [*text[:40], text[40][:-30]], "line 41"),
        (lambda text, _: [text[0], _end(text[1], ""), *text[2:]], "end_s: line 2"),
        (lambda text, _: [text[0], _end(text[1], "nan"), *text[2:]], "end_s: line 2"),
        (lambda text, _: [text[0], "x" + text[1][1:], *text[2:]], "rank: line 2"),
        (lambda text, _: [text[0].replace("end_s", "stop"), *text[1:]], "lacks columns"),
        (lambda *_: [], "is no table"),
    ],
)
def test_a_timeline_that_is_not_the_runs_is_none(
    made: Path, tmp_path: Path, change: Callable[[list[str], list[str]], list[str]], words: str
) -> None:
    measured = tmp_path / "measured"
    shutil.copytree(made / "measured", measured)
    text, other = (
        gzip.decompress((measured / f"{name}.timeline.csv.gz").read_bytes()).decode().splitlines()
        for name in ("ddp2", "alone")
    )
    content = gzip.compress("\n".join(change(text, other)).encode())
    (measured / "ddp2.timeline.csv.gz").write_bytes(content)
    reason = reason_of(made, measured)
    assert words in reason
    assert "ddp2.timeline.csv.gz" in reason


@pytest.mark.parametrize("spoilt", [lambda packed: packed[: len(packed) // 2], lambda _: b"rank,stream", lambda _: b""])
def test_a_file_that_cannot_be_unpacked_is_said(made: Path, tmp_path: Path, spoilt: Callable[[bytes], bytes]) -> None:
    measured = tmp_path / "measured"
    shutil.copytree(made / "measured", measured)
    path = measured / "ddp2.timeline.csv.gz"
    path.write_bytes(spoilt(path.read_bytes()))
    assert "ddp2.timeline.csv.gz: " in reason_of(made, measured)


@pytest.mark.parametrize("text", ["", "not json", "[]", "null", '{"format": 1, "status": "ok"}'])
def test_a_file_that_is_no_record_is_said(made: Path, tmp_path: Path, text: str) -> None:
    measured = tmp_path / "measured"
    shutil.copytree(made / "measured", measured)
    (measured / "ddp2.json").write_text(text)
    assert "ddp2.json: " in reason_of(made, measured)


def test_an_unusable_call_is_refused(made: Path, tmp_path: Path, capsys: Any) -> None:
    alone = str(made / "alone.yaml")
    assert main(["compare", alone, "--measured", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert main(["compare", alone, "--measured", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert main(["predict", alone, alone, "--out", str(tmp_path / "p.json")]) == 2
    assert "two workloads of one name" in capsys.readouterr().err
    (tmp_path / "p.json").write_text("{}")
    with_file = ["--predictions", str(tmp_path / "p.json")]
    assert main(["compare", alone, "--measured", str(tmp_path), "--out", str(tmp_path / "o"), *with_file]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["compare", alone, "--measured", str(tmp_path), "--out", str(tmp_path / "o"), "--max-mean=-1"])


def test_kernels_are_compared_on_the_rank_that_is_furthest_off() -> None:
    """Two ranks take 2 and 1 s of products, 1.5 s each in the mean as simulated: the second is off by a half. Where no
    rank ran a class there is no error; figures from before ranks were told apart are means."""
    simulated, measured = ({"matmul": of} for of in ((1.5, 1.5), (2.0, 1.0)))
    row = Row(
        "a",
        2,
        "x",
        simulated=replace(figures(1.0), class_s=figures(1.0).class_s | simulated),
        measured=replace(figures(1.0), class_s=figures(1.0).class_s | measured),
    )
    assert class_s(row, "matmul") == (1.0, 1.5)
    assert class_s(row, "copy") == (0.0, 0.0)
    nothing = replace(row.simulated, class_s=row.simulated.class_s | {"waiting": (0.0, 0.0)})
    waited = replace(row.measured, class_s=row.measured.class_s | {"waiting": (1.0, 3.0)})
    assert class_s(replace(row, simulated=nothing, measured=waited), "waiting") == (3.0, 0.0)  # as far off, and more
    assert class_s(replace(row, measured=None), "matmul") == (None, 1.5)
    (found,) = [one for one in suites([row], Bounds(), predicted=False) if one["suite"] == "matmul kernels"]
    assert found["max_abs"] == pytest.approx(0.5)
    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row
    older = figures(1.0).to_dict() | {"class_s": {"matmul": 1.5}}
    assert Figures.from_dict(older).class_s["matmul"] == (1.5,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_put("format", to=9), "format: no file of predictions"),
        (_put("changes", to=[]), "changes: must be a mapping"),
        (_put("profiles", to={"a": 3}), "profiles.a: must be text"),
        (_put("predictions", to={}), "predictions: must be a list"),
        (_put("predictions", 0, "workload_sha256", to=1), "predictions[0].workload_sha256: must be text"),
        (_put("predictions", 0, "figures", to=[]), "predictions[0].figures"),
        (_put("predictions", 0, "figures", "step_time_s", to="x"), "figures.step_time_s: must be a number"),
        (_put("predictions", 0, "figures", "class_s", "matmul", to=[-1.0]), "figures.class_s"),
    ],
)
def test_bad_predictions_are_said_with_their_key(
    change: Callable[[dict[str, Any]], Any], words: str, made: Path, tmp_path: Path, capsys: Any
) -> None:
    path, alone = tmp_path / "p.json", str(made / "alone.yaml")
    assert main(["predict", alone, "--out", str(path)]) == 0
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    capsys.readouterr()
    command = ["compare", alone, "--measured", str(made / "measured"), "--predictions", str(path)]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err


def test_shipped_predictions_are_read() -> None:
    for path in (ROOT / "calibration" / "results").glob("predictions*.json"):
        assert read_predictions(path).figures


def refused_by_all(out: str, made: Path, tmp_path: Path) -> None:
    """A folder for results, by each of the four commands that have one."""
    alone = str(made / "alone.yaml")
    assert main(["compare", alone, "--measured", str(made / "measured"), "--out", out]) == 2
    assert main(["measure", "--device", "cpu", "--out", out]) == 2
    assert main(["train", "--device", "cpu", alone, "--out", out]) == 2
    measured = str(ROOT / "calibration" / "measurements" / "h100-sxm-80gb")
    profile = ["--base", "h100-sxm-80gb", "--out", str(tmp_path / "p.yaml")]
    assert main(["fit", measured, *profile, "--plots", out]) == 2


@pytest.mark.parametrize("name", ["file", "file/out"])
def test_results_go_into_no_file(name: str, made: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("kept")
    refused_by_all(str(tmp_path / name), made, tmp_path)
    said = capsys.readouterr().err
    assert said.count("which is a file" if "/" in name else "is a file, not a folder") == 4
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a folder in which none can be made")
@pytest.mark.parametrize("out", ["/proc", "/proc/x"])
def test_a_folder_that_cannot_be_made_is_said(out: str, made: Path, tmp_path: Path, capsys: Any) -> None:
    refused_by_all(out, made, tmp_path)
    assert capsys.readouterr().err.count("cannot be written to") == 4


def figures(step_s: float) -> Figures:
    return Figures(step_s, None, (), dict.fromkeys((*CLASSES, *chain(*PARTS.values())), (0.0,)), None, None)


def test_shares_of_a_step_are_judged_where_its_profile_took_as_long() -> None:
    """Differences in points of the step: of every run, and of those whose profiled step was no slower than timed ones.
    A run without a pipeline has no bubble, one without a measurement no row."""

    def side(step_s: float, exposed_s: float | None, bubble: float | None) -> Figures:
        return replace(figures(step_s), exposed_s=exposed_s, bubble=bubble)

    def row(name: str, measured: Figures | None, simulated: Figures, profiled: float | None) -> Row:
        return Row(name, 2, "w", measured=measured, simulated=simulated, profiled=profiled)

    exposed, bubble = shares(
        [
            row("a", side(2.0, 0.5, 0.2), side(1.0, 0.2, 0.15), 1.02),
            row("b", side(1.0, 0.4, None), side(1.0, 0.1, None), 1.5),
            row("c", side(1.0, 0.1, 0.1), side(1.0, 0.2, 0.3), None),
            row("d", None, side(1.0, 0.1, 0.3), None),
            row("e", side(1.0, 0.0, None), side(1.0, 0.0, None), 1.0),
        ]
    )
    assert [line["id"] for line in exposed["rows"]] == ["a", "b", "c"]
    assert exposed["all"] == {"n": 3} | {
        name: pytest.approx(value) for name, value in {"mean_abs": 0.15, "max_abs": 0.3, "bias": -0.25 / 3}.items()
    }
    assert exposed["as_timed"]["n"] == bubble["as_timed"]["n"] == 1
    for found in (exposed, bubble):
        assert found["as_timed"]["bias"] == pytest.approx(-0.05)
    assert [line["id"] for line in bubble["rows"]] == ["a", "c"]
    assert bubble["all"]["bias"] == pytest.approx(0.075)
    assert [found["all"] for found in shares([])] == [{"n": 0}, {"n": 0}]


def test_order_of_layouts() -> None:
    """a, b and c do the same work and are measured 1.00, 1.02 and 1.10 s: a and b are too close to have an order, a and
    c come in the measured order, b and c do not. Of d, which does other work, nothing is said."""
    rows = [
        Row(name, 1, work, simulated=figures(simulated), measured=figures(measured))
        for name, work, measured, simulated in (
            ("a", "x", 1.00, 1.00),
            ("b", "x", 1.02, 1.20),
            ("c", "x", 1.10, 1.10),
            ("d", "y", 9.00, 0.10),
        )
    ]
    found = order([*rows, Row("e", 1, "x", reason="not run")])
    assert (found["pairs"], found["in_measured_order"]) == (2, 1)
    assert [pair["runs"] for pair in found["wrong"]] == [["b", "c"]]
    assert order([replace(rows[0], simulated=figures(5.0)), rows[1]])["pairs"] == 0


def columns(*rows: tuple[int, str, str, float, float]) -> Kernels:
    rank, name, kind, start, end = zip(*rows, strict=True)
    return Kernels(
        np.array(rank), np.array([CLASSES.index(n) for n in name]), np.array(kind, dtype=object),
        np.array(start, dtype=float), np.array(end, dtype=float),
        np.full(len(rows), np.nan), np.full(len(rows), np.nan),
    )  # fmt: skip


def test_exposure_and_bubble_of_a_case_made_by_hand() -> None:
    """Rank 0 computes 0-4 and 6-8, tp communication 3-5 (1 exposed), pp hand-over 5-7 (1 exposed); rank 1 computes
    2-8 and its gradients reduce 8-10 (2 exposed): 4 in all, 2 a rank. The window is 0-8; rank 0 is busy in 0-5 and
    6-8, rank 1 in 2-8: idle 1 + 2 of 16."""
    kernels = columns(
        (0, "matmul", "", 0, 4), (0, "communication", "tp", 3, 5), (0, "hand-over", "pp", 5, 7),
        (0, "memory", "", 6, 8),
        (1, "matmul", "", 2, 8), (1, "communication", "dp", 8, 10),
    )  # fmt: skip
    assert kernels.exposed_s(2) == pytest.approx(2.0)
    assert kernels.bubble([(0, 1)]) == pytest.approx(3 / 16)
    assert kernels.bubble([]) is None
    assert kernels.seconds(2)["matmul"] == pytest.approx((4.0, 6.0))


def test_bins_hold_every_second_of_a_class() -> None:
    """Shares of bins times their width add up to the kernels' seconds, wherever they begin and end."""
    rng = np.random.default_rng(3)
    edges = np.linspace(0, 10, 38)
    start = np.sort(rng.uniform(0, 9, 60))[::2]
    end = np.minimum(start + rng.uniform(0, 1, 30), np.append(start[1:], 10.0))
    kernels = columns(*((0, "matmul", "", s, e) for s, e in zip(start.tolist(), end.tolist(), strict=True)))
    shares = binned(kernels, 0, [CLASSES.index("matmul")], edges)
    assert (shares @ np.diff(edges))[0] == pytest.approx((end - start).sum())
    for share, low, high in zip(shares[0], edges[:-1], edges[1:], strict=True):
        inside = np.maximum(np.minimum(end, high) - np.maximum(start, low), 0).sum()
        assert share == pytest.approx(inside / (high - low), abs=1e-9)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"dp": 2, "zero": 3}, {"pp": 2}, {"pp": 2, "dp": 2}])
def test_classes_hold_all_of_a_simulated_step(tmp_path: Path, layout: dict[str, object]) -> None:
    """Computing classes add up to compute, recompute and optimizer of the breakdown, which other code cuts, each
    kernel less the gap behind it."""
    result = run(runs.workload(tmp_path, "w", layout), set={"training.recompute": "full"})
    kernels, step = simulated_kernels(result), result.to_dict()["time_breakdown_s"]
    n_ranks = result.spans.n_ranks
    seconds = {name: sum(of_ranks) / n_ranks for name, of_ranks in kernels.seconds(n_ranks).items()}
    computing = sum(seconds[name] for name in ("matmul", "attention", "memory", "optimizer"))
    gap = load_profile(result.gpus[0]).kernels.gap_s
    assert gap is not None
    frame = result.spans.select_ranks(range(n_ranks)).frame()
    for parts, found in ((("compute", "recompute", "optimizer"), computing), (("optimizer",), seconds["optimizer"])):
        rows = frame[frame["category"].isin(parts)]
        lengths = (rows["end_s"] - rows["start_s"]).to_numpy()
        assert lengths.sum() / n_ranks == pytest.approx(sum(step[part] for part in parts))
        assert found == pytest.approx(np.maximum(lengths - gap.value, 0.0).sum() / n_ranks)
    assert set(kernels.rank.tolist()) == set(range(n_ranks))
    if "pp" not in layout:
        # Communication that has come up but waits for the host or for other ranks is in flight, as NCCL's kernels are.
        assert kernels.exposed_s(n_ranks) >= sum(step["exposed"].values()) * (1 - 1e-9)
    assert (kernels.bubble(pipelines(result)) is None) == ("pp" not in layout)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "bucket_bytes": 1_000_000}])
def test_a_kernel_is_not_on_the_gpu_before_its_host_has_launched_it(tmp_path: Path, layout: dict[str, object]) -> None:
    """Ranks in step wait for nobody: of communication nothing is waiting, be the host late or early. (It may last
    longer on an early one, where kernels run beside it.)"""
    path = runs.workload(tmp_path, "w", layout)
    for speed in (0.2, 1000.0):
        kernels = simulated_kernels(run(path, set={"cluster.node.host_speed": speed}))
        seconds, parts = kernels.seconds(2)["communication"], kernels.parts(2)
        assert min(seconds) > 0
        assert parts["transfer"] == pytest.approx(seconds, rel=0.02)
        assert parts["waiting"] == pytest.approx((0.0, 0.0), abs=0.02 * min(seconds))


def test_every_kind_of_kernel_has_a_class() -> None:
    kinds = ("matmul", "grouped_matmul", "attention", "norm", "loss", "all_reduce", "send")
    categories = ("compute", "recompute", "optimizer", "tp", "cp", "ep", "pp", "dp", "offload")
    assert {simulated_class(kind, category) for kind, category in product(kinds, categories)} == set(CLASSES)
    assert simulated_class("grouped_matmul", "recompute") == "matmul"
    assert simulated_class("norm", "optimizer") == "optimizer"


def test_a_timeline_comes_back_as_it_was_written(made: Path) -> None:
    result = run(made / "pp2.yaml")
    read, own = measured_kernels(made / "measured" / "pp2.timeline.csv.gz", meetings(result)), simulated_kernels(result)
    assert (read.code == own.code).all()
    assert (read.kind == own.kind).all()
    assert read.end_s == pytest.approx(own.end_s * SLOWER["pp2"])
    assert read.moves_s == pytest.approx(own.moves_s * SLOWER["pp2"], nan_ok=True)
    assert read.done_s == pytest.approx(own.done_s * SLOWER["pp2"], nan_ok=True)


def test_records_are_those_of_train() -> None:
    """The keys that are read here are the ones that `train` documents."""
    text = (ROOT / "calibration" / "train" / "record.py").read_text()
    for key in ("step_time_s", "steady_allocated_bytes", "exposed_s", "kernels", "sha256", "status", "reason", "date"):
        assert key in text
