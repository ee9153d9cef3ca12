"""The database of a sweep: what it keeps, what it refuses, and what is not simulated again."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator.config import load_workload
from simulator.errors import InputError
from simulator.sweeping.entry import sweep_space
from simulator.sweeping.evaluation import evaluate
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Point
from simulator.sweeping.result import SweepResult
from simulator.sweeping.store import Store
from tests.support.sweeps import SMALLEST, InProcess, space_of, swept


def figures(result: SweepResult) -> list[Any]:
    return [outcome.figures for outcome in result.outcomes]


def rows(path: Path, columns: str = "*") -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT {columns} FROM points ORDER BY rowid").fetchall()


def test_the_same_sweep_again_simulates_nothing(tmp_path: Path) -> None:
    """A refused point takes no simulation to be refused again, and has one row."""
    out, values = tmp_path / "s.db", {"model.layers": [1, 2], "parallelism.tp": [1, 3]}
    first = swept(values, out=out)
    again = InProcess()
    second = sweep_space(space_of(values), again, out)
    assert again.simulated == [1, 3]
    assert (first.kept, second.kept) == (0, 2)
    assert second.rows == first.rows
    assert len(rows(out)) == 4


def test_a_sweep_of_more_values_simulates_those_alone(tmp_path: Path) -> None:
    """Another grid, and other words for the same, share the file, as points are known by their content."""
    out = tmp_path / "s.db"
    swept({"model.layers": [1, 2]}, out=out)
    more = InProcess()
    values = {"training.global_batch": [2, 4], "model.layers": [2, 3, 1]}
    result = sweep_space(space_of(values), more, out)
    assert more.simulated == [1, 3, 4, 5]
    assert figures(result) == figures(swept(values))


def test_rows_say_what_was_changed_and_what_came_of_it(tmp_path: Path) -> None:
    out = tmp_path / "s.db"
    outcome = swept({"model.layers": [2]}, out=out).outcomes[0]
    columns = "key, workload, changes, status, step_time_s, fits, n_gpus, error"
    assert rows(out, columns) == [
        (outcome.key, "tiny", '{"model.layers": 2}', "simulated", outcome.figures["step_time_s"], 1, 1, "")
    ]
    ((simulator, wall_s, warnings),) = rows(out, "simulator, wall_s, warnings")
    assert simulator.isalnum()
    assert wall_s > 0
    assert "7 of the 8 GPUs of the cluster have no rank" in warnings


def test_the_file_is_known_where_another_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "s.db"
    swept({"seed": [1]}, out=out)
    with pytest.raises(InputError, match="is a database of finished points, not a workload file"):
        load_workload(out)


def test_points_are_committed_one_by_one(tmp_path: Path) -> None:
    """Another process sees each while the sweep is under way."""
    out, seen = tmp_path / "s.db", []
    sweep_space(space_of({"seed": [1, 2, 3]}), InProcess(), out, watch=lambda _: seen.append(len(rows(out))))
    assert seen == [1, 2, 3]


def test_failed_points_are_tried_again_when_asked_for(tmp_path: Path) -> None:
    out, space = tmp_path / "s.db", space_of({"seed": [1, 2]})
    outcomes = swept({"seed": [1, 2]}).outcomes
    swept({"seed": [2]}, out=out)
    with Store.open(out) as store:
        store.add(Point(0, SMALLEST, {"seed": 1}), PointOutcome(outcomes[0].key, Status.FAILED, error="killed"))
    runner = InProcess()
    kept = sweep_space(space, runner, out)
    assert (runner.simulated, [one.error for one in kept.outcomes]) == ([], ["killed", ""])
    tried = sweep_space(space, runner, out, retry_failed=True)
    assert (runner.simulated, [one.error for one in tried.outcomes]) == ([0], ["", ""])
    assert len(rows(out)) == 2


@pytest.mark.parametrize("content", [b"seed: 1\n" * 200, b"SQLite", b"\0" * 4096])
def test_a_file_that_is_no_database_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is no database of sweeps, and is left as it is"):
        swept({"seed": [1]}, out=path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_database_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE points (key TEXT)")
    content = path.read_bytes()
    with pytest.raises(InputError, match="none of sweeps, and is left as it is"):
        swept({"seed": [1]}, out=path)
    assert path.read_bytes() == content


def test_a_database_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    swept({"seed": [1]}, out=path)
    with closing(sqlite3.connect(path)) as later:
        later.execute("PRAGMA user_version = 99")
    with pytest.raises(InputError, match="another version"):
        swept({"seed": [1]}, out=path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("UPDATE points SET step_time_s = 'abc'", "step_time_s is 'abc'"),
        ("UPDATE points SET step_time_s = NULL", "status is simulated, but there is no step_time_s"),
        ("UPDATE points SET mfu = 9e999", "mfu is inf"),
        ("UPDATE points SET n_gpus = 1.5", "n_gpus is 1.5"),
        ("UPDATE points SET fits = 7", "fits is 7"),
        ("UPDATE points SET days = x'00'", "days is b'\\x00'"),
        ("UPDATE points SET status = 'done'", "'done' is not a valid Status"),
        ("UPDATE points SET status = 'kept'", "status is kept"),
        ("UPDATE points SET warnings = '[1'", "Expecting"),
        ("UPDATE points SET warnings = '[1]'", "no texts"),
        ("UPDATE points SET error = x'00'", "no texts"),
        ("UPDATE points SET wall_s = 'long'", "could not convert"),
        ("UPDATE points SET error = CAST(x'ff' AS TEXT)", "decode to UTF-8"),
        ("ALTER TABLE points DROP COLUMN mfu", "no column mfu"),
    ],
)
def test_a_database_with_damaged_values_is_refused(change: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    swept({"seed": [1]}, out=path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(change)
        connection.commit()
    with pytest.raises(InputError) as caught:
        swept({"seed": [1]}, out=path)
    assert str(caught.value).startswith(f"{path}: is damaged: ")
    assert words in str(caught.value)
    assert caught.value.fix == "another name"


def test_an_empty_file_is_a_database_that_was_just_begun(tmp_path: Path) -> None:
    """A process leaves one that is killed between making the file and its first table."""
    path = tmp_path / "s.db"
    path.touch()
    assert len(swept({"seed": [1]}, out=path).outcomes) == len(rows(path)) == 1


def test_a_folder_or_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent" / "s.db"):
        with pytest.raises(InputError) as caught:
            swept({"seed": [1]}, out=path)
        assert str(path) in str(caught.value)


def test_a_full_disk_ends_a_sweep_with_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database may have eight pages of 4 KiB, and a row takes most of a KiB."""
    out, connect = tmp_path / "s.db", sqlite3.connect

    def small(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.execute("PRAGMA max_page_count = 8")
        return connection

    monkeypatch.setattr(sqlite3, "connect", small)
    seen: list[int] = []
    space = space_of({"seed": list(range(60))})
    with pytest.raises(InputError) as caught:
        sweep_space(space, InProcess(), out, watch=lambda _: seen.append(1))
    assert "s.db: cannot be written: database or disk is full" in str(caught.value)
    assert "the same command goes on" in str(caught.value)
    monkeypatch.setattr(sqlite3, "connect", connect)
    assert 0 < len(seen) == len(rows(out)) < len(space)


def test_a_failure_does_not_take_the_place_of_figures(tmp_path: Path) -> None:
    """A second process of the same sweep may lose its machine. Figures do take the place of a failure."""
    point, worst = Point(0, SMALLEST, {}), PointOutcome("k", Status.FAILED, error="lost")
    best = replace(evaluate(point), key="k")
    with Store.open(tmp_path / "s.db") as store:
        for outcome, status in ((worst, Status.FAILED), (best, Status.SIMULATED), (worst, Status.SIMULATED)):
            store.add(point, outcome)
            assert store.outcome("k").status == status
