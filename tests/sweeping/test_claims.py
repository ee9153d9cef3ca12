"""Two commands on one database: each point is simulated by one of them, and no command waits for one that has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from simulator.errors import InputError
from simulator.sweeping import claims, evaluator
from simulator.sweeping.claims import Claims, GONE_s
from simulator.sweeping.entry import sweep_space
from simulator.sweeping.evaluation import evaluate
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Point
from simulator.sweeping.store import Store
from tests.support.sweeps import SMALLEST, InProcess, space_of

SEEDS = [1, 2, 3]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "_LOOK_s", 0.005)


def outcome_of(seed: int) -> PointOutcome:
    return evaluate(Point(0, SMALLEST, {"seed": seed}))


@contextmanager
def other_command(out: Path, seed: int) -> Iterator[Claims]:
    """Another command that has begun the point of a seed."""
    with Store.open(out) as store, Claims.on(store, failed=True) as other:
        assert other.take(outcome_of(seed).key)
        yield other


def test_a_point_that_another_command_has_begun_is_waited_for(tmp_path: Path) -> None:
    """The other one finishes its point once this one has done all others, of which none waits for that."""
    out, runner = tmp_path / "s.db", InProcess()
    other_is_done = threading.Event()
    done: list[int] = []

    def finish() -> None:
        with other_command(out, 2) as other:
            begun.set()
            other_is_done.wait(60)
            other.store.add(Point(0, SMALLEST, {"seed": 2}), outcome_of(2))

    begun = threading.Event()
    thread = threading.Thread(target=finish)
    thread.start()
    assert begun.wait(60)

    def watch(one: evaluator.EvaluatedPoint) -> None:
        done.append(one.point.number)
        if len(done) == 2:
            other_is_done.set()

    result = sweep_space(space_of({"seed": SEEDS}), runner, out, watch=watch)
    thread.join()
    assert (runner.simulated, done) == ([0, 2], [0, 2, 1])
    assert result.kept == 1
    assert [one.figures for one in result.outcomes] == [outcome_of(seed).figures for seed in SEEDS]


def test_two_commands_share_the_points(tmp_path: Path) -> None:
    """Both have all six. Whoever is faster, each point is simulated once, and both have the same figures."""
    out, runners = tmp_path / "s.db", [InProcess(), InProcess()]
    results = {}

    def run(number: int) -> None:
        results[number] = sweep_space(space_of({"seed": [*range(6)]}), runners[number], out)

    threads = [threading.Thread(target=run, args=[number]) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(runners[0].simulated + runners[1].simulated) == [*range(6)]
    assert results[0].rows == results[1].rows
    with Store.open(out) as store:
        assert store.connection.execute("SELECT count(*) FROM claims").fetchone() == (0,)


def test_a_point_of_a_command_that_was_killed_is_simulated_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last sign of life was a second less than `GONE_s` ago: that is waited for, and one that old is gone."""
    out, runner = tmp_path / "s.db", InProcess()
    key = outcome_of(2).key
    with Store.open(out) as store:
        assert store.claim(key, "killed", time.time() - GONE_s + 1, gone_s=0, failed=True)
    sweep_space(space_of({"seed": SEEDS}), runner, out)
    assert runner.simulated == [0, 2, 1]


def test_a_command_gives_signs_of_life_and_then_drops_its_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that was last seen long ago is renewed while its command goes on."""
    monkeypatch.setattr(claims, "SIGN_s", 0.01)
    with Store.open(tmp_path / "s.db") as store:
        with Claims.on(store, failed=True) as mine, Claims.on(store, failed=True) as other:
            assert store.claim("k", mine.owner, 0.0, gone_s=0.0, failed=True)
            until = time.monotonic() + 30
            while not other.is_under_way("k") and time.monotonic() < until:
                time.sleep(0.01)
            assert other.is_under_way("k")
            assert not other.take("k")
            assert mine.take("k")
        assert store.connection.execute("SELECT count(*) FROM claims").fetchone() == (0,)


def test_a_failure_elsewhere_is_tried_again_where_that_was_asked_for(tmp_path: Path) -> None:
    """Without --retry it is the outcome; with it a command simulates what another one has lost meanwhile."""
    key = outcome_of(1).key
    for failed, taken in ((True, False), (False, True)):
        with Store.open(tmp_path / f"{failed}.db") as store, Claims.on(store, failed=failed) as mine:
            store.add(Point(0, SMALLEST, {"seed": 1}), PointOutcome(key, Status.FAILED, error="lost"))
            assert mine.is_finished(key) == (not taken)
            assert mine.take(key) == taken


def test_many_commands_open_a_new_file_at_once(tmp_path: Path) -> None:
    """None is told of a lock, or of a file that is half made."""
    problems: list[Exception] = []

    def opened(path: Path, together: threading.Barrier) -> None:
        together.wait(60)
        try:
            with Store.open(path):
                pass
        except InputError as error:
            problems.append(error)

    for number in range(20):
        threads, together = [], threading.Barrier(6)
        for _ in range(6):
            threads.append(threading.Thread(target=opened, args=[tmp_path / f"{number}.db", together]))
            threads[-1].start()
        for thread in threads:
            thread.join()
    assert problems == []
