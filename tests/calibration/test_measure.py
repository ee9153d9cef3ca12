"""`python -m calibration measure`: every case gets a row, a run goes on where it stopped, nothing hangs."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from calibration.measure import ranks
from calibration.measure.case import Case, shuffled
from calibration.measure.store import Rows, key_of
from simulator.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "calibration" / "measurements").glob("*/*.jsonl.gz"))


def row(m: int, **more: object) -> dict[str, Any]:
    return {"kind": "matmul", "op": "mm", "params": {"m": m}, "ranks": [0], **more}


def test_rows_are_kept_and_a_line_cut_off_is_measured_again(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    rows.start({"gpu": "A", "command": "measure", "date": "2026-01-01"})
    rows.add(row(1, time_s=1.0))
    rows.add(row(2, error="out of memory"))
    with rows.path.open("a") as stream:
        stream.write('{"kind": "matmul", "op": "m')  # the machine was taken away while it was written
    again = Rows(tmp_path)
    assert again.done(failed_too=True) == {key_of(row(1)), key_of(row(2))}
    assert again.done(failed_too=False) == {key_of(row(1))}
    again.add(row(2, time_s=2.0))  # tried again: the later row counts
    assert not Rows(tmp_path).failures()


def test_rows_of_two_machines_do_not_mix(tmp_path: Path) -> None:
    Rows(tmp_path).start({"gpu": "A", "command": "measure", "date": "2026-01-01"})
    with pytest.raises(InputError, match="another gpu"):
        Rows(tmp_path).start({"gpu": "B", "command": "measure", "date": "2026-01-01"})


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "measurements.jsonl").write_text("m,n,k\n1,2,3\n")
    with pytest.raises(InputError, match="line 1 is not JSON"):
        Rows(tmp_path)


@pytest.mark.parametrize("text", ["notes of mine", "notes of mine\n", '{"kind": "matmul", "op": "m\n', '{"a": '])
def test_a_last_line_that_was_not_cut_off_stays(text: str, tmp_path: Path) -> None:
    """One that is cut off has no end, and begins as all do."""
    (tmp_path / "measurements.jsonl").write_text(text)
    with pytest.raises(InputError, match="line 1 is not JSON"):
        Rows(tmp_path)
    assert (tmp_path / "measurements.jsonl").read_text() == text


@pytest.mark.parametrize(
    "line", ["[]", "3", "{}", '{"kind": "matmul"}', '{"kind": "a", "op": "b", "params": [], "ranks": []}']
)
def test_a_line_of_another_shape_is_said(line: str, tmp_path: Path) -> None:
    (tmp_path / "measurements.jsonl").write_text(f"{line}\n")
    with pytest.raises(InputError, match="line 1 is not of a measurement"):
        Rows(tmp_path)


def test_the_order_is_mixed_and_always_the_same() -> None:
    cases = [Case("matmul", "mm", {"m": m}) for m in range(50)]
    assert shuffled(cases) == shuffled(cases + cases)
    assert shuffled(cases) != cases


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shipped_measurements_say_where_they_come_from(path: Path) -> None:
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    environments = [one for one in rows if one["kind"] == "environment"]
    assert environments
    for environment in environments:
        for name in ("gpu", "nvidia_smi", "cuda", "nccl", "nvls", "torch", "date", "command"):
            assert name in environment, name
    keys = Counter(key_of(one) for one in rows if one["kind"] != "environment")
    assert max(keys.values()) == 1
    for one in rows:
        if one["kind"] != "environment" and "error" not in one:
            assert one.get("time_s", 0) > 0 or one.get("kernel_s", 0) > 0 or "kernels" in one, one


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
    rows = Rows(tmp_path)
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
    rows = Rows(tmp_path)
    assert agent.lead(agent.Job(dying, cases, {}, "cpu", tmp_path, ""), rows, set(), dist.HashStore(), print) == ""
    assert rows.done(failed_too=False) == {case.key for case in cases}
    rows, before_any = Rows(tmp_path / "other"), "import os; print('alive', flush=True); os.kill(os.getpid(), 9)"
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
    monkeypatch.setattr("calibration.__main__._run", lambda given: (_ for _ in ()).throw(KeyboardInterrupt))
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
    """Whether a process is there and no zombie."""
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
    assert "no such driver" in agent.lead(job, Rows(tmp_path), set(), dist.HashStore(), lambda *_: None)


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
    began, rows, store = time.monotonic(), Rows(tmp_path), dist.HashStore()
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
    reason = agent.lead(job, Rows(tmp_path), set(), dist.HashStore(), lambda *_: None)
    assert reason == "rank 0 ended with status 3: no message"


def test_rows_of_another_gpu_end_the_run_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import torch.distributed as dist

    from calibration.measure import agent

    monkeypatch.setattr(agent, "PYTHON", (sys.executable, "-c"))
    Rows(tmp_path).start({"gpu": "B", "command": "", "date": ""})
    job, store = (
        agent.Job(FAKE_WORKER, [Case("matmul", "mm", {"m": 0})], {}, "cpu", tmp_path, ""),
        dist.HashStore(),
    )
    with pytest.raises(InputError, match="another gpu"):
        agent.lead(job, Rows(tmp_path), set(), store, lambda *_: None)
    agent.follow(job, store)  # another rank: told to stop, it ends at once


def measure(out: Path, *arguments: str) -> str:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "calibration", "measure", "--device", "cpu", "--smoke", "--out", str(out), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_two_ranks_measure_every_collective(tmp_path: Path) -> None:
    measure(tmp_path, "--gpus", "2", "--only", "collective")
    rows = [json.loads(line) for line in (tmp_path / "measurements.jsonl").read_text().splitlines()]
    timed = {one["op"] for one in rows if "time_s" in one}
    # Every operation of the plan; gloo has all of them on the CPU.
    from calibration.measure.collectives import OPS

    assert timed == set(OPS)
    assert all(one["time_s"] > 0 and one["ranks"] == [0, 1] for one in rows if "time_s" in one)


def test_layers_are_issued_alone_and_in_a_pipeline_of_two_ranks(tmp_path: Path) -> None:
    measure(tmp_path, "--gpus", "2", "--only", "layers")
    rows = [json.loads(line) for line in (tmp_path / "measurements.jsonl").read_text().splitlines()][1:]
    assert [(one["op"], one["ranks"]) for one in rows] == [("passes", [0]), ("split", [0]), ("passes", [0, 1])]
    assert all(one["time_s"] > 0 for one in rows)
    assert len(rows[-1]["each_s"]) == 2


def test_hosts_are_timed_in_blocks_between_probes() -> None:
    """A run of 20 ms on a host that grows slower: three of them last 50 ms, so that a block has three; every block
    stands between two probes."""
    pytest.importorskip("torch")
    from calibration.measure import hosts

    calls: list[str] = []

    class Clock:
        """Stands for the bench, the probe and what is run: seconds grow by a tenth at each probe."""

        cuda, pace = True, 1.0

        def synchronize(self) -> None:
            calls.append("wait")

        def seconds(self) -> tuple[float, float]:
            self.pace *= 1.1
            calls.append("probe")
            return 0.02 * self.pace, 0.04 * self.pace

        def run(self) -> float:
            calls.append("run")
            return 0.02 * self.pace

    clock: Any = Clock()
    row: Any = hosts.beside_probes(clock.run, clock, clock, None)
    warm_up, block = ["run", "wait"] * hosts.WARM_UP, ["run", "wait"] * 3
    assert calls == [*warm_up, *["probe", *block] * hosts.BLOCKS, "probe"]
    assert row["block_s"] == [pytest.approx([0.02 * 1.1**n for n in range(1, hosts.BLOCKS + 1)], rel=1e-4)]
    assert row["probe_s"] == [pytest.approx([0.06 * 1.1**n for n in range(1, hosts.BLOCKS + 2)], rel=1e-4)]
    assert row["probe_forward_s"] == [pytest.approx([one / 3 for one in row["probe_s"][0]], rel=1e-4)]
    assert row["runs"] == 3


@pytest.mark.parametrize(
    ("three", "expected"),
    [
        ([("a", 1.0), ("b", 5.0), ("a", 2.0), ("b", 4.0), ("a", 3.0), ("b", 6.0)], [["a", 2.0], ["b", 5.0]]),
        ([("a", 1.0), ("b", 5.0), ("a", 2.0), ("b", 4.0), ("a", 3.0)], [["one", 7.0]]),
        ([("a", 1.0), ("b", 5.0), ("c", 2.0)], [["one", 7.0]]),
    ],
)
def test_kernels_are_those_of_one_run(
    three: list[tuple[str, float]], expected: list[list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Medians where three runs launch the same ones; else of a run by itself."""
    torch = pytest.importorskip("torch")
    from calibration.measure.bench import Bench
    from calibration.measure.case import Work

    bench = Bench(torch.device("cpu"))
    bench.cuda = True
    monkeypatch.setattr(bench, "synchronize", lambda: None)
    monkeypatch.setattr(bench, "_profiled", lambda work, runs: three if runs == 3 else [("one", 7.0)])
    assert bench.kernels(Work(lambda i: None)) == expected


def test_kernels_that_a_cpu_can_run_are_timed_and_a_second_run_adds_what_is_missing(tmp_path: Path) -> None:
    measure(tmp_path, "--only", "matmul,memory,attention,copy")
    path = tmp_path / "measurements.jsonl"
    lines = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    path.write_text("\n".join(lines[:-1]) + "\n")
    measure(tmp_path, "--only", "matmul,memory,attention,copy")
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert again[:-1] == rows[:-1]
    assert key_of(again[-1]) == key_of(rows[-1])
    failed = {(one["kind"], one["op"]) for one in rows if "error" in one}
    # cuDNN's attention, accumulation into fp32 and copies between GPUs need one.
    assert failed <= {("attention", "fwd"), ("attention", "bwd"), ("matmul", "mm_accumulate_fp32"), ("copy", "peer")}
    products = [one for one in rows if one["kind"] == "matmul" and "time_s" in one]
    assert {one["params"]["role"] for one in products} == {"fwd", "dgrad", "wgrad"}
    for one in products:
        p = one["params"]
        # 2 m n k per product; the experts of a grouped one share its m (or k).
        batch = p.get("batch", 1) if one["op"] == "bmm" else 1
        assert one["flops"] == 2.0 * batch * p["m"] * p["n"] * p["k"]


def test_plans_name_each_case_once_and_grow_with_the_level() -> None:
    pytest.importorskip("torch")
    from calibration.measure.case import KINDS, LEVELS
    from calibration.measure.plan import plan

    sizes = []
    for level in LEVELS:
        cases = plan(level, KINDS, 4, 4)
        assert max(Counter(case.key for case in cases).values()) == 1
        assert {case.kind for case in cases} >= set(KINDS) - {"kernels"}
        sizes.append(len(cases))
    assert sizes == sorted(sizes)


def test_groups_are_within_a_node_whole_nodes_and_one_rank_of_each() -> None:
    pytest.importorskip("torch")
    from calibration.measure.collectives import groups

    assert groups("full", 4, 4) == [(0, 1), (0, 1, 2), (0, 1, 2, 3)]
    assert groups("full", 4, 2) == [(0, 1), (0, 1, 2, 3), (0, 2)]
    assert groups("quick", 8, 8) == [(0, 1), tuple(range(8))]
    assert groups("quick", 8, 8, (4, 8)) == [tuple(range(4)), tuple(range(8))]
    assert groups("full", 4, 2, (2,)) == [(0, 1), (0, 2)]


def test_a_node_of_eight_is_measured_in_the_groups_that_are_asked_for(tmp_path: Path) -> None:
    """Collectives of all sizes among four and among eight; nothing of other numbers, and kinds without groups stay."""
    pytest.importorskip("torch")
    from calibration.measure.plan import plan

    cases = plan("full", ("collective", "interference", "copy"), 8, 8, (4, 8))
    assert {len(case.ranks) for case in cases if case.kind != "copy"} == {4, 8}
    assert {case.op for case in cases if case.kind == "copy"} >= {"peer"}
    reduced = [case for case in cases if case.op == "all_reduce" and case.kind == "collective" and len(case.ranks) == 8]
    sizes = {case.params["bytes"] for case in reduced if case.params["dtype"] == "bf16"}
    assert sizes == {2**power for power in range(8, 33)}  # 256 B to 4 GiB
    whole = plan("full", ("collective", "interference", "copy"), 8, 8)
    assert {case.key for case in cases} < {case.key for case in whole}


def test_bad_requests_are_refused_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from calibration.__main__ import main

    assert main(["measure", "--out", str(tmp_path), "--device", "cpu", "--only", "gemm"]) == 2
    assert main(["measure", "--out", str(tmp_path), "--device", "cpu", "--groups", "two"]) == 2
    assert main(["measure", "--out", str(tmp_path), "--device", "cpu", "--groups", "2"]) == 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["measure", "--out", str(tmp_path), "--device", "cpu", "--gpus", "2"]) == 2
    said = capsys.readouterr().err
    assert "--only: no such kind" in said
    assert "--groups: no list of numbers" in said
    assert "--groups: no groups of so many GPUs" in said
    assert "--gpus: the ranks are given by torchrun" in said


def test_results_that_cannot_be_used_are_said_before_ranks_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from calibration.__main__ import main

    def none(*_: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(ranks, "ranks", none)
    (tmp_path / "measurements.jsonl").write_text("m,n,k\n1,2,3\n")
    assert main(["measure", "--out", str(tmp_path), "--device", "cpu", "--gpus", "4"]) == 2
    assert "line 1 is not JSON" in capsys.readouterr().err


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
    assert said == ["--groups:", "found:", "allowed:"]
    assert time.monotonic() - began < ranks.LEAVE_S


@pytest.mark.parametrize("binding", [None, types.SimpleNamespace(nvmlInit=lambda: None)])
def test_a_machine_that_does_not_tell_clocks_and_power_is_said(
    binding: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from calibration.measure import agent

    monkeypatch.setitem(sys.modules, "pynvml", binding)
    for name in ("open_store", "lead", "leave"):
        monkeypatch.setattr(agent, name, lambda *_: "")
    ranks.lead(agent.Job("", [], {}, "cuda", tmp_path, ""), Rows(tmp_path), set())
    assert ("pip install nvidia-ml-py" in capsys.readouterr().err) == (binding is None)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from calibration.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["measure", "train"])
def test_without_torch_help_works_and_the_rest_says_what_to_install(name: str, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-c", WITHOUT_TORCH, name, *arguments]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    assert run("--help").returncode == 0
    done = run(*(["workloads/llama2_7b_zero2.yaml"] if name == "train" else []), "--out", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{name} needs PyTorch" in done.stderr
    extras = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (extra,) = [extra for extra, needs in extras.items() if any(need.startswith("torch") for need in needs)]
    assert f"pip install '.[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_progress_is_told_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers start for 80 s, then a case takes 4 s: the first is told at once, then the third behind it. Three of the
    cases are copies, which say nothing of products."""
    clock = iter([0, *range(80, 200, 4)])
    monkeypatch.setattr(ranks.time, "monotonic", lambda: float(next(clock)))
    progress = ranks.Progress({"copy", "matmul"})
    for done in range(1, 8):
        progress.show(done, 10, f"{'copy' if done < 5 else 'matmul'}/{done}")
    progress.end()
    assert capsys.readouterr().err.splitlines() == ["1/10  copy/1", "4/10  copy/4", "7/10, 12 s left  matmul/7"]


@pytest.mark.parametrize("gpus", [0, -1])
def test_without_gpus_there_may_be_any_number_of_ranks(
    gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from calibration.__main__ import main

    assert main(["measure", "--device", "cpu", "--smoke", "--gpus", str(gpus), "--out", str(tmp_path)]) == 2
    assert "allowed: 1 or more\n" in capsys.readouterr().err


def test_fit_asks_for_a_base_where_none_is_called_like_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from calibration.__main__ import main

    measured = "calibration/measurements/h200-sxm-141gb"
    assert main(["fit", measured, "--out", str(tmp_path / "h200.yaml")]) == 2
    said = capsys.readouterr().err
    assert "--base" in said
    assert "h200-sxm-141gb" in said
    assert list(tmp_path.iterdir()) == []


def test_a_rank_number_that_a_shell_has_hides_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands without ranks say what is wrong whatever LOCAL_RANK is; of ranks one says it for all."""
    from calibration.__main__ import main

    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["predict", str(tmp_path / "none.yaml"), "--out", str(tmp_path / "p.json")]) == 2
    assert "none.yaml" in capsys.readouterr().err
