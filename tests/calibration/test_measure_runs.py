"""Measurements on the CPU, plans, and requests that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from calibration.measure import ranks
from calibration.measure.store import ResultRows, key_of
from tests.support.measurements import measure


@pytest.mark.slow
def test_two_ranks_measure_every_collective(tmp_path: Path) -> None:
    measure(tmp_path, "--gpus", "2", "--only", "collective")
    rows = [json.loads(line) for line in (tmp_path / "measurements.jsonl").read_text().splitlines()]
    timed = {one["op"] for one in rows if "time_s" in one}
    # Every operation of the plan; gloo has all of them on the CPU.
    from calibration.measure.collectives import OPS

    assert timed == set(OPS)
    assert all(one["time_s"] > 0 and one["ranks"] == [0, 1] for one in rows if "time_s" in one)


@pytest.mark.slow
def test_layers_are_issued_alone_and_in_a_pipeline_of_two_ranks(tmp_path: Path) -> None:
    measure(tmp_path, "--gpus", "2", "--only", "layers")
    rows = rows_in(tmp_path)
    assert [(one["op"], one["ranks"]) for one in rows] == [("passes", [0]), ("split", [0]), ("passes", [0, 1])]
    assert all(one["time_s"] > 0 for one in rows)
    assert len(rows[-1]["each_s"]) == 2


def test_hosts_are_timed_in_blocks_between_probes() -> None:
    """Runs of 20 ms are timed on a host that grows slower.

    Three of them last 50 ms, so that a block has three. Every block stands between two probes.
    """
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


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """Return what was measured, without what is said of the machine."""
    rows = [json.loads(line) for line in (folder / "measurements.jsonl").read_text().splitlines()]
    return [one for one in rows if one["kind"] != "environment"]


@pytest.mark.slow
def test_kernels_that_a_cpu_can_run_are_timed_and_a_second_run_adds_what_is_missing(tmp_path: Path) -> None:
    """A case of one kind is lost before the second run. The second run is of that kind alone."""
    measure(tmp_path, "--only", "matmul,memory,attention,copy")
    rows = rows_in(tmp_path)
    lost = next(one for one in rows if one["kind"] == "memory")
    path = tmp_path / "measurements.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line) != lost]
    path.write_text("".join(f"{line}\n" for line in kept))
    measure(tmp_path, "--only", "memory")
    *before, added = rows_in(tmp_path)
    assert before == [one for one in rows if one != lost]
    assert key_of(added) == key_of(lost)
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


@pytest.mark.parametrize("binding", [None, types.SimpleNamespace(nvmlInit=lambda: None)])
def test_a_machine_that_does_not_tell_clocks_and_power_is_said(
    binding: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from calibration.measure import agent

    monkeypatch.setitem(sys.modules, "pynvml", binding)
    for name in ("open_store", "lead", "leave"):
        monkeypatch.setattr(agent, name, lambda *_: "")
    ranks.lead(agent.Job("", [], {}, "cuda", tmp_path, ""), ResultRows(tmp_path), set())
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
    assert any(need.startswith("torch") for need in extras["calibration"])
    assert "pip install '.[calibration]'" in done.stderr
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
