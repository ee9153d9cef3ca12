"""``search`` on the command line: its options, files and refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from simulator.cli.app import main
from simulator.output.sweep_files import sweep_columns
from tests.support.sweeps import write_job

#: Options that leave few layouts, simulated in this process.
FEW = ("--gpus", 2, "--fix", "recompute=none", "--fix", "zero=0", "--fix", "micro_batch=1", "--jobs", 1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny job for two GPUs."""
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, parallelism={"dp": 2})
    return tmp_path


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["search", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_search_prints_its_tables_and_writes_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One layer on two GPUs: tp 2, cp 2 or dp 2, and no pipeline. The file's own layout is one of them."""
    assert command("tiny.yaml", *FEW, "--json", "s.json", "--csv", "s.csv", "--why", "tp=2", "--top", 2) == 0
    out, err = capsys.readouterr()
    assert "tiny.yaml: 3 legal layouts on 2 GPUs" in out
    assert "Fastest layouts that fit" in out
    assert "Why the others lost" in out
    assert "The first is the file's own layout." in out
    assert "To see it: llmsim run tiny.yaml" in out
    assert "Why not tp=2: 1 legal layout has these values" in out
    assert "warning" not in err.replace("warning: 6 of the 8 GPUs of the cluster have no rank", "")
    answer = json.loads(Path("s.json").read_text())
    assert answer["command"] == "search"
    assert answer["proven"]
    assert len(answer["ranking"]) == 2
    assert answer["layouts"]["legal"] == 3
    with Path("s.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    keys = list(answer["ranking"][0]["set"])
    assert list(rows[0]) == [*sweep_columns(keys), "least_step_time_s", "least_memory_bytes"]
    assert (rows[0]["workload"], bool(rows[0]["key"])) == ("tiny.yaml", True)
    # The first search proved two places by simulating two.
    Path("other.yaml").write_text(Path("tiny.yaml").read_text())
    assert command("other.yaml", *FEW, "--set", "training.seq=64", "--out", "tiny.search.db") == 0
    assert capsys.readouterr().out.endswith("tiny.search.db. It also has 2 points of tiny.yaml.\n")


def test_json_on_standard_output_is_alone_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("tiny.yaml", *FEW, "--json", "-", "--top", 1) == 0
    assert json.loads(capsys.readouterr().out)["n_gpus"] == 2


def test_a_key_alone_keeps_the_workloads_value(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has dp 2, so that on two GPUs all else is 1."""
    assert command("tiny.yaml", *FEW, "--fix", "dp", "--json", "-") == 0
    ranking = json.loads(capsys.readouterr().out)["ranking"]
    assert [one["set"]["parallelism.dp"] for one in ranking] == [2]


@pytest.mark.parametrize(("limit", "sizes"), [("tp=2..", {2}), ("tp=..1", {1}), ("parallelism.tp=1..2", {1, 2})])
def test_limits_may_be_open(folder: Path, capsys: pytest.CaptureFixture[str], limit: str, sizes: set[int]) -> None:
    assert command("tiny.yaml", *FEW, "--limit", limit, "--json", "-") == 0
    ranking = json.loads(capsys.readouterr().out)["ranking"]
    assert {one["set"]["parallelism.tp"] for one in ranking} == sizes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--limit", "tp=2"], "is no range of numbers"),
        (["--limit", "tp=a..b"], "is no range of numbers"),
        (["--fix", "depth=2"], "is no key of a layout"),
        (["--fix", "training.seq=128"], "changes the work of a step"),
        (["--why", "depth=2"], "is no key of a layout"),
        (["--top", "0"], "must be a whole number"),
        (["--set", "parallelism.tpp=2"], "unknown key"),
        (["--fix", "parallelism.bucket=2"], "parallelism.bucket: unknown key"),
    ],
)
def test_bad_options_end_with_2_and_say_why(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert command("tiny.yaml", *FEW, *options) == 2
    assert said in capsys.readouterr().err
