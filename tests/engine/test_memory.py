"""Communication beside kernels has of the memory's time what they leave it, and goes on at full speed behind them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest

from simulator.costs import Costs
from simulator.costs.interference import memory_bytes
from simulator.engine.memory_bandwidth import equal_part
from simulator.program import CollectiveKind, Comm, Fixed, from_text
from tests.support.clusters import HOP_s, NIC_Bps
from tests.support.grids import every_pair
from tests.support.programs import comm_called
from tests.support.transfers import IDEAL, SHORTCUTS, ends, play

#: What a memory moves that an all-reduce on two nodes takes half of the time of: it moves 4 bytes for one on the NIC.
MEMORY_Bps = 8 * NIC_Bps


@dataclass(frozen=True)
class Leaving:
    """Kernels of so many seconds leave a share of the memory's time; nothing slows a kernel."""

    shares: Mapping[float, float]
    queues: bool = False

    def load(self, waiting: Sequence[Comm], moving: Sequence[Comm]) -> None:
        return None

    def speed(self, kernel: object, load: Hashable) -> float:
        return 1.0

    def takes(self, memory_Bps: float) -> float:
        return memory_Bps / MEMORY_Bps

    def leaves(self, kernel: object) -> float:
        assert isinstance(kernel, Fixed)
        return self.shares.get(kernel.seconds, math.inf)


def leaving(shares: Mapping[float, float]) -> Costs:
    return replace(IDEAL, interference=Leaving(shares))


PAIR = """
program name=pair
block 0 name=first
{first}
block 1 name=second
{second}
role a ranks=0
  lane compute
    step layers block=0 phase=F
  lane dp
    step reduce
      comm grads all_reduce nbytes=1e9 axis=dp purpose=dp algorithm=ring
role b ranks=1
  lane compute
    step layers block=1 phase=F
  lane dp
    step reduce
      comm grads all_reduce nbytes=1e9 axis=dp purpose=dp algorithm=ring
group dp 0,1
"""


def rows(kernels: Sequence[float]) -> str:
    return "\n".join(f"  compute k{i} F fixed seconds={seconds}" for i, seconds in enumerate(kernels))


@every_pair(
    {
        "fold, coalesce": SHORTCUTS,
        "share": [0.25, 0.4, 0.6],
        "first, second": [
            ((4.0,), (4.0,)),
            ((0.25,), (0.25,)),
            ((0.125, 0.25, 0.125, 0.5), (0.125, 0.25, 0.125, 0.5)),
            ((0.25,) * 4, (0.125, 0.25, 0.125)),
            ((0.125,) * 3, (0.0625, 0.25, 0.0625)),
        ],
    }
)
def test_a_collective_is_as_fast_as_the_memory_that_kernels_leave_it(
    first: tuple[float, ...], second: tuple[float, ...], share: float, fold: bool, coalesce: bool
) -> None:
    """S bytes all-reduced by two ranks take 2 hops and S / C. Meanwhile each reads and writes 4 S of its memory (input
    and output once, what it receives twice), half of what that moves in the time. Kernels of 1/4, 1/2 and 4 s leave
    ``share`` of it: 2 share of full speed at most, on both ranks while they run on either. Others leave all. Where no
    kernel runs that leaves less than half, it moves at full speed."""
    slow = dict.fromkeys((0.25, 0.5, 4.0), share)
    timeline = play(
        from_text(PAIR.format(first=rows(first), second=rows(second))), leaving(slow), fold=fold, coalesce=coalesce
    )
    slowed: list[tuple[float, float]] = []
    for kernels in (first, second):
        until = [0.0, *accumulate(kernels)]
        slowed += [(begin, end) for begin, end, k in zip(until, until[1:], kernels, strict=False) if k in slow]
    edges = sorted({2 * HOP_s, *(edge for span in slowed for edge in span if edge > 2 * HOP_s)})
    left, now = 1e9 / NIC_Bps, 2 * HOP_s
    for edge in [*edges[1:], math.inf]:
        speed = min(1.0, 2 * share) if any(begin <= now < end for begin, end in slowed) else 1.0
        if left / speed <= edge - now:
            break
        left, now = left - speed * (edge - now), edge
    for rank in (0, 1):
        assert ends(timeline, rank)["reduce"] == pytest.approx(now + left / speed, rel=1e-9)
        assert ends(timeline, rank)["layers"] == pytest.approx(sum((first, second)[rank]), rel=1e-9)


TOGETHER = """
program name=together
block 0 name=long
  compute long F fixed seconds=100.0
role a ranks=0-1
  lane compute
    step long block=0 phase=F
  lane dp
    step reduce
      comm grads all_reduce nbytes=1e9 axis=dp purpose=dp algorithm=ring
  lane cp
    step ring
      comm kv all_reduce nbytes=1e9 axis=cp purpose=cp algorithm=ring
group dp 0,1
group cp 0,1
"""


@pytest.mark.parametrize(("fold", "coalesce"), SHORTCUTS)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_what_moves_at_once_shares_what_is_left(share: float, fold: bool, coalesce: bool) -> None:
    """Two all-reduces of S bytes at once could take all of the memory's time, each has half of the NIC. Where
    ``share`` is less than one half, so much of the memory is left to both as moves ``share`` C on the NIC for each;
    else the NIC decides, at C / 2."""
    timeline = play(from_text(TOGETHER), leaving({100.0: share}), fold=fold, coalesce=coalesce)
    expected = 2 * HOP_s + 1e9 / (min(share, 0.5) * NIC_Bps)
    assert ends(timeline)["reduce"] == ends(timeline)["ring"] == pytest.approx(expected, rel=1e-9)


MIXED = TOGETHER.replace("comm kv all_reduce", "comm kv broadcast")


def filled(wanted: Sequence[float], whole: float) -> list[float]:
    """Max-min shares of ``whole``, by bisection: the largest part of which all may have, and that fits."""
    low, high = 0.0, max(wanted)
    for _ in range(200 if sum(wanted) > whole else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(min(one, middle) for one in wanted) <= whole else (low, middle)
    return [min(one, high) for one in wanted]


@pytest.mark.parametrize(("fold", "coalesce"), SHORTCUTS)
@pytest.mark.parametrize("share", [0.2, 0.4, 0.45, 0.49, 0.6, 0.7, 0.9])
def test_who_takes_less_than_an_equal_part_of_the_memory_has_it(share: float, fold: bool, coalesce: bool) -> None:
    """Of S bytes an all-reduce of two takes S on the NIC behind 2 hops, and 4 S of the memory: half of its time; a
    broadcast S behind one, and on the mean of the two 2 S: a quarter. What each may have of the memory counts from its
    start; of the NIC they have equal parts, where the memory lets them."""
    timeline = play(from_text(MIXED), leaving({100.0: share}), fold=fold, coalesce=coalesce)
    takes, left = (0.5, 0.25), [1e9 / NIC_Bps, 1e9 / NIC_Bps]
    by_memory = [had / one for had, one in zip(filled(takes, share), takes, strict=True)]
    both = filled(by_memory, 1.0)
    alone = [min(1.0, share / one) for one in takes]
    left[1] -= HOP_s * by_memory[1]  # the other's second hop, with the NIC for itself
    until = min(one / speed for one, speed in zip(left, both, strict=True))
    ended = [
        2 * HOP_s + until + max(0.0, one - until * speed) / by_itself
        for one, speed, by_itself in zip(left, both, alone, strict=True)
    ]
    assert ends(timeline)["reduce"] == pytest.approx(ended[0], rel=1e-9)
    assert ends(timeline)["ring"] == pytest.approx(ended[1], rel=1e-9)


@pytest.mark.parametrize(
    ("takes", "leaves", "part"),
    [
        ((0.1, 0.6), 0.5, 0.4),  # 0.1 and what is left
        ((0.6, 0.1), 0.5, 0.4),
        ((0.3, 0.6), 0.5, 0.25),
        ((0.05, 0.2, 0.3, 0.9), 0.8, 0.275),  # 0.05 + 0.2, and half of the rest each
        ((0.2, 0.3), 0.5, math.inf),
        ((0.2,), 0.1, 0.1),
        ((), 0.1, math.inf),
        ((0.2, 0.9), math.inf, math.inf),
    ],
)
def test_equal_parts_of_what_is_left(takes: tuple[float, ...], leaves: float, part: float) -> None:
    assert equal_part(takes, leaves) == pytest.approx(part)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_bytes_of_memory_are_input_output_and_twice_what_is_received(n: int) -> None:
    """Of S bytes as nccl-tests counts them: an all-reduce reads S and writes S, and receives 2 (n-1)/n S; an all-gather
    reads S/n and writes S, a reduce-scatter the other way round, an all-to-all S and S, each receives (n-1)/n S. The
    sender of a transfer reads its bytes, the receiver has them in its buffer, reads and writes them."""
    size = 1e9

    def moved(op: str, received: float) -> float:
        return memory_bytes(comm_called("", op, size, "dp", "dp"), n, received * size) / size

    part = (n - 1) / n
    assert moved("all_reduce", 2 * part) == pytest.approx(2 + 4 * part)
    assert moved("all_gather", part) == moved("reduce_scatter", part) == pytest.approx(1 + 1 / n + 2 * part)
    assert moved("all_to_all", part) == pytest.approx(2 + 2 * part)
    assert moved("send", 1.0) == 1
    assert moved("recv", 1.0) == 3


@pytest.mark.parametrize("n", [2, 3, 8])
def test_of_every_collective_input_and_output_are_counted(n: int) -> None:
    """(Input, output) of each member as shares of the size, member 0 the root, as NCCL has them in place: a broadcast
    is only read by the root and only written by the others, a reduce read by all and written by the root, a gather read
    a part each and written by the root, a scatter the other way round. With nothing received their mean is counted."""
    root, rest, part = 1.0, n - 1, 1 / n
    of = {
        **dict.fromkeys(("all_reduce", "all_to_all", "send_recv", "barrier"), [(1.0, 1.0)] * n),
        "all_gather": [(part, 1.0)] * n,
        "reduce_scatter": [(1.0, part)] * n,
        "broadcast": [(root, 0.0), *[(0.0, 1.0)] * rest],
        "reduce": [(1.0, root), *[(1.0, 0.0)] * rest],
        "gather": [(part, root), *[(part, 0.0)] * rest],
        "scatter": [(root, part), *[(0.0, part)] * rest],
    }
    assert set(of) == set(CollectiveKind)
    for op, members in of.items():
        comm = comm_called("", op, 1e6, "dp", "dp")
        assert memory_bytes(comm, n, 0.0) == pytest.approx(1e6 * sum(map(sum, members)) / n), op
        assert memory_bytes(comm, n, 5e6) - memory_bytes(comm, n, 0.0) == pytest.approx(1e7), op
