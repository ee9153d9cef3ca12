"""Benchmarks play and read what their rows say, and compare their figures with the limits."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import bench_asked, bench_doubling, bench_engines
from benchmarks.asked_rows import ROWS, GiB, Most, SizeFigures
from benchmarks.bench_asked import main, processor_s, with_compared
from benchmarks.bench_engines import JobSeconds, job_seconds
from simulator.cluster import Cluster
from simulator.config import load_workload
from simulator.engine import UnsteadyError, simulate
from simulator.lowering import shortening
from tests.support.jobs import job


@pytest.mark.parametrize(
    ("row", "n_gpus"),
    [
        ("xml-20k", 20_000),
        pytest.param("xml-576", 20_160, marks=pytest.mark.slow),
        ("slurm-5k", 313_536),
    ],
)
def test_files_of_other_tools_become_clusters(row: str, n_gpus: int) -> None:
    """2,500 nodes of 8 GPUs, 35 of 576; 4,899 leaves of 8 nodes of 8. None is refused."""
    cluster = ROWS[row].prepared()()
    assert isinstance(cluster, Cluster)
    assert len(cluster.gpus) == n_gpus
    assert cluster.route(0, n_gpus - 1)


def test_the_tree_of_slurm_has_5000_switches() -> None:
    cluster = ROWS["slurm-5k"].prepared()()
    # Every switch but the root has one trunk above it.
    assert len(cluster.switches.trunks) == 5_000 - 1


@pytest.mark.parametrize(
    ("figures", "is_kept"),
    [
        (SizeFigures(3.0, GiB), True),
        (SizeFigures(3.01, GiB), False),
        (SizeFigures(1.0, GiB + 1), False),
    ],
)
def test_a_row_is_over_by_its_seconds_or_by_its_memory(figures: SizeFigures, is_kept: bool) -> None:
    assert Most(3, GiB).is_kept("row", {"row": figures}) is is_kept
    assert str(Most(3, GiB)) == "3 s, 1 GiB"


def test_seconds_are_of_this_process_and_of_those_that_it_ran() -> None:
    """A loop of 2 ms counts, less than a tick of `os.times`; so does one of 0.1 s in another process."""
    began_s = processor_s()
    while (here_s := processor_s() - began_s) < 0.002:
        pass
    assert here_s < 0.01
    began_s = processor_s()
    line = "import time\nwhile time.process_time() < 0.1: pass"
    subprocess.run([sys.executable, "-c", line], check=True)
    assert processor_s() - began_s >= 0.1


class ThisProcess:
    """A pool of processes that has none: work is done where it is asked for."""

    def apply(self, work: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        return work(*arguments)


@pytest.mark.parametrize("is_alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_row_that_misses_its_goal_says_so(
    is_alone: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no failure: the command ends as it does when all goals are met. Slow: the row in a process of its own."""
    if not is_alone:
        pools = SimpleNamespace(Pool=lambda processes: nullcontext(ThisProcess()))
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: pools)
        monkeypatch.setattr(bench_asked, "bare_loop_s", lambda: 1.0)
    slow = ROWS["help"]._replace(most=Most(0.0))
    monkeypatch.setitem(ROWS, "help", slow)
    main(["--rows", "help"])
    heads, row = capsys.readouterr().out.splitlines()
    assert heads.split() == ["row", "scaled", "memory", "goal"]
    assert row.endswith("missed")


@pytest.mark.parametrize(("seconds", "is_kept"), [(0.59, True), (0.61, False)])
def test_a_row_is_over_by_times_the_seconds_of_another(seconds: float, is_kept: bool) -> None:
    figures = {"small": SizeFigures(0.5, 0), "row": SizeFigures(seconds, 0)}
    assert Most(times=1.2, row="small").is_kept("row", figures) is is_kept


def test_a_row_that_another_is_compared_with_is_run_before_it() -> None:
    assert with_compared(["dense-64k"]) == ["dense-1k", "dense-64k"]
    assert with_compared(["a2a-256"]) == ["a2a-256"]


@pytest.mark.parametrize(("is_steady", "programs", "plays"), [(True, 1, 1), (False, 2, 2)])
def test_the_seconds_of_a_step_that_was_shortened_in_vain_count(
    monkeypatch: pytest.MonkeyPatch, is_steady: bool, programs: int, plays: int
) -> None:
    """A second for each part: shortening counts to the program, as do both programs where the first is not steady.

    On V100s, whose NCCL holds no SMs, passes settle soon. On A100s transfers slow the kernels of such small passes.
    """

    def played(*arguments: Any, repetition: Any, **options: Any) -> Any:
        if repetition is not None and not is_steady:
            raise UnsteadyError("settles for ever")
        return simulate(*arguments, repetition=repetition, **options)

    monkeypatch.setattr(shortening, "LEAST_LEFT_OUT", 0)
    monkeypatch.setattr(bench_engines, "simulate", played)
    monkeypatch.setattr(bench_engines, "timed", lambda work: (work(), 1.0))
    small = job(parallelism={"pp": 4, "schedule": "1f1b"}, training__global_batch=64, training__precision="fp16")
    small["cluster"]["node"]["gpus"] = {"type": "v100-sxm-32gb", "count": 8}
    workload = load_workload(small)
    figures = job_seconds(workload, "python")
    assert figures == JobSeconds(1.0, 1.0 + programs, float(plays), figures.events)


def test_a_doubling_costs_the_ratio_of_its_seconds(tmp_path: Path) -> None:
    """1, 2 and 3 s for 4, 8 and 16: the first doubling costs twice as much, the second 1.5 times; both are drawn."""
    doubling = bench_doubling.DOUBLINGS[0]
    one = bench_doubling.DoublingSeconds(doubling, [4, 8, 16], [1.0, 2.0, 3.0])
    assert one.ratios == [2.0, 1.5]
    bench_doubling.draw([one], tmp_path / "growth.svg")
    assert doubling.name in (tmp_path / "growth.svg").read_text()


@pytest.mark.parametrize("doubling", bench_doubling.DOUBLINGS, ids=lambda doubling: doubling.name)
def test_every_doubling_is_a_legal_job_with_twice_as_many(doubling: bench_doubling.Doubling) -> None:
    jobs = [load_workload(doubling.workload, doubling.changes(doubling.first * times)) for times in (1, 8)]
    figures = {
        "layers": lambda job: job.model.layers,
        "micro-batches": lambda job: job.microbatches,
        "stages": lambda job: job.parallelism.pp,
        "experts": lambda job: job.model.moe.experts,
        "GPUs": lambda job: job.parallelism.model_parallel * job.parallelism.dp,
    }
    assert [figures[doubling.name](one) for one in jobs] == [doubling.first, 8 * doubling.first]


@pytest.mark.parametrize("row", ["search-1k", pytest.param("unequal", marks=pytest.mark.slow), "help"])
def test_rows_of_the_table_do_what_their_titles_say(row: str) -> None:
    """Their work runs to its end, and raises nothing."""
    ROWS[row].prepared()()


def test_the_job_of_unequal_stages_is_legal() -> None:
    """Before a row's work begins, its workload is read: a split that does not add up to the layers is refused."""
    assert callable(ROWS["unequal"].prepared())
