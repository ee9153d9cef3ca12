"""Agents and workers of measurements that die, hang or are interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from calibration.measure import ranks
from calibration.measure.case import Case
from calibration.measure.store import ResultRows
from simulator.errors import InputError
from tests.support.measurements import ROOT

# What follows runs workers.

FAKE_WORKER = """
import json, os, sys, time
orders = json.load(sys.stdin)
report = os.fdopen(int(orders["report_fd"]), "w", buffering=1)
say = lambda **message: print(json.dumps(message), file=report, flush=True)
say(environment={"gpu": "A", "command": "", "date": ""})
for index in orders["pending"]:
    say(start=f"matmul/mm m={index}", limit_s=0.5)
    if index == 1:
        sys.exit("ValueError: a broken kernel")
    if index == 3:
        time.sleep(60)
    say(row={"kind": "matmul", "op": "mm", "params": {"m": index}, "ranks": [0], "time_s": 1.0})
say(done=True)
"""


def test_a_case_that_dies_and_one_that_hangs_do_not_stop_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    import torch.distributed as dist

    from calibration.measure import agent

    monkeypatch.setattr(agent, "PYTHON", (sys.executable, "-c"))
    monkeypatch.setattr(agent, "GRACE_S", 0.0)
    cases = [Case("matmul", "mm", {"m": m}) for m in range(5)]
    job = agent.Job(FAKE_WORKER, cases, {}, "cpu", tmp_path, "")
    rows = ResultRows(tmp_path)
    assert agent.lead(job, rows, set(), dist.HashStore(), lambda done, total, key: None) == ""
    assert rows.done(failed_too=False) == {cases[m].key for m in (0, 2, 4)}
    reasons = {failed["params"]["m"]: failed["error"] for failed in rows.failures()}
    assert "a broken kernel" in reasons[1]
    assert "took longer than" in reasons[3]


#: Reports a row and is killed, unless it has nothing more to do; ``{}``: how.
KILLED_BETWEEN_CASES = """
import json, os, signal, sys, time
orders = json.load(sys.stdin)
report = os.fdopen(int(orders["report_fd"]), "w", buffering=1)
say = lambda **message: print(json.dumps(message), file=report, flush=True)
say(environment={"gpu": "A", "command": "", "date": ""})
first = orders["pending"][0]
say(start=f"matmul/mm m={first}", limit_s=5)
say(row={"kind": "matmul", "op": "mm", "params": {"m": first}, "ranks": [0], "time_s": 1.0})
if len(orders["pending"]) == 1:
    say(done=True)
    sys.exit()
print("alive at", first, flush=True)
KILL
"""


def test_workers_that_are_killed_between_cases_lose_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import torch.distributed as dist

    from calibration.measure import agent

    monkeypatch.setattr(agent, "PYTHON", (sys.executable, "-c"))
    cases = [Case("matmul", "mm", {"m": m}) for m in range(3)]
    dying = KILLED_BETWEEN_CASES.replace("KILL", "os.kill(os.getpid(), signal.SIGKILL)")
    rows = ResultRows(tmp_path)
    assert agent.lead(agent.Job(dying, cases, {}, "cpu", tmp_path, ""), rows, set(), dist.HashStore(), print) == ""
    assert rows.done(failed_too=False) == {case.key for case in cases}
    rows, before_any = ResultRows(tmp_path / "other"), "import os; print('alive', flush=True); os.kill(os.getpid(), 9)"
    (tmp_path / "other").mkdir()
    job = agent.Job(before_any, cases, {}, "cpu", tmp_path / "other", "")
    reason = agent.lead(job, rows, set(), dist.HashStore(), print)
    assert reason == "rank 0 was ended by signal SIGKILL: alive"
    assert len(rows) == 0
    (tmp_path / "other" / "log-0.txt").write_text("ValueError: of an earlier run\n")
    assert agent.lead(job, rows, set(), dist.HashStore(), print) == reason


def test_an_interrupt_is_one_line_and_what_was_finished_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C, here sent by a worker that then sleeps: the agent says so, ends it, and keeps its first row."""
    pytest.importorskip("torch")
    from calibration.__main__ import main
    from calibration.measure import agent
    from calibration.measure.plan import plan

    case = plan("smoke", ["matmul"], 1, 1, ())[0]
    interrupting = (
        KILLED_BETWEEN_CASES.replace("KILL", "os.kill(os.getppid(), signal.SIGINT); time.sleep(60)")
        .replace('f"matmul/mm m={first}"', repr(case.key))
        .replace('"op": "mm", "params": {"m": first}', f'"op": {case.op!r}, "params": {dict(case.params)!r}')
    )
    monkeypatch.setattr(agent, "PYTHON", (sys.executable, "-c", interrupting))
    began = time.monotonic()
    arguments = ["measure", "--device", "cpu", "--smoke", "--only", "matmul", "--gpus", "1", "--out", str(tmp_path)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    try:
        assert main(arguments) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 30
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("interrupted; what is finished is kept")
    assert "Traceback" not in said
    assert "RANK" not in os.environ
    monkeypatch.setenv("RANK", "1")  # other ranks, which are interrupted too, leave the word to the first
    monkeypatch.setattr("calibration.__main__._run", lambda words, program: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(arguments) == 130
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("RANK")
    assert main(["compare"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_worker_ends_with_its_agent() -> None:
    pytest.importorskip("torch")
    worker = (
        "import os, time; from calibration.measure.start import end_with_parent; end_with_parent(os.getppid()); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    agent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    with _killed([sys.executable, "-c", agent], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline().strip().isdigit()
        began = time.monotonic()
        running.kill()
        said, _ = running.communicate(timeout=60)  # at its end when nobody can write to it any more
    assert said == b""
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_ranks_end_with_the_one_that_has_started_them(tmp_path: Path) -> None:
    """Rank 0 is killed while rank 1 imports torch, before they have met, or on a busy machine a little later."""
    pytest.importorskip("torch")
    arguments = ["measure", "--device", "cpu", "--smoke", "--only", "collective", "--gpus", "2", "--out", str(tmp_path)]
    with _killed([sys.executable, "-m", "calibration", *arguments], stderr=subprocess.PIPE) as first:
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children")
        assert _within(60, lambda: children.read_text().strip() != "")
        started = children.read_text().split()  # the other rank, and rank 0's worker where it is there already
        first.kill()
        first.communicate(timeout=60)  # at its end when no rank can write to it any more
        assert _within(60, lambda: not any(map(_runs, started)))


@contextlib.contextmanager
def _killed(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive its test, whatever becomes of that."""
    with subprocess.Popen(command, cwd=ROOT, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def _within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _runs(pid: str) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_worker_whose_agent_has_gone_before_ends_at_once() -> None:
    """Its parent is another process than the one that has started it."""
    pytest.importorskip("torch")
    worker = (
        f"from calibration.measure.start import end_with_parent; end_with_parent({os.getppid()}); print('lives on')"
    )
    done = subprocess.run([sys.executable, "-c", worker], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_rank_that_comes_when_the_first_has_gone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from calibration.measure import agent

    monkeypatch.setattr(agent, "STARTUP_S", 1.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(ranks._free_port()))
    with pytest.raises(InputError, match="rank 1 does not reach rank 0"):
        agent.open_store(agent.Job("", [], {}, "cpu", tmp_path, "", rank=1, world=2))


def test_a_worker_that_cannot_start_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import torch.distributed as dist

    from calibration.measure import agent

    monkeypatch.setattr(agent, "PYTHON", (sys.executable, "-c"))
    job = agent.Job("raise ImportError('no such driver')", [Case("matmul", "mm", {"m": 1})], {}, "cpu", tmp_path, "")
    assert "no such driver" in agent.lead(job, ResultRows(tmp_path), set(), dist.HashStore(), lambda *_: None)


@pytest.mark.parametrize("measured", [0, 1])
def test_an_agent_that_is_killed_is_noticed_at_once(
    measured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's worker waits for the one of rank 1, whose agent is killed with it, before the first case or in one."""
    pytest.importorskip("torch")
    import torch.distributed as dist

    from calibration.measure import agent

    waits = KILLED_BETWEEN_CASES.replace("KILL", f"say(start='matmul/mm m={measured}', limit_s=100); time.sleep(60)")
    monkeypatch.setattr(agent, "PYTHON", (sys.executable, "-c", waits if measured else "import time; time.sleep(60)"))
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1); import os; os.kill(os.getpid(), 9)"])
    cases = [Case("matmul", "mm", {"m": m}) for m in range(3)]
    job = agent.Job("", cases, {}, "cpu", tmp_path, "", world=2, agents=(other,))
    began, rows, store = time.monotonic(), ResultRows(tmp_path), dist.HashStore()
    reason = agent.lead(job, rows, set(), store, lambda *_: None)
    assert reason == "the agent of rank 1 was ended by signal SIGKILL"
    agent.leave(job, store)
    assert time.monotonic() - began < 10
    assert rows.done(failed_too=False) == {case.key for case in cases[:measured]}


def test_a_worker_that_ends_before_it_reads_its_orders_is_one_that_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More orders than a pipe holds."""
    pytest.importorskip("torch")
    import torch.distributed as dist

    from calibration.measure import agent

    monkeypatch.setattr(agent, "PYTHON", (sys.executable, "-c"))
    job = agent.Job("import os; os._exit(3)", [Case("matmul", "mm", {"m": 1})], {"x": "y" * 10**6}, "cpu", tmp_path, "")
    reason = agent.lead(job, ResultRows(tmp_path), set(), dist.HashStore(), lambda *_: None)
    assert reason == "rank 0 ended with status 3: no message"


def test_rows_of_another_gpu_end_the_run_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import torch.distributed as dist

    from calibration.measure import agent

    monkeypatch.setattr(agent, "PYTHON", (sys.executable, "-c"))
    ResultRows(tmp_path).start({"gpu": "B", "command": "", "date": ""})
    job, store = (
        agent.Job(FAKE_WORKER, [Case("matmul", "mm", {"m": 0})], {}, "cpu", tmp_path, ""),
        dist.HashStore(),
    )
    with pytest.raises(InputError, match="another gpu"):
        agent.lead(job, ResultRows(tmp_path), set(), store, lambda *_: None)
    agent.follow(job, store)  # another rank: told to stop, it ends at once


@pytest.mark.slow
def test_ranks_end_at_once_where_the_first_finds_a_mistake(tmp_path: Path) -> None:
    """And say nothing of it themselves."""
    pytest.importorskip("torch")
    arguments = ["measure", "--device", "cpu", "--gpus", "3", "--groups", "9", "--out", str(tmp_path)]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "calibration", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    said = [line.split()[0] for line in done.stderr.splitlines()]
    assert said == ["error:", "found:", "allowed:"]
    assert time.monotonic() - began < ranks.LEAVE_S
