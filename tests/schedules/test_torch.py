"""Our order of computation is PyTorch's own, for every schedule that it can build."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from simulator.lowering.pipeline import lower
from simulator.program import Block, Step
from simulator.schedules import SCHEDULES, Action, from_csv, to_csv

torch_schedules = pytest.importorskip(
    "torch.distributed.pipelining.schedules", reason="compares with PyTorch's schedules; needs torch"
)

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
#: An odd number of stages and two powers of two: `make test` has these, slow tests the others.
SAMPLED = (2, 3, 4)
SIZES = [
    pytest.param(name, p, v, marks=() if p in SAMPLED else pytest.mark.slow)
    for name in CLASSES
    for p in range(2, 9)
    for v in (1, 2, 3, 4)
    if SCHEDULES[name].check(p, 4 * p, v) is None
]


def torch_order(name: str, p: int, m: int, v: int) -> list[list[str]]:
    """Return the order that PyTorch's class computes in its constructor, which itself would need process groups.

    It is the compute actions as text, a forward and a backward that overlap one after the other.
    """
    schedule: Any = object.__new__(getattr(torch_schedules, CLASSES[name]))
    rounds = max(1, m // p)
    vars(schedule).update(
        pp_group_size=p,
        n_local_stages=v,
        _num_stages=p * v,
        num_stages=p * v,
        _n_microbatches=m,
        _stages=[None] * v,
        number_of_rounds=rounds,
        microbatches_per_round=m // rounds,
    )
    if name in ("gpipe", "1f1b"):
        return [_played(schedule, rank, p, m) for rank in range(p)]
    actions = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(p)}
    if name == "interleaved_zb":
        schedule.pipeline_order = actions
        actions = schedule._add_bubbles_to_actions(p * v)
    return [
        [
            str(part)
            for action in actions[rank]
            if action is not None and action.is_compute_op
            for part in (action.sub_actions or (action,))
        ]
        for rank in range(p)
    ]


def _played(schedule: Any, rank: int, p: int, m: int) -> list[str]:
    """What a schedule of one stage per rank really calls (the plan that Schedule1F1B draws of itself numbers the last
    rank's forwards from 1)."""
    calls: list[str] = []
    stage = Mock(stage_index=rank)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    stage.forward_one_chunk.side_effect = lambda mb, *_, **__: calls.append(f"{rank}F{mb}")
    stage.backward_one_chunk.side_effect = lambda mb, *_, **__: calls.append(f"{rank}B{mb}")
    vars(schedule).update(
        _stage=stage,
        _num_stages=p,
        _has_backward=True,
        scale_grads=False,
        _check_inputs=lambda *_: ([()] * m, [{}] * m),
        _initialize_stage=Mock(),
        _maybe_compute_loss=Mock(),
        _maybe_get_loss=Mock(),
        _update_losses=Mock(),
    )
    schedule._step_microbatches()
    return calls


@pytest.mark.parametrize(("name", "p", "v"), SIZES)
def test_order_is_pytorchs(name: str, p: int, v: int) -> None:
    compared = 0
    for m in range(1, 4 * p + 3):
        if SCHEDULES[name].check(p, m, v) is not None:
            continue
        if name == "1f1b" and m < p:
            continue  # Schedule1F1B refuses fewer micro-batches than stages.
        ours = [[str(action) for slot in slots for action in slot] for slots in SCHEDULES[name].order(p, m, v)]
        assert ours == torch_order(name, p, m, v), (p, m, v)
        compared += 1
    assert compared >= p


def lowered_by_torch(name: str, p: int, m: int, v: int) -> str:
    """Our order with the sends and receives that PyTorch adds, as it writes it."""
    schedule = SCHEDULES[name]
    actions = {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(to_csv(schedule.order(p, m, v), joined=schedule.joined).splitlines())
    }
    lowered = torch_schedules._add_send_recv(actions, lambda stage: schedule.rank_of(stage, p), p * v)
    return "".join(",".join(map(str, row)) + "\n" for row in lowered.values())


@pytest.mark.parametrize("name", CLASSES)
def test_pytorch_and_we_read_each_others_files(name: str) -> None:
    """PyTorch reads our cells as its actions; with the sends and receives that it adds, and written as it writes them,
    we read the same order."""
    p, m = 4, 8
    schedule = SCHEDULES[name]
    v = schedule.chunks or 2
    ours = to_csv(schedule.order(p, m, v), joined=schedule.joined)
    text = lowered_by_torch(name, p, m, v)
    read = from_csv(text, "torch")
    assert read.rows is not None
    assert to_csv(read.rows, joined=read.joined) == text
    assert to_csv(read.order(p, m, v), joined=read.joined) == ours
    assert "SEND_F" in text
    assert "RECV_B" in text


@pytest.mark.parametrize("name", [name for name in CLASSES if SCHEDULES[name].posts_ahead])
def test_transfers_beside_computation_are_posted_where_pytorchs_runtime_posts_them(name: str) -> None:
    """What `lower` makes of the order alone is what it makes of PyTorch's plan with the sends and receives written, be
    there a stream per neighbour or one."""
    schedule = SCHEDULES[name]

    def empty(action: Action, after: tuple[str, ...]) -> Step:
        return Step(str(action), Block("work", ()), after)

    for p, m in ((2, 4), (4, 8), (3, 9)):
        v = schedule.chunks or 2
        written = from_csv(lowered_by_torch(name, p, m, v), "torch")
        ours, theirs = (
            [
                lower(one.order(p, m, v), one, p * v, 1.0, empty, overlap=True, batched=batched)
                for batched in (False, True)
            ]
            for one in (schedule, written)
        )
        assert ours == theirs


def test_we_refuse_only_rounds_that_pytorch_refuses() -> None:
    """Interleaved schedules: PyTorch refuses m that its max(1, m // p) rounds do not divide."""
    for name in ("interleaved", "interleaved_zb"):
        for p in range(2, 9):
            for m in range(1, 4 * p):
                assert (SCHEDULES[name].check(p, m, 2) is None) == (m % max(1, m // p) == 0)
