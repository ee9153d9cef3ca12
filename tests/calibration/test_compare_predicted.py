"""Predictions that were made before their runs."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from calibration.__main__ import main
from calibration.commits import commit_of, first_with
from calibration.compare.figures import Figures, simulated_figures
from simulator.api import run
from tests.support import runs
from tests.support.comparison import ONLY_TABLES, SLOWER, compare, suite, with_changed, with_value

pytestmark = pytest.mark.usefixtures("equal_jobs_are_played_once")


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
        on_h200s = with_changed(made, repository, with_value("environment", "gpu", to="NVIDIA H200"))
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
