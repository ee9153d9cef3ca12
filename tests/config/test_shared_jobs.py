"""Names of jobs that share a cluster."""

from __future__ import annotations

import pytest

from simulator.config import load_workload
from simulator.config.shared_jobs import with_distinct_names
from tests.support.small_workload import SMALL


@pytest.mark.parametrize(
    ("names", "distinct"),
    [
        (["a", "b", "a", "a"], ["a", "b", "a (2)", "a (3)"]),
        (["a", "a", "a (2)"], ["a", "a (3)", "a (2)"]),
        (["a (2)", "a", "a", "a (2)"], ["a (2)", "a", "a (3)", "a (2) (2)"]),
    ],
)
def test_every_job_has_a_name_of_its_own(names: list[str], distinct: list[str]) -> None:
    """The first job of a name keeps it; a later one has the first number that makes a name that no job has."""
    jobs = [load_workload({**SMALL, "name": name}) for name in names]
    assert [job.name for job in with_distinct_names(jobs)] == distinct
