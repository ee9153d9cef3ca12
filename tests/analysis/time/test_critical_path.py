"""The critical path of hand-made Timelines, and that it always adds up to the step."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize("rounding_s", [1e-15, 0.0, -1e-15])
def test_of_ranks_that_end_together_the_path_is_the_first_ones(rounding_s: float) -> None:
    # Rank 0 multiplies for 5 s, rank 1 attends for 5 s, give or take the last digit, which says nothing.
    play = timeline(
        [
            Span(0, "compute", template(("mm", "matmul", "compute", 5.0)), 0.0),
            Span(1, "compute", template(("fa", "attention", "compute", 5.0 + rounding_s)), 0.0),
        ]
    )
    assert seconds(play) == {"matmul": pytest.approx(5.0)}


@pytest.mark.parametrize("rounding_s", [1e-15, 0.0, -1e-15])
def test_of_ranks_that_join_a_collective_together_the_path_goes_on_with_the_first(rounding_s: float) -> None:
    # Ranks 0 and 1 join after 5 s of products and of attention; rank 2, which ends last by a norm, waits for both.
    reduce = template(("grads", "all_reduce", "dp", 1.0), phase="C")
    play = timeline(
        [
            Span(0, "compute", template(("mm", "matmul", "compute", 5.0)), 0.0),
            Span(1, "compute", template(("fa", "attention", "compute", 5.0 + rounding_s)), 0.0),
            *(Span(rank, "dp", reduce, 5.0, posted=5.0 if rank < 2 else 0.0, phase="C") for rank in range(3)),
            Span(2, "compute", template(("ln", "norm", "compute", 1.0)), 6.0),
        ]
    )
    assert seconds(play) == {"matmul": pytest.approx(5.0), "dp communication": 1.0, "norm": 1.0}


def test_recompute_optimizer_and_unexplained_gaps_have_classes_of_their_own() -> None:
    block = template(("re", "matmul", "recompute", 1.0), ("ln", "norm", "compute", 2.0), phase="B")
    adam = template(("adam", "optimizer", "optimizer", 3.0), phase="O")
    play = timeline([Span(0, "compute", block, 0.5, phase="B"), Span(0, "compute", adam, 4.0, phase="O")])
    assert seconds(play) == {"recompute": 1.0, "norm": 2.0, "optimizer": 3.0, "waiting": 1.0}


def test_launch_gaps_inside_a_stretched_span() -> None:
    block = template(("a", "norm", "compute", 1.0), ("b", "gelu", "compute", 1.0))
    play = timeline([Span(0, "compute", block, 0.0, end=3.0, rows=((0.5, 2.0), (1.5, 3.0)))])
    assert seconds(play) == {"norm": pytest.approx(1.0), "gelu": pytest.approx(1.0), "host launch": pytest.approx(1.0)}


#: A gather of 4 s beside two products of 1 s, before a norm of 1 s.
BESIDE = replace(
    template(
        ("gather", "all_gather", "tp", 4.0),
        ("a", "matmul", "compute", 1.0),
        ("b", "matmul", "compute", 1.0),
        ("c", "norm", "compute", 1.0),
    ),
    beside={0: 2},
)


def test_of_a_communication_and_kernels_beside_it_what_ends_last_is_on_the_path() -> None:
    # The norm waits for the gather, which ends at 4 s, and not for the products, which end at 2 s.
    assert seconds(timeline([Span(0, "compute", BESIDE, 0.0, end=5.0)])) == {"tp communication": 4.0, "norm": 1.0}
    # Products that the host launches at 2 and 4 s end at 3 and 5 s. The norm waits for the second one, and both for the
    # host: until 2 s, and from 3 to 4 s.
    rows = ((0.0, 2.0, 4.0, 5.0), (4.0, 3.0, 5.0, 6.0))
    assert seconds(timeline([Span(0, "compute", BESIDE, 0.0, end=6.0, rows=rows)])) == {
        "matmul": 2.0,
        "norm": 1.0,
        "host launch": 3.0,
    }


def test_of_a_span_that_the_window_cuts_the_ops_inside_count() -> None:
    # From 4.5 s on there is half of the norm, and none of the gather's 4 s.
    play = timeline([Span(0, "compute", BESIDE, 0.0, end=5.0)])
    assert [(row["class"], row["seconds"]) for row in critical_path(play, (4.5, 5.0))] == [("norm", 0.5)]


def test_a_kernel_beside_a_communication_waits_for_the_host_that_issues_it_first() -> None:
    # The host has issued the gather at 2 s, for which the lane has waited since 1 s, and the product behind it at 3 s.
    # The product ends last: 1 s of norm, 2 s of the host, 4 s of product.
    play = timeline(
        [
            Span(0, "compute", template(("n", "norm", "compute", 1.0)), 0.0),
            Span(0, "compute", template(("mm", "matmul", "compute", 4.0)), 3.0, posted=2.0),
            Span(0, "tp", template(("g", "all_gather", "tp", 1.0)), 2.0, posted=1.0, launched=2.0),
        ]
    )
    assert seconds(play) == {"norm": 1.0, "matmul": 4.0, "host launch": 2.0}


def test_no_spans_no_path() -> None:
    assert critical_path(timeline([])) == []
