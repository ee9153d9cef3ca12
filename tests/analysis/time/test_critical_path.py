"""The critical path of hand-made Timelines, and that it always adds up to the step."""

from __future__ import annotations

import pytest

from simulator.analysis.time.critical_path import critical_path
from simulator.timeline import Timeline
from tests.support.timelines import Span, pipeline, template, timeline


def seconds(play: Timeline) -> dict[str, float]:
    return {row["class"]: row["seconds"] for row in critical_path(play)}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("comm", [0.0, 0.125])
def test_the_path_adds_up_to_the_step_and_never_waits_in_an_ideal_pipeline(
    schedule: str, p: int, m: int, comm: float
) -> None:
    # Every start in such a pipeline is the end of something, so the chain has no gaps: with free hand-overs it is
    # (m + p - 1) times F + B of products.
    play = pipeline(schedule, p, m, comm=comm)
    path = critical_path(play)
    assert sum(row["seconds"] for row in path) == pytest.approx(play.step_time_s, rel=1e-12)
    assert sum(row["share"] for row in path) == pytest.approx(1.0, rel=1e-12)
    assert "waiting" not in seconds(play)
    if comm == 0.0:
        assert seconds(play) == {"matmul": pytest.approx((m + p - 1) * 3.0)}


def test_hand_overs_on_the_path_of_one_micro_batch() -> None:
    # With one micro-batch everything is in series: p F + p B and 2 (p - 1) transfers.
    assert seconds(pipeline("1f1b", 4, 1, comm=0.25)) == {
        "matmul": pytest.approx(12.0),
        "pp communication": pytest.approx(1.5),
    }


def test_the_path_crosses_to_the_rank_that_was_last_to_join_a_collective() -> None:
    # Rank 1 computes 5 s of attention where rank 0 computes 2 s of products; then both reduce gradients for 1 s.
    reduce = template(("grads", "all_reduce", "dp", 1.0), phase="C")
    play = timeline(
        [
            Span(0, "compute", template(("mm", "matmul", "compute", 2.0)), 0.0),
            Span(1, "compute", template(("fa", "attention", "compute", 5.0)), 0.0),
            Span(0, "dp", reduce, 5.0, posted=2.0, phase="C"),
            Span(1, "dp", reduce, 5.0, posted=5.0, phase="C"),
        ]
    )
    assert seconds(play) == {"attention": 5.0, "dp communication": 1.0}


def test_recompute_optimizer_and_unexplained_gaps_have_classes_of_their_own() -> None:
    block = template(("re", "matmul", "recompute", 1.0), ("ln", "norm", "compute", 2.0), phase="B")
    adam = template(("adam", "optimizer", "optimizer", 3.0), phase="O")
    play = timeline([Span(0, "compute", block, 0.5, phase="B"), Span(0, "compute", adam, 4.0, phase="O")])
    assert seconds(play) == {"recompute": 1.0, "norm": 2.0, "optimizer": 3.0, "waiting": 1.0}


def test_launch_gaps_inside_a_stretched_span() -> None:
    block = template(("a", "norm", "compute", 1.0), ("b", "gelu", "compute", 1.0))
    play = timeline([Span(0, "compute", block, 0.0, end=3.0, rows=((0.5, 2.0), (1.5, 3.0)))])
    assert seconds(play) == {"norm": pytest.approx(1.0), "gelu": pytest.approx(1.0), "host launch": pytest.approx(1.0)}


def test_no_spans_no_path() -> None:
    assert critical_path(timeline([])) == []
