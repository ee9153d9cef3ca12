"""Memory over time of hand-made Timelines: peaks, and what is in them."""

from __future__ import annotations

import pytest

from simulator.analysis.memory import (
    communicators,
    memory_curve,
    memory_of_ranks,
    memory_report,
    overhead_bytes,
    worst_per_stage,
)
from simulator.model import StateBytes
from simulator.units import GiB
from tests.timelines import Span, pipeline, template, timeline

STATE = StateBytes(weights=2 * GiB, gradients=5 * GiB, optimizer=12 * GiB)


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 2, 8])
def test_1f1b_holds_as_many_activations_as_the_depth_that_is_left(p: int, m: int) -> None:
    # 1 GiB a micro-batch: stage s holds min(m, p - s) of them, beside its 19 GiB of state and half a GiB of overhead.
    play = pipeline("1f1b", p, m, activation=GiB)
    memories = memory_of_ranks(play, dict.fromkeys(range(p), STATE), dict.fromkeys(range(p), 0.5 * GiB))
    for memory in memories:
        expected = min(m, p - memory.stage)
        assert memory.activations == pytest.approx(expected * GiB)
        assert memory.in_flight == expected
        assert memory.allocated == pytest.approx((19 + expected) * GiB)
        assert memory.total == pytest.approx((19.5 + expected) * GiB)


def test_workspace_counts_only_while_its_op_runs() -> None:
    # 0-1 holds 4, 1-2 needs 3 for itself beside them: 7 at 1 s. The third op allocates as the second gives back.
    op = template(("a", "norm", "compute", 1.0))
    play = timeline(
        [
            Span(0, "compute", op, 0.0, alloc=4.0, stage=0, microbatch=0),
            Span(0, "compute", op, 1.0, workspace=3.0, free=4.0, phase="B", stage=0, microbatch=0),
            Span(0, "compute", op, 2.0, alloc=5.0, free=5.0, stage=0, microbatch=1),
        ]
    )
    (memory,) = memory_of_ranks(play, {0: StateBytes(0, 0, 0)}, {0: 0.0})
    assert (memory.activations, memory.workspace, memory.peak_at_s) == (7.0, 3.0, 1.0)
    times, held, _ = memory_curve(play, 0)
    assert times[-1] == 3.0
    assert held[-1] == 0.0


def test_report_takes_the_fullest_rank_of_each_stage() -> None:
    play = pipeline("1f1b", 2, 4, activation=GiB)
    both = memory_of_ranks(play, {0: STATE, 1: STATE}, {0: 0.0, 1: 3 * GiB})
    report = memory_report(both, capacity_bytes=24 * GiB)
    assert report["fits"]
    assert report["peak_bytes"] == 23 * GiB  # stage 1: 19 of state, 1 of activations, 3 of overhead
    assert report["peak_allocated_bytes"] == 21 * GiB  # stage 0: 19 and 2
    for row in report["per_stage"]:
        parts = ("weights", "gradients", "optimizer", "activations", "buffers")
        assert sum(row[part] for part in parts) == pytest.approx(row["peak"])
    assert not memory_report(both, capacity_bytes=22 * GiB)["fits"]
    assert [memory.stage for memory in worst_per_stage(both)] == [0, 1]


def test_overhead_grows_with_communicators() -> None:
    assert 0 < overhead_bytes(0) < overhead_bytes(1) < overhead_bytes(4) < 3 * GiB


def test_a_rank_has_a_communicator_in_every_group_that_it_is_a_member_of() -> None:
    counts = communicators({"tp": ((0, 1), (2, 3)), "embd": ((0, 2),)})
    assert [counts[rank] for rank in range(5)] == [2, 1, 2, 1, 0]
