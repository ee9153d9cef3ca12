"""`python -m calibration predict` and `compare`: every run has a row, what was predicted before is told from the rest.

Runs are made here from simulated ones (`runs.record`), slower by a known factor, so that every error is known: of a run
that takes f times as long, (simulated - measured) / measured is 1 / f - 1.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from calibration.__main__ import main
from calibration.compare.comparison import ComparedRun
from calibration.compare.hosts import with_host
from calibration.compare.software import with_software
from calibration.fit.hosts import Pace, probe_of
from simulator.cluster import build_cluster
from simulator.config import load_workload
from simulator.config.profile import load_profile
from simulator.costs import Costs
from tests.support import runs
from tests.support.comparison import LAYOUTS, ONLY_TABLES, ROOT, SLOWER, compare, reasons_of, suite, with_changed
from tests.support.grids import one_in

pytestmark = pytest.mark.usefixtures("equal_jobs_are_played_once")


@pytest.fixture(scope="module")
def compared(made: Path) -> dict[str, Any]:
    assert compare(made, made / "out") == 0
    return json.loads((made / "out" / "comparison.json").read_text())


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
        row = ComparedRun.from_dict(data)
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


@pytest.mark.parametrize("slower", one_in(2, [1.0, 2.0, 5.0]))
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
    command = ["predict", str(path), "--out", str(tmp_path.with_suffix(".json")), "--like", str(tmp_path)]
    assert main([*command, "--set", "calibration=h100-sxm-80gb"]) == 0
    changes = json.loads((tmp_path.with_suffix(".json")).read_text())["changes"]
    assert changes.pop("parallelism.batch_p2p", False) == batched
    assert changes.pop("calibration") == "h100-sxm-80gb"
    assert changes == pytest.approx({"cluster.node.host_speed": 1 / 3, "cluster.node.autograd_speed": 0.5}, rel=1e-3)
    assert main([*command, "--set", "cluster.node.host_speed=0.8"]) == 0
    assert json.loads((tmp_path.with_suffix(".json")).read_text())["changes"]["cluster.node.host_speed"] == 0.8


def test_predictions_like_runs_that_were_not_probed_are_refused(made: Path, tmp_path: Path, capsys: Any) -> None:
    runs.save(tmp_path, made / "alone.yaml", "failed", "2030-01-01")
    command = [
        "predict",
        str(made / "alone.yaml"),
        "--out",
        str(tmp_path.with_suffix(".json")),
        "--like",
        str(tmp_path),
    ]
    assert main(command) == 2
    assert "no run there was probed" in capsys.readouterr().err
    assert not (tmp_path.with_suffix(".json")).exists()


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


@pytest.mark.parametrize(("max_mean", "max_row"), [(None, None), (29, 40), (100, 38), (100, 37), (20, 100)])
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
    """The trial has a row, with the reason, and a part in no mean."""
    with_changed(made, tmp_path, lambda record: record["environment"].pop("gpu"))
    assert reasons_of(made, tmp_path) == {"alone": "", "ddp2": "measured without a GPU"}
    comparison = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {one["n_skipped"] for one in comparison["suites"]} == {1}


def test_a_reason_makes_no_table_wider(compared: dict[str, Any], made: Path) -> None:
    """Reasons stand below it."""
    text = (made / "out" / "table.txt").read_text()
    head, *rows = text.split("\n\n")[1].splitlines()
    assert head.startswith(" run")
    assert len(rows) == len(compared["rows"]) + 1
    assert "failed: CUDA" not in "\n".join(rows)
    assert "\nnot compared:\n  dp4: not run\n" in text
