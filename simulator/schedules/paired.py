"""Forward passes beside backward passes of other micro-batches, so that each hides what the other sends.

So runs Megatron-Core with ``overlap_moe_expert_parallel_comm`` (pipeline_parallel/combined_1f1b.py; schedules.py,
``get_pp_rank_microbatches``: one more forward pass of warm-up).
"""

from __future__ import annotations

from dataclasses import replace

from simulator.schedules.actions import Order, Schedule, Slot


def paired(schedule: Schedule) -> Schedule:
    """Return ``schedule`` with forward and backward passes of different micro-batches in one slot, played as one pass.

    A rank runs one forward pass more before its first backward pass, and so holds one micro-batch chunk more. No bubble
    is claimed. A schedule whose slots are pairs already stays as it is.
    """
    if schedule.joined:
        return schedule
    order, peak = schedule.order, schedule.peak

    def chunks_in_flight(p: int, m: int, v: int, rank: int) -> int | None:
        alone = peak(p, m, v, rank)
        return None if alone is None else min(alone + 1, m * v)

    return replace(
        schedule,
        order=lambda p, m, v: in_pairs(order(p, m, v)),
        bubble=lambda p, m, v, f, i, w: None,
        peak=chunks_in_flight,
        joined=True,
    )


def in_pairs(order: Order) -> Order:
    """Return ``order`` with each backward pass beside the forward pass behind it.

    >>> from simulator.schedules import SCHEDULES
    >>> [" ".join(map(str, slot)) for slot in in_pairs(SCHEDULES["1f1b"].order(1, 3, 1))[0]]
    ['0F0', '0F1 0B0', '0F2 0B1', '0B2']
    """
    return [_in_pairs(slots) for slots in order]


def _in_pairs(slots: list[Slot]) -> list[Slot]:
    actions = [action for slot in slots for action in slot]
    row: list[Slot] = []
    while actions:
        action = actions.pop(0)
        if action.kind == "B" and actions and actions[0].kind == "F":
            row.append((actions.pop(0), action))
        else:
            row.append((action,))
    return row
