"""How rarely Python looks for cyclic garbage while a job is played."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import FrameType

import pytest
import simpy

import simulator
from simulator.config import load_workload
from simulator.engine.kernel_times import PacedTemplate
from simulator.engine.rendezvous import Rendezvous
from simulator.engine.running_segment import RunningSegment
from simulator.garbage import THRESHOLDS, rarely_searched
from simulator.network.flows import Transmission
from tests.support.jobs import job

LEFT = (Rendezvous, Transmission, RunningSegment, PacedTemplate, simpy.Event, FrameType)


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


@pytest.mark.parametrize("cluster", ["dgx_a100", "dgx_h100"])
def test_what_was_played_is_freed_without_a_search(cluster: str) -> None:
    """Rendezvous, flows and their timers do not hold each other once they are over, nor what runs beside them on GPUs
    where communication slows kernels."""
    placed = load_workload(job(parallelism__pp=2, parallelism__dp=2) | {"cluster": cluster})
    gc.set_threshold(0)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        simulator.run(placed)
        gc.collect()
        assert not [left for left in gc.garbage if isinstance(left, LEFT)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
