"""The time of a GPU's memory, shared between the kernel that runs and the communication beside it."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from simulator.arrays import Floats
from simulator.costs.interference import InterferenceCost, memory_bytes
from simulator.engine.kernel_times import KernelTimes
from simulator.engine.representatives import PlannedComm
from simulator.program import Comm

#: Seconds within which all happens at once, whatever the order of additions.
INSTANT_s = 1e-12


def memory_demand(interference: InterferenceCost | None, comm: Comm, members: int, planned: PlannedComm) -> float:
    """Return the share of the memory's time that ``comm`` would take while its bytes move at full speed.

    It is 0 without ``interference``, and where copy engines move the bytes.
    """
    if interference is None or not comm.holds_sms:
        return 0.0
    seconds = planned.plan.moving_s
    nbytes = memory_bytes(comm, members, planned.wire_bytes)
    return interference.takes(nbytes / seconds) if seconds else 0.0


def equal_part(demands: Collection[float], left: float) -> float:
    """Return the equal part of ``left`` that limits each demand, in max-min fair shares.

    A demand below the equal part is met in full. The part is inf where ``left`` is enough for all.
    """
    for nth, demand in enumerate(sorted(demands)):
        part = left / (len(demands) - nth)
        if part < demand:
            return part
        left -= demand
    return math.inf


def share_left(left_by_op: Floats, times: KernelTimes, now: float) -> tuple[float, float]:
    """Return the share of the memory's time that the present op leaves, and when that changes.

    The share is inf between two ops. The time is inf where nothing changes any more.
    """
    starts_s, ends_s, elapsed_s = times.starts_s, times.ends_s, now + INSTANT_s - times.at_s
    op = times.op_at(now + INSTANT_s)
    if op == len(ends_s):
        return math.inf, math.inf
    if math.isinf(left_by_op[op]) or starts_s[op] > elapsed_s:
        demanding = np.flatnonzero((left_by_op[op:] < math.inf) & (starts_s[op:] > elapsed_s))
        return math.inf, times.at_s + float(starts_s[op + demanding[0]]) if len(demanding) else math.inf
    # Until an op that leaves another share, or until the host is late.
    other = (left_by_op[op + 1 :] != left_by_op[op]) | (starts_s[op + 1 :] > ends_s[op:-1] + INSTANT_s)
    last = op + int(other.argmax()) if other.any() else len(ends_s) - 1
    return float(left_by_op[op]), times.at_s + float(ends_s[last])
