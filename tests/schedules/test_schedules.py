"""Pipeline schedules: what each rank does in which order, and that the order can be run."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from simulator.schedules import SCHEDULES, Action, requires, zb_auto
from simulator.schedules.actions import Times
from simulator.schedules.interleaved import warmup
from simulator.schedules.zb_auto import _longest

SIZES = [(p, m, v) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 8, 24) for v in (1, 2, 3)]


def legal(name: str) -> list[tuple[int, int, int]]:
    return [size for size in SIZES if SCHEDULES[name].check(*size) is None]


def flat(slots: list[tuple[Action, ...]]) -> list[Action]:
    return [action for slot in slots for action in slot]


def text(slots: list[tuple[Action, ...]]) -> str:
    return " ".join("+".join(map(str, slot)) for slot in slots)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_runs_every_microbatch_once_forward_and_back(name: str) -> None:
    assert legal(name)
    for p, m, v in legal(name):
        actions = [action for slots in SCHEDULES[name].order(p, m, v) for action in flat(slots)]
        # I and W together are a B; of two copies of the model each serves its half of the micro-batches.
        whole = [action._replace(kind="B") if action.kind == "W" else action for action in actions]
        inputs, weights = ({(a.stage, a.microbatch) for a in actions if a.kind == kind} for kind in "IW")
        assert inputs == weights
        copies = SCHEDULES[name].copies
        wanted = [
            Action(stage, kind, mb)
            for stage in range(p * v * copies)
            for kind in "FB"
            for mb in range(stage // (p * v) * m // copies, (stage // (p * v) + 1) * m // copies)
        ]
        assert sorted(action for action in whole if action.kind != "I") == sorted(wanted)


@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_hold_their_stages(name: str) -> None:
    schedule = SCHEDULES[name]
    for p, m, v in legal(name):
        for rank, slots in enumerate(schedule.order(p, m, v)):
            assert {schedule.rank_of(action.stage, p) for action in flat(slots)} == {rank}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_can_be_run(name: str) -> None:
    """Run whatever is ready, rank by rank, until nothing is left; a schedule that waits for its own future stops."""
    for p, m, v in legal(name):
        queues = [flat(slots) for slots in SCHEDULES[name].order(p, m, v)]
        done: set[Action] = set()
        moving = True
        while moving:
            moving = False
            for queue in queues:
                while queue and all(done.intersection(need) for need in requires(queue[0], p * v)):
                    done.add(queue.pop(0))
                    moving = True
        assert not any(queues)


@pytest.mark.parametrize("name", SCHEDULES)
def test_peak_of_held_microbatches_is_the_claim(name: str) -> None:
    """A forward holds a chunk's activations until the backward of the same micro-batch and stage: where split, W.
    Steps that run on as one are looked at until all ranks have come to their steady state."""
    for p, m, v in legal(name):
        steps = 1 if SCHEDULES[name].drains else p + 1
        for rank, slots in enumerate(SCHEDULES[name].over(p, m, v, steps)):
            held = peak = 0
            for action in flat(slots):
                held += {"F": 1, "I": 0}.get(action.kind, -1)
                peak = max(peak, held)
            assert SCHEDULES[name].peak(p, m, v, rank) in (peak, None)


def test_1f1b_of_four_ranks_as_text() -> None:
    """Warm-up of p - r - 1 forwards: 1 on the last but one rank, none on the last."""
    order = SCHEDULES["1f1b"].order(4, 3, 1)
    assert text(order[2]) == "2F0 2F1 2B0 2F2 2B1 2B2"
    assert text(order[3]) == "3F0 3B0 3F1 3B1 3F2 3B2"


def test_interleaved_pairs_forward_and_backward_in_the_steady_phase() -> None:
    """p 2, m 2, v 2: rank 1 warms up with 2 (2-1-1) + (2-1) 2 = 2 of its 4 forwards, then runs 2 pairs."""
    assert text(SCHEDULES["interleaved"].order(2, 2, 2)[1]) == "1F0 1F1 3F0+3B0 3F1+3B1 1B0 1B1"


def test_interleaved_warmup_counts_of_megatron() -> None:
    """R01: pp 4 with 2 chunks gives 10, 8, 6, 4."""
    assert [warmup(4, 8, 2, rank) for rank in range(4)] == [10, 8, 6, 4]


@pytest.mark.parametrize(
    ("size", "word"), [((4, 9, 2), "nearest: 8, 10, or any multiple of 4"), ((4, 8, 1), "at least 2 chunks")]
)
def test_interleaved_names_what_it_needs(size: tuple[int, int, int], word: str) -> None:
    assert word in (SCHEDULES["interleaved"].check(*size) or "")


def test_flexible_rounds_of_interleaved_schedules() -> None:
    """R02: pp 4 takes m 10 and m 3, not m 9: max(1, m // pp) rounds must share m evenly."""
    for name in ("interleaved", "interleaved_zb"):
        check = SCHEDULES[name].check
        assert [check(4, m, 2) is None for m in (10, 3, 9)] == [True, True, False]


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_minimum_of_microbatches_is_named(name: str) -> None:
    """R03: 2 pp."""
    assert "an even number of at least 8 micro-batches (2 pp" in (
        SCHEDULES[name].check(4, 6, SCHEDULES[name].chunks or 1) or ""
    )


def test_dualpipe_needs_pairs() -> None:
    assert "even number of pipeline ranks" in (SCHEDULES["dualpipe"].check(3, 8, 1) or "")
    assert "even number of at least 8" in (SCHEDULES["dualpipe"].check(4, 9, 1) or "")


def test_zb_h1_of_three_ranks_as_text() -> None:
    """As 1F1B with I for B; the W of rank r is r micro-batches behind."""
    order = SCHEDULES["zb_h1"].order(3, 3, 1)
    assert text(order[0]) == "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2"
    assert text(order[2]) == "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2"


def test_zb_h1_is_one_chunk_of_interleaved_zb() -> None:
    for p, m, v in legal("zb_h1"):
        if SCHEDULES["interleaved_zb"].check(p, m, v) is None:
            assert SCHEDULES["zb_h1"].order(p, m, v) == SCHEDULES["interleaved_zb"].order(p, m, v)


def test_dualpipe_folds_to_dualpipe_v() -> None:
    """p 4, m 8, seen from rank 0 and its mirror image, rank 3: each direction is chunk 0 where it begins."""
    order = SCHEDULES["dualpipe"].order(4, 8, 1)
    folded = SCHEDULES["dualpipe_v"].order(2, 4, 2)
    assert text(folded[0]).startswith("0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+3B1")
    assert text(order[0]).startswith("0F0 0F1 0F2 7F4 7I4 7W4 7F5 0F3+7B5")
    assert text(order[3]).startswith("4F4 4F5 4F6 3F0 3I0 3W0 3F1 4F7+3B1")


def test_a_gradient_comes_from_either_kind_of_backward() -> None:
    assert requires(Action(1, "I", 0), 4) == [(Action(1, "F", 0),), (Action(2, "B", 0), Action(2, "I", 0))]
    assert requires(Action(1, "W", 0), 4) == [(Action(1, "I", 0),)]
    assert requires(Action(4, "F", 3), 4) == []  # the first stage of a second copy


def test_one_stage_schedules_refuse_chunks() -> None:
    assert all("interleaved" in (SCHEDULES[name].check(4, 4, 2) or "") for name in ("naive", "gpipe", "1f1b"))


def test_actions_round_trip_as_text() -> None:
    actions = [Action(stage, kind, mb) for stage in (0, 12) for kind in "FBIW" for mb in (0, 7)]
    assert [Action.parse(str(action)) for action in actions] == actions
    with pytest.raises(ValueError, match="not an action"):
        Action.parse("2X0")


def test_stages_that_hold_nothing_are_scheduled_by_their_times() -> None:
    """Memory limits nothing where no stage keeps activations, so that the order is as short as that of ZB-H2."""
    times = Times.equal(2, 1.0, 1.0, 1.0, kept=0.0)
    empty = replace(times, forward_bytes=(0.0, 0.0))
    order = SCHEDULES["zb_auto"].tuned(empty).order(2, 4, 1)
    assert Counter(action.kind for slot in order[0] for action in slot) == {"F": 4, "I": 4, "W": 4}
    assert _longest(order, empty) == _longest(SCHEDULES["zb_h2"].order(2, 4, 1), empty)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (3, 1), (3, 8), (4, 12)])
@pytest.mark.parametrize("limit", [1.0, 2.0])
def test_zb_auto_leaves_out_nothing_that_would_be_better(p: int, m: int, limit: float, monkeypatch: Any) -> None:
    """Tried to their ends, constructions that take too long after the warm-up change nothing: idle time only grows."""
    times = Times.equal(p, 1.0, 1.2, 0.7, 0.05, limit, 0.6)
    lasted_s = _longest(zb_auto.search.__wrapped__(p, m, 1, times), times)
    monkeypatch.setattr(zb_auto, "_least_s", lambda ranks, m: 0.0)
    monkeypatch.setattr(zb_auto, "_bound_s", lambda p, m, times, limit: 0.0)
    assert _longest(zb_auto.search.__wrapped__(p, m, 1, times), times) == pytest.approx(lasted_s, rel=1e-12)


def test_zb_auto_bound_of_a_warm_up_by_hand() -> None:
    """The bound of three equal stages: the last forward ends at 3 and its gradient is back on the first at 5.

    The first stage's first forward ends at 1. In the 4 s up to the gradient it runs as many others as there is room
    for. Each stage has 4 micro-batches of 3 s.
    """
    times = Times.equal(3, 1.0, 1.0, 1.0)
    bounds = [zb_auto._bound_s(3, 4, times, limit) for limit in (1.0, 2.0, 3.0, 9.0)]
    assert bounds == [12 + 4, 12 + 3, 12 + 2, 12 + 1]  # three more at most: there are four micro-batches


def test_zb_auto_warms_up_only_what_may_be_better(monkeypatch: Any) -> None:
    """ZB-H1 leaves the first rank idle for less time than 15 of the 16 limits of memory up to 1F1B's do."""
    warmed_up, limits = zb_auto._warmed_up, []
    monkeypatch.setattr(zb_auto, "_warmed_up", lambda *given: limits.append(given[3]) or warmed_up(*given))
    zb_auto.search.__wrapped__(16, 64, 1, Times.equal(16, 1.0, 1.0, 1.0))
    assert set(limits) == {16.0}
