"""Random legal jobs, each played in several ways; `python -m tests.random_jobs` plays more, and makes them small."""

from __future__ import annotations

import pytest

from tests.support.random_checks import CHECKS, problems
from tests.support.random_jobs import drawn

#: Jobs of a seed that `make test` plays, of few ranks, each by one of the checks in turn; and those of the slow tests.
FEW, MANY, SEED = 40, 2000, 7
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
