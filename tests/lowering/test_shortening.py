"""Steps with fewer micro-batches: how few are played, and from how many on it is worth it."""

from __future__ import annotations

import pytest

from simulator.lowering.shortening import MOST_PLAYED, MOST_PLAYED_WITH_EXPERTS, shortened_order
from simulator.schedules import SCHEDULES


@pytest.mark.parametrize(
    ("ranks", "played", "fewest", "most"),
    [
        (2, 1 + 8, 1259, MOST_PLAYED),
        (4, 3 + 8, 636, MOST_PLAYED),
        (8, 7 + 12, 332, MOST_PLAYED),
        (64, 63 + 96, 318, MOST_PLAYED),
        (64, 63 + 96, 1272, MOST_PLAYED_WITH_EXPERTS),
    ],
)
def test_1f1b_is_shortened_where_enough_passes_are_left_out(ranks: int, played: int, fewest: int, most: float) -> None:
    """The first of p ranks runs p - 1 forward passes, then pairs, which repeat: 8 of these are played, or 1.5 p. A
    micro-batch left out is 2 p passes, and 5,000 are the fewest that are worth it. With 2 ranks that is 5,000 / 4 =
    1,250 micro-batches beside the 9 that are played. With 4 ranks it is 625 beside 11, with 8 ranks 312.5 beside 19.
    The 159 that 64 ranks play have to be half of all, or an eighth."""
    schedule = SCHEDULES["1f1b"]
    assert shortened_order(schedule, (ranks, fewest - 1, 1), most) is None
    short = shortened_order(schedule, (ranks, fewest, 1), most)
    assert short is not None
    assert (short.repetition.microbatches, short.repetition.times) == (1, fewest - played)
    assert short.whole_microbatches == fewest
    # The order of passes is 1F1B's own of so few micro-batches.
    assert short.order == schedule.order(ranks, played, 1)


@pytest.mark.parametrize("ranks", [2, 8])
def test_what_is_left_out_is_a_pass_of_each_kind_on_each_rank(ranks: int) -> None:
    """The second period of rank r: a forward pass of micro-batch p - r, one behind the first pair's, and the backward
    pass of micro-batch 1. The stage of a rank is its number."""
    short = shortened_order(SCHEDULES["1f1b"], (ranks, 2000, 1))
    assert short is not None
    both = {(rank, kind, microbatch) for rank in range(ranks) for kind, microbatch in (("F", ranks - rank), ("B", 1))}
    assert short.repetition.passes == both
    three = short.repetition_in(3)
    assert three.steps == 3
    assert three.passes == {(rank, kind, n + 2000 * step) for rank, kind, n in both for step in range(3)}


def test_weight_gradients_left_out_may_be_whole_backward_passes() -> None:
    """ZB-H1 splits passes, and a pass that is not split stands where its weight gradient would. Each weight gradient
    left out is named as that of a whole pass too, and nothing else is."""
    short = shortened_order(SCHEDULES["zb_h1"], (4, 2000, 1))
    assert short is not None
    by_kind = {kind: {(s, n) for s, one, n in short.repetition.passes if one == kind} for kind in "FIWB"}
    assert by_kind["B"] == by_kind["W"]
    assert [sorted(stage for stage, _ in by_kind[kind]) for kind in "FIW"] == [[0, 1, 2, 3]] * 3


def test_schedules_that_run_on_are_left_as_they_are() -> None:
    assert shortened_order(SCHEDULES["async_1f1b"], (4, 2000, 1)) is None
