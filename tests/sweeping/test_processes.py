"""Points in worker processes: the same in any number of them, and nothing lost whatever is killed."""

from __future__ import annotations

import io
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import simulator
from simulator.errors import InputError
from simulator.sweeping import processes
from simulator.sweeping.entry import sweep_space
from simulator.sweeping.equal_points import EqualPoints
from simulator.sweeping.messages import Begun, Ready, WorkerMessage
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Point
from simulator.sweeping.processes import Processes
from tests.support.grids import one_in
from tests.support.sweeps import SMALLEST, InProcess, space_of, swept, write_job

ROOT = Path(__file__).resolve().parents[2]
VALUES: dict[str, list[Any]] = {"model.layers": [1, 2], "parallelism.tp": [1, 2, 3]}
#: Skips a test that looks up processes where there is no place for it.
IN_PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
#: A worker in which a module stands for the simulator that takes long to load; with seed 7 it runs a line.
_MARKED = """
import os, signal, sys, pathlib, types
sys.path[:] = sys.argv[1:]
from simulator.sweeping.outcome import PointOutcome, Status
def evaluate(point, finished, begins):
    seed = point.changes["seed"]
    begins(f"key of {{seed}}")
    if seed == 7:
        {line}
    return PointOutcome(f"key of {{seed}}", Status.SIMULATED, {{"step_time_s": float(seed), "fits": True}})
sys.modules["simulator.sweeping.evaluation"] = types.SimpleNamespace(evaluate=evaluate)
from simulator.sweeping import worker
worker.main()
"""


def test_results_are_those_of_one_process_whatever_their_number() -> None:
    """Rows have the order of the points, refusals among them; workers do not import the script that asks."""
    two = simulator.sweep(SMALLEST, grid=VALUES, jobs=2)
    assert two.rows == swept(VALUES).rows
    assert [outcome.status for outcome in two.outcomes].count(Status.REFUSED) == 2


@pytest.mark.parametrize("jobs", one_in(2, [2, 1]))
def test_of_equal_points_one_is_simulated(jobs: int, tmp_path: Path) -> None:
    """tp 1 is the workload's own, and seed 0 too: three points are one job, at the same time or one after another."""
    points: list[dict[str, Any]] = [{"parallelism.tp": 1}, {}, {"seed": 0}, {"model.layers": 2}]
    told: list[Status] = []
    result = simulator.sweep(
        SMALLEST, points=points, jobs=jobs, out=tmp_path / "a.db", watch=lambda one: told.append(one.status)
    )
    assert sorted(told) == [Status.KEPT, Status.KEPT, Status.SIMULATED, Status.SIMULATED]
    assert len({outcome.key for outcome in result.outcomes[:3]}) == 1
    assert result.outcomes[0] == result.outcomes[1] == result.outcomes[2]
    assert result.kept == 0  # of the points in the database before


def marked(monkeypatch: pytest.MonkeyPatch, line: str, jobs: int = 1) -> simulator.SweepResult:
    monkeypatch.setattr(processes, "_START", _MARKED.format(line=line))
    return sweep_space(space_of({"seed": [6, 7, 8]}), Processes(jobs))


def test_a_point_whose_worker_is_killed_is_simulated_by_a_fresh_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first worker leaves a file behind and dies; the second finds it. Noise does not come between messages."""
    once = tmp_path / "once"
    line = f"p = pathlib.Path({str(once)!r}); p.exists() or (p.touch(), os.kill(os.getpid(), signal.SIGKILL))"
    result = marked(monkeypatch, f"print('noise', flush=True); os.system('echo noise'); {line}")
    assert once.exists()
    assert capfd.readouterr().out == ""
    assert [outcome.figures["step_time_s"] for outcome in result.outcomes] == [6, 7, 8]


def test_a_point_that_kills_two_workers_fails_and_the_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    result = marked(monkeypatch, "os.kill(os.getpid(), signal.SIGKILL)")
    before, failed, after = result.outcomes
    assert (before.status, failed.status, after.status) == (Status.SIMULATED, Status.FAILED, Status.SIMULATED)
    assert failed.error.startswith("its process was killed by SIGKILL, twice, as the system does where memory runs out")
    assert failed.key == "key of 7"


def played(monkeypatch: pytest.MonkeyPatch, messages: list[tuple[int, WorkerMessage | None]]) -> list[tuple[int, Any]]:
    """Outcomes of two points, on workers of which each says nothing but these messages, by its number."""
    workers: list[processes._Worker] = []

    def start(point: Point, inbox: object) -> processes._Worker:
        process: Any = SimpleNamespace(
            stdin=io.BytesIO(), returncode=-signal.SIGKILL, wait=lambda *_: None, kill=lambda: None
        )
        workers.append(processes._Worker(process, point))
        return workers[-1]

    monkeypatch.setattr(processes._Worker, "start", start)
    points = iter([Point(number, SMALLEST, {}) for number in range(2)])
    crew = processes._Crew(2, points, frozenset(), EqualPoints(lambda key: True))
    script = iter(messages)

    def get() -> tuple[processes._Worker, WorkerMessage | None]:
        number, message = next(script)
        return workers[number], message

    inbox: Any = SimpleNamespace(get=get)
    crew.inbox = inbox
    outcomes = [(point.number, outcome) for point, outcome in crew.outcomes()]
    assert list(script) == []
    return outcomes


#: Both points have key K. The first begins, the second waits for it, and then the worker of the first dies.
_BEGUN_AND_LOST: list[tuple[int, WorkerMessage | None]] = [
    *((0, Ready()), (1, Ready()), (0, Begun("K")), (1, Begun("K")), (1, PointOutcome("K", Status.KEPT)), (0, None)),
    (2, Ready()),
]


def test_points_that_wait_for_one_that_fails_have_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fresh worker of the first point dies before it says with which key it begins: that is still known."""
    (first, failed), (second, kept) = played(monkeypatch, [*_BEGUN_AND_LOST, (2, None)])
    assert (first, failed.key, failed.status) == (0, "K", Status.FAILED)
    assert (second, kept) == (1, PointOutcome("K", Status.KEPT))


@pytest.mark.parametrize("begins", [True, False])
def test_points_that_wait_for_one_with_another_key_in_the_end_are_simulated(
    monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """The workload's file has changed: the fresh worker begins with key L, or refuses the point without beginning."""
    first, second = (
        PointOutcome("L", Status.SIMULATED if begins else Status.REFUSED),
        PointOutcome("K", Status.SIMULATED),
    )
    again: list[tuple[int, WorkerMessage | None]] = [(2, Begun("L"))] if begins else []
    again += [(2, first), (1, Begun("K")), (1, second)]
    assert played(monkeypatch, [*_BEGUN_AND_LOST, *again]) == [(0, first), (1, second)]


def test_an_order_that_depends_on_times_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of three workers with the second point is the last to be done."""
    result = marked(monkeypatch, "import time; time.sleep(1)", jobs=3)
    assert [outcome.figures["step_time_s"] for outcome in result.outcomes] == [6, 7, 8]


def test_workers_that_cannot_start_end_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_START", "import sys; sys.exit(3)")
    with pytest.raises(InputError, match="a worker process does not start: it ended with exit status 3"):
        sweep_space(space_of({"seed": [1, 2]}), Processes(2))


@IN_PROC
def test_processes_end_with_the_one_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many points are left, and whatever the workers do."""
    monkeypatch.setattr(processes, "_START", _MARKED.format(line="import time; time.sleep(1000)"))
    other_children = children(os.getpid())
    stream = Processes(1).outcomes(space_of({"seed": list(range(1000))}).points(), frozenset(), lambda key: True)
    next(stream)
    begun = children(os.getpid()) - other_children
    stream.close()
    assert begun
    until = time.monotonic() + 10
    while begun & children(os.getpid()) and time.monotonic() < until:  # one that was told to end may not have yet
        time.sleep(0.01)
    assert not begun & children(os.getpid())


def children(parent: int) -> set[int]:
    """Processes whose parent this is, without those that have ended and wait to be asked for."""
    processes_below = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, above = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(above) == parent and state != "Z":
            processes_below.add(int(stat.parent.name))
    return processes_below


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something to come true, at most so long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def finished(out: Path) -> list[tuple[str, str]]:
    """Keys and times of the points in a database, in the order in which they were finished."""
    if not out.exists():
        return []
    with closing(sqlite3.connect(f"{out.as_uri()}?mode=ro", uri=True, timeout=10)) as connection:
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return []
        return connection.execute("SELECT key, finished_at FROM points ORDER BY rowid").fetchall()


@IN_PROC
def test_a_sweep_goes_on_where_it_was_killed_or_interrupted(tmp_path: Path) -> None:
    """First the parent is killed, then Ctrl-C pressed; what was finished stays as it is and is not simulated again."""
    path, out = write_job(tmp_path), tmp_path / "s.db"
    seeds = list(range(40))
    grid = f"seed={','.join(map(str, seeds))}"
    arguments = [sys.executable, "-m", "simulator", "sweep", str(path), "--grid", grid, "--jobs", "1"]
    before: list[tuple[str, str]] = []
    for ending in (signal.SIGKILL, signal.SIGINT):
        sweep = subprocess.Popen(
            [*arguments, "--out", str(out)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        until(lambda: len(finished(out)) > len(before) + 2)  # noqa: B023 - called within the turn
        workers = children(sweep.pid)
        sweep.send_signal(ending)
        _, told = sweep.communicate(timeout=60)
        until(lambda: not any(alive(worker) for worker in workers))  # noqa: B023 - called within the turn
        rows = finished(out)
        assert workers
        assert rows[: len(before)] == before
        assert len(before) + 2 < len(rows) < len(seeds)
        before = rows
    assert sweep.returncode == 130
    assert f"{len(before)} of {len(seeds)} points are kept in {out}; the same command goes on" in " ".join(told.split())
    runner = InProcess()
    result = sweep_space(space_of({"seed": seeds}, path), runner, out)
    assert (result.kept, len(runner.simulated)) == (len(before), len(seeds) - len(before))
    assert finished(out)[: len(before)] == before
    assert [outcome.status for outcome in result.outcomes] == [Status.SIMULATED] * len(seeds)
