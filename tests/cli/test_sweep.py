"""``sweep`` on the command line: its options, files and refusals."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Generator, Iterable
from itertools import islice
from pathlib import Path

import pytest

from simulator.cli.app import main
from simulator.cli.sweep import _database
from simulator.sweeping import runners
from simulator.sweeping.outcome import PointOutcome
from simulator.sweeping.point import Point
from tests.support.sweeps import InProcess, write_job


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny job, in which points are simulated without processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runners, "Processes", lambda _: InProcess())
    write_job(tmp_path)
    return tmp_path


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["sweep", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_sweep_prints_a_table_and_writes_every_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--grid", "parallelism.tp=1,2,3", "--zip", "model.layers=1,2", "--zip", "seed=5,6"]
    files = ["--json", "s.json", "--csv", "s.csv", "--plot", "s.png"]
    assert command("tiny.yaml", *grid, *files, "--set", "training.seq=64") == 0
    out, err = capsys.readouterr()
    assert "6 points of tiny.yaml: 4 fit, 2 refused" in out
    assert out.endswith("All points are in tiny.sweep.db.\n")
    assert "warning: 7 of the 8 GPUs of the cluster have no rank" in err
    assert "(2 of 6 points)" in err
    answer = json.loads(Path("s.json").read_text())
    assert (answer["set"], answer["keys"]) == ({"training.seq": 64}, ["parallelism.tp", "model.layers", "seed"])
    assert answer["points"][0]["set"] == {"training.seq": 64, "parallelism.tp": 1, "model.layers": 1, "seed": 5}
    assert sorted(path.name for path in folder.iterdir()) == ["s.csv", "s.json", "s.png", "tiny.sweep.db", "tiny.yaml"]
    assert command("tiny.yaml", *grid, "--set", "training.seq=64", "--top", "1") == 0
    out = capsys.readouterr().out
    assert "3 more have figures." in out
    assert "All points are in tiny.sweep.db, 4 of them from before." in out


def test_json_on_standard_output_stands_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "points.csv").write_text("seed\n1\n2\n")
    assert command("tiny.yaml", "--list", "points.csv", "--json", "-", "--out", "mine.db") == 0
    assert [point["set"] for point in json.loads(capsys.readouterr().out)["points"]] == [{"seed": 1}, {"seed": 2}]
    assert (folder / "mine.db").exists()


class Terminal(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_many_points_are_finished_and_the_time_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time one point is new, so that the bar has one."""
    for values, told in (("1,2", "2/2"), ("1,2,3", "1/1")):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        assert command("tiny.yaml", "--grid", f"seed={values}", "--json", "-") == 0
        shown = terminal.getvalue()
        assert "simulating" in shown
        assert told in shown
        assert "left" in shown


class EndedByCtrlC(InProcess):
    """A runner that is interrupted when it comes to the third point."""

    def outcomes(
        self, points: Iterable[Point], finished: frozenset[str], claim: Callable[[str], bool]
    ) -> Generator[tuple[Point, PointOutcome], None, None]:
        yield from islice(super().outcomes(points, finished, claim), 2)
        raise KeyboardInterrupt


@pytest.mark.parametrize("sort", ["step_time_s", "days"])
def test_an_interrupted_sweep_prints_what_is_finished(
    sort: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One point has figures, and tp 3 is refused. No point has ``days``, without a length of the run: by step time."""
    monkeypatch.setattr(runners, "Processes", lambda _: EndedByCtrlC())
    grid = ["--grid", "parallelism.tp=1,3,2", "--sort", sort, "--csv", "points.csv"]
    assert command("tiny.yaml", *grid) == 130
    out, err = capsys.readouterr()
    assert "2 points of tiny.yaml: 1 fit, 1 refused" in out
    assert "Points by step time" in out
    rows = (folder / "points.csv").read_text().splitlines()[1:]
    assert [row.split(",")[1] for row in rows] == ["1", "3"]
    assert "interrupted: 2 of 3 points are kept in tiny.sweep.db; the same command goes on" in err
    assert command("tiny.yaml", *grid, "--json", "-") == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert "goes on from there, and writes --json at its end" in err
    monkeypatch.setattr(runners, "Processes", lambda _: InProcess())
    assert command("tiny.yaml", "--grid", "parallelism.tp=1,3,2") == 0
    assert "1 of them from before" in capsys.readouterr().out  # what is refused is refused anew


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--grid", "parallelism.tpp=1,2"], "--grid: parallelism.tpp: unknown key"),
        (["--grid", "parallelism.tp="], "--grid parallelism.tp: has no value"),
        (["--grid", "training.seq=1,024"], "fix:     1024, or 24 for a value of its own"),
        (["--grid", "seed=1", "--grid", "seed=2"], "--grid: seed: is given twice"),
        (["--grid", "seed=1", "--set", "seed=2"], "--grid: seed: is given by --set too"),
        (["--zip", "seed=1,2", "--zip", "model.layers=1"], "equally many values"),
        (["--grid", "seed=1", "--sort", "mfuu"], "fix:     mfu"),
        (["--grid", "seed=1", "--plot", "x.bmp"], "a name that ends in .png"),
        (["--grid", "seed=1", "--csv", "tiny.yaml"], "is a file that this command reads"),
        (["--grid", "seed=1", "--out", "tiny.yaml"], "--out: is a file that this command reads"),
        (["--grid", "seed=1", "--out", "notes.txt"], "notes.txt: is no database of sweeps"),
        (["--grid", "seed=1", "--out", "x.json"], "--out: has the ending of another kind of file"),
        (["--grid", "seed=1", "--jobs", "0"], "--jobs: needs a process"),
        (["--list", "absent.csv"], "absent.csv: cannot be read"),
        ([], "there is nothing to sweep"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "notes.txt").write_text("of mine")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert command("tiny.yaml", *arguments) == 2
    assert words in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_figure_that_no_point_has_is_refused_after_the_files_are_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--csv", "s.csv", "--plot", "s.png"]
    assert command("tiny.yaml", "--grid", "seed=1,2", "--sort", "days", *files) == 2
    err = capsys.readouterr().err
    assert "--sort: no point has this figure, which needs training.total_tokens" in err
    assert (folder / "s.csv").exists()
    assert not (folder / "s.png").exists()


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ("parallelism.tp=1,2,4", "--grid parallelism.tp=1,2,4"),
        ("training.total_tokens=1e12, 2e12", "--grid training.total_tokens=1e12,2e12"),
        ("cluster.nodes=1,2", "--grid cluster.nodes=1,2"),
        ("parallelism.schedule=gpipe,1f1b", "--grid parallelism.schedule=gpipe,1f1b"),
    ],
)
def test_several_values_for_a_run_are_told_to_be_a_sweep(
    change: str, fix: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["run", "tiny.yaml", "--set", change])
    assert f"llmsim sweep WORKLOAD {fix}, which tries each of them" in capsys.readouterr().err


def test_the_database_is_named_after_the_workloads() -> None:
    assert str(_database(["jobs/a.yaml"])) == "a.sweep.db"
    assert str(_database(["a", "b", "c", "d", "e"])) == "a+b+c+2_more.sweep.db"
