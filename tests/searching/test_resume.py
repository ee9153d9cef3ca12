"""A search that was ended goes on where it was: nothing finished is lost, and nothing is simulated twice."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import simulator
import simulator.cli.search
from simulator.cli.app import main
from simulator.cli.search import resuming
from simulator.errors import InputError
from simulator.searching.branch_and_bound import SimulatedLayout
from simulator.searching.layout_search import SearchWatch
from simulator.searching.result import SearchResult
from tests.support.searches import LARGE

ROOT = Path(__file__).resolve().parents[2]
#: Layouts of 4 GPUs that may fit.
FIXED: dict[str, list[Any]] = {"cp": [1], "micro_batch": [1], "recompute": ["full"], "zero": [1], "vpp": [1]}


def searched(out: Path | None = None, **options: Any) -> SearchResult:
    return simulator.search(LARGE, gpus=4, fix=FIXED, top=1000, jobs=1, out=out, **options)


@pytest.fixture(scope="module")
def uninterrupted() -> SearchResult:
    return searched()


def rows(out: Path) -> list[tuple[str, str]]:
    """Keys of the layouts in a database and their seconds, in the order in which they were finished."""
    if not out.exists():
        return []
    with closing(sqlite3.connect(f"{out.as_uri()}?mode=ro", uri=True, timeout=10)) as connection:
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return []
        return connection.execute("SELECT key, wall_s FROM points ORDER BY rowid").fetchall()


def times(result: SearchResult) -> list[tuple[float, dict[str, Any]]]:
    return [(one.step_time_s, dict(one.candidate.changes)) for one in result.ranking.fitting]


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), InputError("cannot be written: database or disk is full")])
def test_a_search_goes_on_whatever_ended_it(tmp_path: Path, uninterrupted: SearchResult, ending: BaseException) -> None:
    """Three layouts are finished. Seconds are measured anew by a simulation, so that equal rows are the old ones."""
    out = tmp_path / "s.db"
    seen: list[object] = []

    def end(one: object) -> None:
        seen.append(one)
        if len(seen) == 3:
            raise ending

    with pytest.raises(type(ending)):
        searched(out, watch=SearchWatch(simulated=end))
    before = rows(out)
    assert len(before) == 3
    result = searched(out)
    assert (result.kept, times(result)) == (3, times(uninterrupted))
    assert rows(out)[:3] == before
    assert len(rows(out)) == len(result.ranking.simulated) == len(uninterrupted.ranking.simulated)


def test_a_killed_search_goes_on(tmp_path: Path, uninterrupted: SearchResult) -> None:
    """The command is killed without warning after two layouts; its workers end with it."""
    out, path = tmp_path / "s.db", tmp_path / "large.yaml"
    path.write_text(yaml.safe_dump(LARGE))
    fixed = [f"--fix={key}={','.join(map(str, values))}" for key, values in FIXED.items()]
    words = ["search", str(path), "--gpus=4", *fixed, "--top=1000", "--jobs=2", f"--out={out}"]
    search = subprocess.Popen([sys.executable, "-m", "simulator", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    while len(rows(out)) < 2:
        assert search.poll() is None
        time.sleep(0.005)
    search.send_signal(signal.SIGKILL)
    search.wait()
    before = rows(out)
    assert len(before) >= 2
    result = searched(out)
    assert (result.kept, times(result)) == (len(before), times(uninterrupted))
    assert rows(out)[: len(before)] == before


def test_a_search_takes_what_a_sweep_has_simulated(tmp_path: Path, uninterrupted: SearchResult) -> None:
    """The best layout is swept, then searched. Both have one format, and know a point by its whole job."""
    out = tmp_path / "both.db"
    best = dict(uninterrupted.ranking.fitting[0].candidate.changes)
    swept = simulator.sweep(LARGE, points=[best], jobs=1, out=out)
    result = searched(out)
    assert swept.outcomes[0].figures["step_time_s"] == result.ranking.fitting[0].step_time_s
    assert result.kept == 1


def test_ctrl_c_tells_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("simulator.searching.entry.search", interrupted)
    with pytest.raises(SystemExit) as caught:
        main(["search", "gpt22b_tp8", "--gpus", "8"])
    assert caught.value.code == 130
    assert "are kept in gpt22b_tp8.search.db; the same command goes on from there" in capsys.readouterr().err


def test_an_interrupted_search_prints_the_best_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C comes when three layouts are simulated, before which no three can be proven. The fastest is the first."""
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(yaml.safe_dump({**LARGE, "name": "job"}))
    fixed = [text for key, values in FIXED.items() for text in ("--fix", f"{key}={values[0]}")]
    times: list[float] = []

    def watch(far: object, seen: list[SimulatedLayout]) -> SearchWatch:
        def end(one: SimulatedLayout) -> None:
            seen.append(one)
            times.append(one.step_time_s)
            if len(seen) == 3:
                raise KeyboardInterrupt

        return SearchWatch(simulated=end)

    monkeypatch.setattr(simulator.cli.search, "search_watch", watch)
    with pytest.raises(SystemExit) as caught:
        main(["search", "job.yaml", "--gpus", "4", "--jobs", "1", "--top", "3", *fixed])
    assert caught.value.code == 130
    out, err = capsys.readouterr()
    assert "Fastest of 3 layouts simulated so far, none of them proven" in out
    first = next(line for line in out.splitlines() if line.startswith(" 1 "))
    assert f"{min(times):.3f} s" in first
    assert "kept in job.search.db; the same command goes on from there" in err


@pytest.mark.parametrize(("ending", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_whoever_ends_a_search_hears_how_to_go_on(
    ending: BaseException, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C, or the SIGTERM of a batch system, which `signals_raise` makes a `SystemExit`: 128 + the signal."""
    with pytest.raises(typer.Exit) as ended, resuming(Path("job.search.db")):
        raise ending
    assert ended.value.exit_code == status
    assert "job.search.db; the same command goes on from there" in capsys.readouterr().err
