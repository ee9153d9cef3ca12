"""Pipeline schedules: what each rank does in which order, and that the order can be run."""

import pytest

from simulator.schedules import SCHEDULES, Action, requires
from simulator.schedules.interleaved import warmup

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
        wanted = [Action(stage, kind, mb) for stage in range(p * v) for kind in "FB" for mb in range(m)]
        assert sorted(actions) == sorted(wanted)


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
                while queue and all(need in done for need in requires(queue[0], p * v)):
                    done.add(queue.pop(0))
                    moving = True
        assert not any(queues)


@pytest.mark.parametrize("name", SCHEDULES)
def test_peak_of_held_microbatches_is_the_claim(name: str) -> None:
    """A forward holds a chunk's activations until the backward of the same micro-batch and stage."""
    for p, m, v in legal(name):
        for rank, slots in enumerate(SCHEDULES[name].order(p, m, v)):
            held = peak = 0
            for action in flat(slots):
                held += 1 if action.kind == "F" else -1
                peak = max(peak, held)
            assert peak == SCHEDULES[name].peak(p, m, v, rank)


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


@pytest.mark.parametrize(("size", "word"), [((4, 6, 2), "multiple of 4"), ((4, 8, 1), "at least 2 chunks")])
def test_interleaved_names_what_it_needs(size: tuple[int, int, int], word: str) -> None:
    assert word in (SCHEDULES["interleaved"].check(*size) or "")


def test_one_stage_schedules_refuse_chunks() -> None:
    assert all("interleaved" in (SCHEDULES[name].check(4, 4, 2) or "") for name in ("naive", "gpipe", "1f1b"))


def test_actions_round_trip_as_text() -> None:
    actions = [Action(stage, kind, mb) for stage in (0, 12) for kind in "FBIW" for mb in (0, 7)]
    assert [Action.parse(str(action)) for action in actions] == actions
    with pytest.raises(ValueError, match="not an action"):
        Action.parse("2X0")
