"""Interference of what stands in line with kernels, or waits for its peers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import pytest

from calibration.fit.interference import race
from simulator.engine.invariants import check
from simulator.program import Comm, from_text
from tests.support.clusters import HOP_s, NIC_Bps
from tests.support.contention import beside, slowed
from tests.support.grids import every_pair
from tests.support.quick import ByPurpose
from tests.support.transfers import IDEAL, SHORTCUTS, ends, play

IN_LINE = """
program name=in-line
block 0 name=layer
  compute k0 F fixed seconds=1.0
  comm sum all_reduce nbytes=1e12 axis=tp purpose=tp
  compute k1 F fixed seconds=2.0
role all ranks=0-3
  lane compute
    step layer block=0 phase=F
  lane dp
    step reduce
      comm grads all_reduce nbytes=4e9 axis=dp purpose=dp
group tp 0,1
group tp 2,3
group dp 0,2
group dp 1,3
"""


@pytest.mark.parametrize(("fold", "coalesce"), SHORTCUTS)
def test_interference_slows_kernels_but_not_what_stands_between_them(fold: bool, coalesce: bool) -> None:
    """Two nodes of two GPUs. A layer is a kernel of 1 s, an all-reduce in the node of 1 TB at 1 TB/s, 1 s, and a kernel
    of 2 s; across nodes gradients reduce, for 4 + 2 l s, and halve the speed of kernels. So the first kernel ends at 2,
    the all-reduce at 3, and the second kernel has done (1 + 2 l) / 2 at 4 + 2 l and ends at 5.5 + l."""
    rows = play(from_text(IN_LINE), slowed(dp=0.5), gpus=2, fold=fold, coalesce=coalesce).frame()
    mine = rows[rows["rank"] == 0].set_index("name")
    times = {"k0": (0, 2), "sum": (2, 3), "k1": (3, 5.5 + HOP_s), "grads": (0, 4 + 2 * HOP_s)}
    for name, (start, end) in times.items():
        assert (mine["start_s"][name], mine["end_s"][name]) == pytest.approx((start, end), rel=1e-9)


@pytest.mark.parametrize(("fold", "coalesce"), SHORTCUTS)
def test_an_in_line_collective_that_meets_another_on_its_links_is_delayed(fold: bool, coalesce: bool) -> None:
    """The same layer with its tensor-parallel groups across nodes, (0, 2) and (1, 3), where its all-reduce is of 1 GB
    and meets the gradients' of 4 GB on the NIC from 1 s on. By 1 + 2 l, when its bytes start, the gradients have sent
    C; both have half until its 1 GB is through at 3 + 2 l, then the gradients have 3 - 1 = 2 GB left: 5 + 2 l."""
    crossing = IN_LINE.replace("1e12", "1e9").replace("group tp 0,1\ngroup tp 2,3", "group tp 0,2\ngroup tp 1,3")
    rows = play(from_text(crossing), gpus=2, fold=fold, coalesce=coalesce).frame()
    mine = rows[rows["rank"] == 0].set_index("name")
    end = 3 + 2 * HOP_s
    times = {"k0": (0, 1), "sum": (1, end), "k1": (end, end + 2), "grads": (0, 5 + 2 * HOP_s)}
    for name, (start, end) in times.items():
        assert (mine["start_s"][name], mine["end_s"][name]) == pytest.approx((start, end), rel=1e-9)


# Communication that waits for its peers.

LATE = """
program name=late
block 0 name=long
  compute long F fixed seconds=10.0
block 1 name=first
  compute first F fixed seconds={late}
role early ranks=0-1
  lane compute
    step long block=0 phase=F
  lane dp
    step reduce
      comm grads all_reduce nbytes=1e9 axis=dp purpose=dp algorithm=ring
role late ranks=2-3
  lane compute
    step first block=1 phase=F
    step long block=0 phase=F
  lane dp
    step reduce after=first
      comm grads all_reduce nbytes=1e9 axis=dp purpose=dp algorithm=ring
group dp 0,2
group dp 1,3
"""


@dataclass(frozen=True)
class WaitingIsOther:
    """Kernels run at one speed beside what waits, at another beside what moves."""

    waiting: float
    moving: float
    queues: bool = False

    def load(self, waiting: Sequence[Comm], moving: Sequence[Comm]) -> float | None:
        return self.moving if moving else self.waiting if waiting else None

    def speed(self, kernel: object, load: Hashable) -> float:
        return load if isinstance(load, float) else 1.0

    def takes(self, memory_Bps: float) -> float:
        return 0.0

    def leaves(self, kernel: object) -> float:
        return math.inf


@every_pair(
    {
        "fold, coalesce": SHORTCUTS,
        "late": [0.5, 3.0],
        "waiting, moving": [(0.5, 0.5), (0.75, 0.5), (1.0, 0.8)],
    }
)
def test_a_kernel_that_waits_for_its_peers_slows_what_runs_beside_it(
    waiting: float, moving: float, late: float, fold: bool, coalesce: bool
) -> None:
    """Pairs of nodes reduce 1 GB, T = 2 l + S / C. One of each pair calls at once, its kernel is on the GPU, and waits;
    the other calls when its first kernel of ``late`` s has ended. So 10 s of work of the first take (1 - waiting) late
    + (1 - moving) T more, that of the second, whose kernel never waits, (1 - moving) T."""
    costs = replace(IDEAL, interference=WaitingIsOther(waiting, moving))
    timeline = play(from_text(LATE.format(late=late)), costs, fold=fold, coalesce=coalesce)
    seconds = 2 * HOP_s + 1e9 / NIC_Bps
    early, other = ends(timeline, 0), ends(timeline, 2)
    assert early["reduce"] == other["reduce"] == pytest.approx(late + seconds, rel=1e-9)
    assert early["long"] == pytest.approx(10 + (1 - waiting) * late + (1 - moving) * seconds, rel=1e-9)
    assert other["long"] == pytest.approx(late + 10 + (1 - moving) * seconds, rel=1e-9)


HAND_OVER = """
program name=hand-over
block 0 name=long
  compute long F fixed seconds=10.0
block 1 name=first
  compute first F fixed seconds=1.0
role sender ranks=0
  lane compute
    step first block=1 phase=F
    step long block=0 phase=F
  lane pp
    step send after={send}
      comm act send nbytes=1e9 axis=pp purpose=pp peer=1
role receiver ranks=1
  lane compute
    step first block=1 phase=F
    step long block=0 phase=F
  lane pp
    step recv{after}
      comm act recv nbytes=1e9 axis=pp purpose=pp peer=0{posted}
group pp 0,1
"""


@pytest.mark.parametrize(
    ("send", "after", "posted", "waits"),
    [
        ("long", " after=first", "", 1),
        ("first", " after=long", "", None),
        ("long", "", " as_it_comes=True", None),
        ("long", " after=first", " as_it_comes=True", None),
    ],
    ids=["late-send", "late-receive", "as-it-comes", "as-it-comes-after"],
)
@pytest.mark.parametrize("speed", [0.5, 0.8])
def test_receives_hold_sms_while_they_wait_and_sends_do_not(
    send: str, after: str, posted: str, waits: int | None, speed: float
) -> None:
    """A first kernel of 1 s and one of 10 s on both. A receive posted between them waits beside the second one until
    what is sent after 11 s has come, at 11 + l + S / C: all 10 s at ``speed``, so that it is still there when they end,
    at 1 + 10 / speed, or they end beyond that, (1 - speed) (10 + l + S / C) later than alone. A send that waits for the
    receive, and a receive that is posted as its bytes come, cost nothing before, and what moves after 11 s meets no
    kernel."""
    timeline = play(from_text(HAND_OVER.format(send=send, after=after, posted=posted)), slowed(pp=speed))
    there = 10 + HOP_s + 1e9 / NIC_Bps
    slowed_s = min(10 / speed - 10, (1 - speed) * there)
    for rank in (0, 1):
        expected = 11 + (slowed_s if rank == waits else 0.0)
        assert ends(timeline, rank)["long"] == pytest.approx(expected, rel=1e-9), rank


# Communication that waits for SMs.


@every_pair(
    {
        "fold, coalesce": SHORTCUTS,
        "speed": [0.5, 0.8, 1.0],
        "kernel_s, nbytes": [(1.0, 1e8), (1.0, 1.7e9), (0.1, 1e9), (0.35, 0.3e9)],
    }
)
def test_reductions_in_a_row_beside_kernels_in_a_row_begin_when_one_ends(
    kernel_s: float, nbytes: float, speed: float, fold: bool, coalesce: bool
) -> None:
    """As `calibration.fit.interference.race` derives in closed form: a reduction is posted when the one before has
    ended, begins when the kernel under way ends, and slows kernels while it is in flight. The first one is posted as
    the first kernel begins, which holds all SMs, so that the race is one with the others."""
    kernels, all_reduce_s = 12, 2 * HOP_s + nbytes / NIC_Bps
    reductions = math.ceil(kernels * kernel_s / speed / all_reduce_s) + 1
    program = beside(2, (kernel_s,) * kernels, nbytes, [f"r{i}" for i in range(reductions)])
    costs = replace(IDEAL, interference=ByPurpose({"dp": speed if speed < 1 else 0.999999}, queues=True))
    timeline = play(program, costs, fold=fold, coalesce=coalesce)
    check(program, timeline)
    slow_down = race(kernel_s, all_reduce_s, min(speed, 0.999999), kernels - 1)
    expected = 0.5 + (1 + slow_down * (kernels - 1)) * kernel_s
    assert ends(timeline)["layers"] == pytest.approx(expected, rel=1e-9)
    # What waits for SMs is not on the GPU yet.
    rows = timeline.frame()
    first = rows[(rows["rank"] == timeline.ranks[0]) & (rows["kind"] == "all_reduce")].iloc[0]
    assert first["posted_s"] == first["start_s"] == pytest.approx(0.5 + kernel_s, rel=1e-9)
