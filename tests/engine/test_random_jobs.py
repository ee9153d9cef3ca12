"""Random legal jobs, each played in several ways; `python -m tests.random_jobs` plays more, and makes them small."""

from __future__ import annotations

import pytest

from simulator.network.flows import Network
from simulator.network.plan import Phase, Plan
from simulator.network.simulated_time import SimulatedTime
from tests.support.random_checks import CHECKS, IdleNetwork, differences, problems
from tests.support.random_jobs import drawn

#: Jobs of a seed that `make test` plays, of few ranks, each by one of the checks in turn; and those of the slow tests.
FEW, MANY, SEED = 24, 2000, 7
FEW_RANKS = 4


@pytest.mark.parametrize("number", range(FEW))
def test_a_random_job_is_as_it_must_be(number: int) -> None:
    names = list(CHECKS)
    name = names[number % len(names)]
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
