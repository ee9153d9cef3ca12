"""The zero-bubble paper's automatic search: an order for the seconds of each stage's passes, under a limit of memory.

A greedy construction runs forwards front to back and input gradients back to front, one of each per micro-batch. It
puts weight gradients where a rank would idle, or has no room left. It is repeated for all settings of its choices. The
result competes with the orders that the paper made by hand, and is thus never worse than one of these that fits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, count, pairwise, product

from simulator.schedules import one_f_one_b, zb_h1, zb_h2
from simulator.schedules.actions import Action, Order, Schedule, Slot, Times, one_chunk

#: Sums of the same bytes in another order differ by less.
_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class _Choices:
    """Choices whose effect the construction cannot know in advance (arXiv 2401.10241, section 3.1).

    ``one_more``: a forward more in the warm-up even if it delays the first gradient. ``wait``: a rank that is ahead
    leaves a forward out if that costs it less idle time than the worst rank has. ``fill``: a weight gradient goes into
    a gap that is too short for it even if the rank's idle time is not the worst.
    """

    one_more: bool
    wait: bool
    fill: bool


class _Rank:
    """One rank while its order is made or played: seconds, bytes, and when its forwards and input gradients end."""

    def __init__(self, stage: int, times: Times, limit: float) -> None:
        self.stage = stage
        self.f, self.i, self.w = times.forward_s[stage], times.input_s[stage], times.weight_s[stage]
        self.forward_bytes, self.split_bytes = times.forward_bytes[stage], times.split_bytes[stage]
        self.limit = limit * _SLACK
        #: What has to be free for a forward whose input gradient is to fit as well (it needs more where it recomputes).
        self.room = max(self.forward_bytes, self.split_bytes)
        self.now = self.idle = self.bytes = 0.0
        self.forwards: list[float] = []
        self.inputs: list[float] = []
        self.weights = 0
        self.kinds: list[str] = []

    @property
    def pending(self) -> bool:
        """A weight gradient is there to run."""
        return self.weights < len(self.inputs)

    def forward(self, ready: float) -> None:
        self.kinds.append("F")
        if self.forwards:
            self.idle += max(ready - self.now, 0.0)
        self.now = max(self.now, ready) + self.f
        self.bytes += self.forward_bytes
        self.forwards.append(self.now)

    def input_gradient(self, ready: float) -> None:
        self.kinds.append("I")
        self.idle += max(ready - self.now, 0.0)
        self.now = max(self.now, ready) + self.i
        self.bytes += self.split_bytes - self.forward_bytes
        self.inputs.append(self.now)

    def weight_gradient(self) -> None:
        self.kinds.append("W")
        self.now += self.w
        self.bytes -= self.split_bytes
        self.weights += 1

    def run(self, kind: str, ready: float) -> None:
        """The next action of that kind. A whole backward pass is both gradients, and the rank before waits for both."""
        match kind:
            case "F":
                self.forward(ready)
            case "W":
                self.weight_gradient()
            case _:
                self.input_gradient(ready)
                if kind == "B":
                    self.weight_gradient()
                    self.inputs[-1] = self.now

    @property
    def slots(self) -> list[Slot]:
        """Slots of its passes so far: those of each kind with one micro-batch after another."""
        microbatch = {kind: count() for kind in "FIW"}
        return [(Action(self.stage, kind, next(microbatch[kind])),) for kind in self.kinds]

    @property
    def lasted_s(self) -> float:
        """Seconds from its first action, a forward pass, to its last."""
        return self.now - self.forwards[0] + self.f

    def make_room(self, nbytes: float) -> None:
        """Run weight gradients until ``nbytes`` more fit."""
        while self.bytes + nbytes > self.limit and self.pending:
            self.weight_gradient()

    def fill_until(self, ready: float, worst: float, choices: _Choices) -> None:
        """Run weight gradients until ``ready``, one longer than what is left of the time if it is worth it."""
        while self.pending and self.now + self.w <= ready:
            self.weight_gradient()
        if self.pending and self.now < ready and (choices.fill or self.idle + ready - self.now > worst):
            self.weight_gradient()


def _warmed_up(p: int, m: int, times: Times, limit: float, one_more: bool) -> list[_Rank]:
    """Return ranks after the warm-up: as many forwards as fit in time and memory, and the first input gradient."""
    ranks, hop = [_Rank(stage, times, limit) for stage in range(p)], times.hop_s
    for rank in ranks:
        rank.forward(ranks[rank.stage - 1].forwards[0] + hop if rank.stage else 0.0)
    more = [0] * len(ranks)
    last = ranks[-1]
    gradient = last.now + last.i
    for rank in reversed(ranks[:-1]):
        now, nbytes, ready = rank.now, rank.bytes, gradient + hop
        while more[rank.stage] < m - 1 and nbytes + rank.room <= rank.limit:
            if now >= ready if one_more else now + rank.f > ready:
                break
            now, nbytes = now + rank.f, nbytes + rank.forward_bytes
            more[rank.stage] += 1
        gradient = max(now, ready) + rank.i
    for rank in ranks:
        if rank.stage:  # a rank is at least one forward ahead of the next
            more[rank.stage] = max(min(more[rank.stage], more[rank.stage - 1] - 1), 0)
        for number in range(1, more[rank.stage] + 1):
            rank.forward(ranks[rank.stage - 1].forwards[number] + hop if rank.stage else 0.0)
    for rank in reversed(ranks):
        rank.input_gradient(ranks[rank.stage + 1].inputs[0] + hop if rank is not last else 0.0)
    return ranks


def _least_s(ranks: list[_Rank], m: int) -> float:
    """Return the least time of the longest rank: all its work, and how long it has been idle so far."""
    return max(m * (rank.f + rank.i + rank.w) + rank.idle for rank in ranks)


def _bound_s(p: int, m: int, times: Times, limit: float) -> float:
    """Return a lower bound of `_least_s` after a warm-up within ``limit`` bytes, from sums alone.

    A rank's first input gradient waits for the first forward to reach the last stage, and for its gradient to come
    back. From its first forward on the rank fills that time with as many others as fit; the rest of it is idle.
    """
    forward_s, input_s, hop = times.forward_s, times.input_s, times.hop_s
    forward_ends = [sum(forward_s[: stage + 1]) + stage * hop for stage in range(p)]
    ready, bound = forward_ends[-1], 0.0
    for stage in range(p - 1, -1, -1):
        rank = _Rank(stage, times, limit)
        more = m - 1
        if rank.forward_bytes:
            fitting = (rank.limit * _SLACK - rank.room) / rank.forward_bytes
            more = max(min(more, math.floor(fitting)), 0)
        idle = max(ready - forward_ends[stage] - more * rank.f, 0.0)
        bound = max(bound, m * (rank.f + rank.i + rank.w) + idle)
        ready += input_s[stage] + hop
    return bound


def _leaves_out(rank: _Rank, following: _Rank, hop: float, worst: float) -> bool:
    """Return whether a rank two forwards ahead does better to wait for the next rank's gradient than to run one."""
    gradient = following.now + following.f + following.i + hop
    if rank.now >= gradient:
        return True
    over = max(0.0, rank.bytes + rank.room - rank.limit)
    weights = min(-(-over // rank.split_bytes) if rank.split_bytes else 0.0, len(rank.inputs) - rank.weights)
    return rank.now + rank.f + weights * rank.w > gradient and gradient - rank.now <= worst - rank.idle


def _construct(p: int, m: int, times: Times, limit: float, choices: _Choices, best_s: float) -> tuple[float, Order]:
    """Return the longest time from a rank's first action to its last, and the order of these choices.

    Where the time is not below ``best_s`` there is no order, and the construction may end early."""
    ranks, hop = _warmed_up(p, m, times, limit, choices.one_more), times.hop_s
    for microbatch in range(1, m):
        if _least_s(ranks, m) >= best_s:
            return best_s, []
        worst = max(rank.idle for rank in ranks)
        forward = [len(rank.forwards) < m for rank in ranks]
        for rank, following in pairwise(ranks):
            ahead = len(rank.forwards) - len(following.forwards)
            if choices.wait and forward[rank.stage] and ahead >= 2 and _leaves_out(rank, following, hop, worst):
                forward[rank.stage] = False
        for stage in range(p - 2, -1, -1):  # who leaves one out leaves it out for those before it too
            forward[stage] = forward[stage] and (forward[stage + 1] or len(ranks[stage + 1].forwards) == m)
        for rank in ranks:
            if forward[rank.stage]:
                rank.make_room(rank.room)
                ready = ranks[rank.stage - 1].forwards[len(rank.forwards)] + hop if rank.stage else 0.0
                rank.fill_until(ready, worst, choices)
                rank.forward(ready)
                worst = max(worst, rank.idle)
        for rank in reversed(ranks):
            rank.make_room(rank.split_bytes - rank.forward_bytes)
            ready = ranks[rank.stage + 1].inputs[microbatch] + hop if rank.stage < p - 1 else 0.0
            rank.fill_until(ready, worst, choices)
            while rank.stage == 0 and len(rank.forwards) == m and rank.pending:
                rank.weight_gradient()  # nobody waits for the first rank's input gradients
            rank.input_gradient(ready)
            worst = max(worst, rank.idle)
    for rank in ranks:
        while rank.pending:
            rank.weight_gradient()
    longest = max(rank.lasted_s for rank in ranks)
    return longest, [rank.slots for rank in ranks] if longest < best_s else []


def _peak_bytes(slots: list[Slot], times: Times) -> float:
    """Return the most bytes of activations that one rank's actions hold."""
    stage = slots[0][0].stage
    forward, split = times.forward_bytes[stage], times.split_bytes[stage]
    more = {"F": forward, "I": split - forward, "W": -split, "B": -forward}
    return max(accumulate([more[kind] for ((_, kind, _),) in slots]))


def _longest(order: Order, times: Times) -> float:
    """Return the longest time from a rank's first action to its last, each action as early as it can be."""
    ranks = [_Rank(stage, times, math.inf) for stage in range(len(order))]
    last = len(ranks) - 1
    left = [deque(slots) for slots in order]
    while any(left):
        before = sum(map(len, left))
        for rank, slots in zip(ranks, left, strict=True):
            while slots:
                ((_, kind, _),) = slots[0]
                if kind == "F" and rank.stage:
                    ends, number = ranks[rank.stage - 1].forwards, len(rank.forwards)
                elif kind in "IB" and rank.stage < last:
                    ends, number = ranks[rank.stage + 1].inputs, len(rank.inputs)
                else:
                    ends, number = [-times.hop_s], 0
                if number >= len(ends):
                    break
                rank.run(kind, ends[number] + times.hop_s)
                slots.popleft()
        assert sum(map(len, left)) < before, "an order that cannot run"
    return max(rank.lasted_s for rank in ranks)


def _by_hand(p: int, m: int, times: Times, limit: float) -> list[Order]:
    """Return the orders of 1F1B, ZB-H1 and ZB-H2 that fit, and a ZB-H1 that fits if the paper's does not.

    In that the weight gradients of each rank are as far behind as its memory allows. A rank without room for any runs
    its backward passes whole."""

    def fits(slots: list[Slot]) -> bool:
        return _peak_bytes(slots, times) <= limit * _SLACK

    whole, split = one_f_one_b.order(p, m), zb_h1.order(p, m)
    orders = [order for order in (whole, split, zb_h2.order(p, m)) if all(map(fits, order))]
    if split in orders:
        return orders
    fitted: Order = []
    for rank, slots in enumerate(whole):
        forwards, inputs = ([Action(rank, kind, mb) for mb in range(m)] for kind in "FI")
        warmup = min(p - rank - 1, m)
        lags = (zb_h1.split_order(forwards, inputs, warmup=warmup, lag=lag) for lag in range(rank, -1, -1))
        fitted.append(next((later for later in lags if fits(later)), slots))
    return [*orders, fitted] if all(map(fits, fitted)) else orders


@lru_cache(maxsize=32)
def search(p: int, m: int, v: int, times: Times) -> Order:
    """Return the best order: its longest rank is shortest from its first action to its last.

    That is the time between steps that follow each other. No rank holds more than ``times.memory_limit`` times the most
    that a rank of 1F1B does. Backward passes are whole where bytes left to weight gradients would take too much of
    that. Raises ValueError where the limit is too little for one micro-batch.
    """
    reference = max(min(m, p - rank) * nbytes for rank, nbytes in enumerate(times.forward_bytes))
    limit = times.memory_limit * reference
    if limit * _SLACK < max(times.forward_bytes):
        raise ValueError(f"leaves no room for a micro-batch: at least {max(times.forward_bytes) / reference:.3g}")
    seconds_of = [(_longest(order, times), order) for order in _by_hand(p, m, times, limit)]
    best_s, best = min(seconds_of, key=lambda pair: pair[0], default=(float("inf"), None))
    for tried, room, one_more in _attempts(times, limit):
        if _bound_s(p, m, tried, room) > best_s * _SLACK:
            continue
        least_s = _least_s(_warmed_up(p, m, tried, room, one_more), m)
        for wait, fill in product((True, False), repeat=2):
            if m > 1 and least_s >= best_s:
                break  # idle time only grows after the warm-up
            seconds, order = _construct(p, m, tried, room, _Choices(one_more, wait, fill), best_s)
            if seconds < best_s:
                best_s, best = seconds, order if tried is times else _joined(order)
    assert best is not None
    return best


def _attempts(times: Times, limit: float) -> Iterator[tuple[Times, float, bool]]:
    """Yield what is tried within ``limit`` bytes: times of split and whole backward passes, bytes, `_Choices.one_more`.

    Less memory is tried too, by whole micro-batches, so that more of it never gives a longer step.
    """
    for tried in (times, _whole(times)):
        least = max(*times.forward_bytes, *tried.split_bytes)
        fewer = int(limit * _SLACK / least) if least else 0  # a stage without layers may hold nothing
        for room in (limit, *[least * passes for passes in range(fewer, 0, -1)]):
            if room * _SLACK >= least:
                yield from ((tried, room, one_more) for one_more in (True, False))


def _whole(times: Times) -> Times:
    """Return ``times`` for backward passes that are not split: the input gradient is all of it."""
    both = tuple(i + w for i, w in zip(times.input_s, times.weight_s, strict=True))
    none = (0.0,) * len(both)
    return replace(times, input_s=both, weight_s=none, split_bytes=none)


def _joined(order: Order) -> Order:
    """Return the order of `_whole` passes: B for I, and no W."""
    return [
        [tuple(a._replace(kind={"I": "B"}.get(a.kind, a.kind)) for a in slot) for slot in slots if slot[0].kind != "W"]
        for slots in order
    ]


def order(p: int, m: int, v: int = 1) -> Order:
    """Return the order for F = I = W, free communication and the memory of 1F1B."""
    return search(p, m, v, Times.equal(p, 1.0, 1.0, 1.0))


SCHEDULE = Schedule(
    name="zb_auto",
    paper="Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1 (the heuristic)",
    order=order,
    bubble=lambda p, m, v, f, i, w: None,
    peak=lambda p, m, v, rank: None,
    check=one_chunk,
    splits=True,
    steady=True,
    search=search,
)
