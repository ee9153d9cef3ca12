"""How rarely Python looks for cyclic garbage while a job is played."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from simulator.garbage import THRESHOLDS, rarely_searched


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_it_is_rarer_within_and_as_before_after_even_where_the_job_failed() -> None:
    gc.set_threshold(700, 10, 10)
    with rarely_searched():
        assert gc.get_threshold() == THRESHOLDS
    assert gc.get_threshold() == (700, 10, 10)
    with pytest.raises(ValueError, match="job"), rarely_searched():
        raise ValueError("job")
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [0, 500_000])
def test_a_program_that_has_it_rarer_or_off_keeps_that(own: int) -> None:
    gc.set_threshold(own, 10, 10)
    with rarely_searched():
        assert gc.get_threshold() == (own, 10, 10)
