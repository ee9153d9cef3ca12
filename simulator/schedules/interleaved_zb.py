"""Interleaved 1F1B whose weight gradients fill the drain of the pipeline, as PyTorch has it."""

from simulator.schedules.actions import Order, Schedule
from simulator.schedules.interleaved import chunk_actions, rounds, whole_rounds
from simulator.schedules.zb_h1 import bubble, split_order


def order(p: int, m: int, v: int) -> Order:
    """Warm rank r up with (p - r - 1) + (v - 1) (micro-batches per round) forwards, then run F and I in turn.

    Each W comes r input gradients behind its I. With one chunk this is ZB-H1."""
    return [
        split_order(
            chunk_actions("F", rank, p, m, v),
            chunk_actions("I", rank, p, m, v),
            warmup=min(p - rank - 1 + (v - 1) * (m // rounds(p, m)), m * v),
            lag=rank,
        )
        for rank in range(p)
    ]


SCHEDULE = Schedule(
    name="interleaved_zb",
    paper="Qi et al. 2023, arXiv 2401.10241; torch.distributed.pipelining ScheduleInterleavedZeroBubble",
    order=order,
    bubble=bubble,  # ZB-H1's, over v chunks
    peak=lambda p, m, v, rank: min((v - 1) * (m // rounds(p, m)) + p, m * v),
    check=whole_rounds,
    posts_ahead=True,
    chunks=None,
    splits=True,
)
