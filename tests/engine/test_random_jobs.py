"""Random legal jobs, each played in several ways; `python -m tests.random_jobs` plays more, and makes them small."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from simulator.errors import InputError
from simulator.network.flows import Network
from simulator.network.plan import Phase, Plan
from simulator.network.simulated_time import SimulatedTime
from tests.random_jobs import main
from tests.support.random_checks import CHECKS, Problem, differences, problems
from tests.support.random_features import coverage, features, table
from tests.support.random_jobs import Job, drawn
from tests.support.random_plays import IdleNetwork, Plays

#: Jobs of a seed that `make test` plays, of few ranks, one by each of the checks; and those of the slow tests.
FEW, MANY, SEED = len(CHECKS), 2000, 7
FEW_RANKS = 4


@pytest.mark.parametrize("number", range(FEW))
def test_a_random_job_is_as_it_must_be(number: int) -> None:
    name = list(CHECKS)[number]
    assert problems(drawn(SEED, number, FEW_RANKS), {name: CHECKS[name]}) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(MANY))
def test_random_jobs_are_as_they_must_be(number: int) -> None:
    assert problems(drawn(SEED, number), CHECKS) == []


@pytest.mark.parametrize(("kind", "end_s"), [(Network, 20.0), (IdleNetwork, 10.0)])
def test_on_an_idle_network_transfers_that_meet_are_as_fast_as_alone(kind: type[Network], end_s: float) -> None:
    # 100 bytes over a link of 10 B/s take 10 s. Two such transfers have half of the link each, and take 20 s.
    env = SimulatedTime()
    ends_s: list[float] = []
    network = kind(env, [10.0])
    for _ in range(2):
        network.transfer(Plan("", (Phase(100.0, ((0, 1.0),), 0.0, 10.0),)), lambda: ends_s.append(env.now))
    env.run()
    assert ends_s == [end_s] * 2


def test_critical_paths_differ_where_a_class_of_one_is_missing_in_the_other() -> None:
    # The order of classes says nothing. 3 s of waiting in place of 3 s of norms are two differences.
    path = [{"class": "matmul", "seconds": 5.0}, {"class": "norm", "seconds": 3.0}]
    other = [{"class": "waiting", "seconds": 3.0}, {"class": "matmul", "seconds": 5.0}]
    assert list(differences({"critical_path": path}, {"critical_path": path[::-1]})) == []
    assert len(list(differences({"critical_path": path}, {"critical_path": other}))) == 2


def test_features_of_a_job_are_those_of_its_file() -> None:
    # A job without a pipeline and experts, on a node of two types of GPU, with adapters on a frozen base in 4 bits.
    gpus = [{"type": "a100-sxm-80gb", "count": 1}, {"type": "h100-sxm-80gb", "count": 1}]
    job: Job = {
        "name": "small",
        "framework": "pytorch",
        "model": {"layers": 2, "hidden": 256, "heads": 4, "vocab": 500, "position": "rope"},
        "training": {"seq": 128, "global_batch": 2, "adapters": {"rank": 4, "targets": ["q"]}, "base": "nf4"},
        "parallelism": {"dp": 2, "zero": 2},
        "cluster": {"name": "mixed", "node": {"gpus": gpus, "nvlink": {"kind": "none"}, "pcie": {"generation": 4}}},
    }
    job["model"] |= {"mixers": ["window", "none"], "sliding_window": 64}
    seen = features(job)
    assert seen["parallelism"] == ["dp"]
    assert seen["schedule"] == seen["dispatcher"] == seen["recipe"] == ["none"]
    assert seen["data parallel"] == ["zero 2"]
    assert set(seen["model"]) == {"window", "no mixer", "MLP dense"}
    assert seen["adapters"] == ["lora", "base nf4"]
    assert seen["parts of clusters"] == ["several types of GPU in a node"]


def test_coverage_counts_jobs_with_a_feature_the_most_frequent_first() -> None:
    # Two of three jobs have GPipe; both layers of a job with a window are one job with windows.
    jobs = [{"model": ["window", "window"], "schedule": ["1f1b"]}, {"schedule": ["gpipe"]}, {"schedule": ["gpipe"]}]
    assert table(coverage(jobs)) == "model: window 1\nschedule: gpipe 2, 1f1b 1"


def test_reports_are_the_same_however_many_processes_make_them(capsys: pytest.CaptureFixture[str]) -> None:
    # What is printed stands in the order of jobs; the last line has seconds, which differ.
    printed = []
    for processes in ("1", "2"):
        with patch("sys.argv", ["random_jobs", "--cases", "3", "--checks", "fold", "--jobs", processes]):
            assert main() == 0
        printed.append(capsys.readouterr().out.splitlines()[:-1])
    assert printed[0] == printed[1]
    assert any(line.startswith("parallelism: ") for line in printed[0])


def test_a_play_that_raises_is_a_problem() -> None:
    def raises(plays: Plays) -> Iterator[str]:
        yield str(1 / 0)

    (problem,) = problems({}, {"broken": raises})
    assert problem == Problem("broken", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize(("key", "is_problem"), [("cluster.nodes", False), ("parallelism.dp", True)])
def test_only_a_cluster_without_room_for_a_node_more_has_no_job_beside(key: str, is_problem: bool) -> None:
    """A refusal that says anything else is a fault of the check or of the simulator."""
    with patch("tests.support.random_checks.share", side_effect=InputError("is refused", key=key)):
        seen = problems(drawn(SEED, 0, FEW_RANKS), {"idle job": CHECKS["idle job"]})
    assert [problem.text for problem in seen] == ([f"InputError: {key}: is refused"] if is_problem else [])
