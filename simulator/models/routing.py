"""Routing of tokens: how many each expert gets, and which rank holds it."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from simulator.config import Workload
from simulator.config.model import Moe, Skew
from simulator.program import Axis, numbered_axis


class CopyGroup(NamedTuple):
    """Positions of an expert-parallel group that hold copies of the same ``experts`` experts."""

    positions: tuple[int, ...]
    experts: int


class CopyRound(NamedTuple):
    """Groups of holders of copies that have nobody in common, so that one ``axis`` names them all."""

    axis: str
    groups: tuple[CopyGroup, ...]

    def experts_at(self, position: int) -> int:
        """Return the number of experts whose gradients the rank at ``position`` adds up with other holders."""
        return sum(group.experts for group in self.groups if position in group.positions)


@dataclass(frozen=True)
class Routing:
    """Paths of the tokens of one micro-batch through the experts of one layer, for an expert-parallel group.

    Each rank has ``tokens``, and sends ``sent`` copies of them. ``received[j]`` copies reach the rank at position j of
    the group. ``loads[j]``: copies that each of its experts works on, with those that etp ranks gather.
    ``received_shares``: the share of every rank's copies that goes to each position, empty where all are equal.
    ``copy_rounds``: rounds in which holders of redundant experts add up gradients.
    """

    tokens: int
    sent: float
    received: tuple[float, ...]
    loads: tuple[tuple[int, ...], ...]
    received_shares: tuple[float, ...]
    copy_rounds: tuple[CopyRound, ...]

    def representative(self, position: int) -> int:
        """Return the first position whose rank has the same work as the one at ``position``."""
        return self._work.index(self._work[position])

    @cached_property
    def _work(self) -> list[tuple[tuple[int, ...], ...]]:
        """Facts that decide the work of the rank at each position: loads, and experts with copies in each round."""
        return [
            (loads, tuple(one.experts_at(position) for one in self.copy_rounds))
            for position, loads in enumerate(self.loads)
        ]


def routing(workload: Workload) -> Routing:
    """Return the `Routing` of a workload that has experts. Every rank and every layer has the same distribution."""
    assert workload.model.moe is not None
    return _with_experts(workload, workload.model.moe)


def dropped_share(workload: Workload) -> float:
    """Return the share of all copies of tokens that no expert works on, as their expert has reached its capacity."""
    moe = workload.model.moe
    if moe is None or moe.capacity_factor is None:
        return 0.0
    kept = _with_experts(workload, moe.model_copy(update={"pad_to_capacity": False}))
    return max(0.0, 1 - kept.sent / (kept.tokens * moe.top_k))


def _with_experts(workload: Workload, moe: Moe) -> Routing:
    """Return the `Routing` of a workload with the experts ``moe`` in place of its own."""
    layout = workload.parallelism
    return _routing(moe, workload.rank_tokens // layout.tp, layout.ep, layout.etp, workload.seed)


@lru_cache(maxsize=64)
def _routing(moe: Moe, tokens: int, ep: int, etp: int, seed: int) -> Routing:
    """Return the `Routing` of so many ``tokens`` of each rank."""
    copies = [share * tokens * moe.top_k for share in popularity(moe, seed)]
    expert_of = _experts_of_slots(copies, moe.redundant_experts)
    times = Counter(expert_of)
    slots = _with_capacity(moe, tokens, [copies[expert] / times[expert] for expert in expert_of])
    local = len(slots) // ep
    slots_of_rank = [slots[local * rank : local * (rank + 1)] for rank in range(ep)]
    sent = math.fsum(slots)
    even = all(row == slots_of_rank[0] for row in slots_of_rank)
    received = tuple(math.fsum(row) * ep for row in slots_of_rank)
    return Routing(
        tokens=tokens,
        sent=sent,
        received=received,
        loads=tuple(_rounded([count * ep * etp for count in row]) for row in slots_of_rank),
        received_shares=() if even else tuple(count / (ep * sent) for count in received),
        copy_rounds=_copy_rounds(expert_of, local),
    )


def _copy_rounds(expert_of: list[int], local: int) -> tuple[CopyRound, ...]:
    """Return the rounds in which the holders of redundant experts meet, of ``local`` slots a rank.

    Experts with the same holders go together. Each group of holders goes into the first round in which none of its
    members has another group.
    """
    holders: dict[int, dict[int, None]] = {}
    for slot, expert in enumerate(expert_of):
        holders.setdefault(expert, {})[slot // local] = None
    experts = Counter(tuple(ranks) for ranks in holders.values() if len(ranks) > 1)
    rounds: list[list[CopyGroup]] = []
    for positions, count in experts.items():
        free = (groups for groups in rounds if not any(set(positions) & set(group.positions) for group in groups))
        groups = next(free, None)
        if groups is None:
            rounds.append(groups := [])
        groups.append(CopyGroup(positions, count))
    return tuple(CopyRound(numbered_axis(Axis.COPIES, number), tuple(groups)) for number, groups in enumerate(rounds))


def popularity(moe: Moe, seed: int) -> tuple[float, ...]:
    """Return the share of all copies of tokens that each expert is meant to get; they sum to 1.

    No token goes to one expert twice, so that no share exceeds 1 / top_k. If a skew gives an expert more, the rest goes
    to the other experts in proportion.
    """
    if moe.token_distribution == "balanced":
        return (1 / moe.experts,) * moe.experts
    if not isinstance(moe.token_distribution, Skew):
        total = math.fsum(moe.token_distribution)
        return tuple(share / total for share in moe.token_distribution)
    weights = [float(rank) ** -moe.token_distribution.skew for rank in range(1, moe.experts + 1)]
    shares: list[float] = []
    left = 1.0
    for number, weight in enumerate(weights):
        # Weights descend, so that once one is not cut none is.
        share = min(1 / moe.top_k, left * weight / math.fsum(weights[number:]))
        shares.append(share)
        left -= share
    random.Random(seed).shuffle(shares)
    return tuple(shares)


def _experts_of_slots(copies: list[float], redundant: int) -> list[int]:
    """Return the expert in every slot: those of the model, then ``redundant`` copies.

    Copies of an expert share its tokens evenly. Each new copy is of the expert whose copies have most to do.
    """
    times = [1] * len(copies)
    copied: list[int] = []
    for _ in range(redundant):
        busiest = max(range(len(copies)), key=lambda expert: (copies[expert] / times[expert], -expert))
        times[busiest] += 1
        copied.append(busiest)
    return [*range(len(copies)), *copied]


def _with_capacity(moe: Moe, tokens: int, slots: list[float]) -> list[float]:
    """Return the copies of tokens in every slot, limited by the experts' capacity where there is a capacity factor.

    An expert takes no more than its capacity; padded, it takes just that (GShard, arXiv 2006.16668, section 2.2;
    Megatron-Core's ``moe_expert_capacity_factor``).
    """
    if moe.capacity_factor is None:
        return slots
    capacity = float(math.ceil(moe.capacity_factor * tokens * moe.top_k / moe.experts))
    return [capacity if moe.pad_to_capacity else min(count, capacity) for count in slots]


def _rounded(counts: list[float]) -> tuple[int, ...]:
    """Return whole numbers nearest to ``counts`` with their (rounded) sum: the largest remainders are rounded up.

    >>> _rounded([1.5, 1.5, 1.0]), _rounded([2.0, 0.25])
    ((2, 1, 1), (2, 0))
    """
    # A count that is whole but for the last digits of a product is meant to be whole.
    exact = [round(count, 6) for count in counts]
    floors = [math.floor(count) for count in exact]
    missing = math.floor(math.fsum(exact) + 0.5) - sum(floors)
    by_remainder = sorted(range(len(exact)), key=lambda i: (floors[i] - exact[i], i))
    up = set(by_remainder[: max(missing, 0)])
    return tuple(floor + (i in up) for i, floor in enumerate(floors))
