"""Collectives by name: which algorithms there are, and the plan of one operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from simulator.cluster.cluster import Cluster
from simulator.errors import InputError
from simulator.input_files import closest
from simulator.network import bruck, butterfly, collnet, direct, hierarchical, hosts, nvls, pat, ring, rooted, tree
from simulator.network.direct import EVEN, ByteShares
from simulator.network.max_min import max_min_rates
from simulator.network.moves import Moves
from simulator.network.pattern import Leg, Pattern, place_pattern
from simulator.network.plan import Phase, Plan
from simulator.network.shape import shape_of
from simulator.network.timing import TransportCosts, timed

#: Function of the GPU numbers of a group that returns its hops, step after step. It may ask which members share a node,
#: and how a node is laid out. It must not ask which node it is, as groups whose members sit alike share one answer. It
#: raises `InputError` where the hardware lacks what it needs.
Algorithm = Callable[[Cluster, tuple[int, ...]], tuple[Moves, ...]]


@dataclass(frozen=True)
class Operation:
    """A collective: its algorithms by name, and the bytes on the busiest port per byte of size, for n ranks, which is
    busbw / algbw of nccl-tests (doc/PERFORMANCE.md). ``auto`` chooses among the algorithms that are ``nccl``'s own.
    ``nbytes``: the size, where it is always the same."""

    algorithms: Mapping[str, Algorithm]
    bus_factor: Callable[[int], float]
    nccl: tuple[str, ...]
    nbytes: float | None = None


#: One 4-byte element, as torch.distributed.barrier reduces with NCCL.
BARRIER_BYTES = 4.0
_ALL_REDUCE: dict[str, Algorithm] = {
    "ring": ring.all_reduce,
    "tree": tree.all_reduce,
    "nvls": nvls.all_reduce,
    "nvls_tree": nvls.tree_all_reduce,
    "collnet": collnet.all_reduce,
    "binary_tree": tree.single_all_reduce,
    "halving_doubling": butterfly.all_reduce,
    "rs_ag": ring.composed_all_reduce,
    "direct": direct.all_reduce,
    "hierarchical": hierarchical.all_reduce,
}
_NCCL_ALL_REDUCE = ("ring", "tree", "nvls", "nvls_tree", "collnet")

OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(_ALL_REDUCE, lambda n: 2 * (n - 1) / n, _NCCL_ALL_REDUCE),
    "all_gather": Operation(
        {
            "ring": ring.all_gather,
            "nvls": nvls.all_gather,
            "pat": pat.all_gather,
            "direct": direct.all_gather,
            "bruck": bruck.all_gather,
        },
        lambda n: (n - 1) / n,
        ("ring", "nvls", "pat"),
    ),
    "reduce_scatter": Operation(
        {
            "ring": ring.reduce_scatter,
            "nvls": nvls.reduce_scatter,
            "pat": pat.reduce_scatter,
            "direct": direct.reduce_scatter,
        },
        lambda n: (n - 1) / n,
        ("ring", "nvls", "pat"),
    ),
    "all_to_all": Operation(
        {"pairwise": direct.all_to_all, "rail": hierarchical.all_to_all, "bruck": bruck.all_to_all},
        lambda n: (n - 1) / n,
        ("pairwise",),
    ),
    "broadcast": Operation(
        {"ring": ring.broadcast, "linear": rooted.linear_broadcast, "binomial": rooted.binomial_broadcast},
        lambda n: 1.0,
        ("ring",),
    ),
    "reduce": Operation(
        {"ring": ring.reduce, "linear": rooted.linear_reduce, "binomial": rooted.binomial_reduce},
        lambda n: 1.0,
        ("ring",),
    ),
    "scatter": Operation(
        {"linear": rooted.linear_scatter, "binomial": rooted.binomial_scatter}, lambda n: (n - 1) / n, ("linear",)
    ),
    "gather": Operation(
        {"linear": rooted.linear_gather, "binomial": rooted.binomial_gather}, lambda n: (n - 1) / n, ("linear",)
    ),
    "send_recv": Operation({"direct": direct.send_recv}, lambda n: 1.0, ("direct",)),
    "send": Operation({"direct": direct.send}, lambda n: 1.0, ("direct",)),
    "barrier": Operation(_ALL_REDUCE, lambda n: 2 * (n - 1) / n, _NCCL_ALL_REDUCE, BARRIER_BYTES),
}


def plan(
    op: str,
    nbytes: float,
    ranks: Sequence[int],
    cluster: Cluster,
    costs: TransportCosts,
    algorithm: str = "auto",
) -> Plan:
    """Return the plan by which ``ranks`` (GPU numbers, in the group's order) perform ``op`` on ``nbytes``, nccl-tests'
    size.

    ``auto`` takes the algorithm of NCCL that is fastest on an idle network, as its tuner does. A named one is refused
    that this operation does not have, or the hardware cannot run. A group of one has nothing to do: no phases.

    Raises `InputError`.
    """
    _operation(op)
    return fastest(op, patterns(op, ranks, cluster, algorithm), nbytes, costs)


def patterns(
    op: str, ranks: Sequence[int], cluster: Cluster, algorithm: str = "auto", shares: ByteShares = EVEN
) -> tuple[Pattern, ...]:
    """Return a pattern of ``op`` per algorithm that ``algorithm`` allows; none for a group of one.

    ``ranks`` of an operation with hosts are all its end points (see `simulator.network.hosts.ends`).
    ``shares``: how the bytes of an all-to-all are spread.

    Raises `InputError`.
    """
    by_name = hosts.OPERATIONS[op] if op in hosts.OPERATIONS else algorithms(op)
    if algorithm != "auto" and algorithm not in by_name:
        allowed = ["auto", *by_name]
        raise InputError(
            f"{op} has no such algorithm",
            key="algorithm",
            found=algorithm,
            allowed=", ".join(allowed),
            fix=closest(algorithm, allowed),
        )
    members = tuple(ranks)
    if len(members) == 1:
        return ()
    if shares != EVEN:
        return (_pattern("by_node" if shares.per_node else "pairwise", direct.uneven(shares), cluster, members),)
    if algorithm != "auto":
        return (_pattern(algorithm, by_name[algorithm], cluster, members),)
    key = (op, members)
    possible: tuple[Pattern, ...] | None = cluster.memo.get(key)
    if possible is None:
        strung, refused = [], []
        for name in OPERATIONS[op].nccl if op in OPERATIONS else by_name:
            try:
                strung.append(_pattern(name, by_name[name], cluster, members))
            except InputError as error:  # the hardware cannot
                refused.append(error.with_traceback(None))  # which would hold this frame, and so itself
        if not strung:
            raise refused[0]
        possible = cluster.memo[key] = tuple(strung)
    return possible


def fastest(op: str, candidates: Sequence[Pattern], nbytes: float, costs: TransportCosts) -> Plan:
    """Return the plan of the pattern that `choose` takes."""
    return plan_of(op, choose(op, candidates, nbytes, costs), nbytes, costs)


def plan_of(op: str, pattern: Pattern | None, nbytes: float, costs: TransportCosts) -> Plan:
    """Return the plan of ``op`` by one pattern; of none, one with no phases."""
    return Plan("none", ()) if pattern is None else _timed(op, pattern, nbytes, costs)[1]


def choose(op: str, candidates: Sequence[Pattern], nbytes: float, costs: TransportCosts) -> Pattern | None:
    """Return the pattern that is fastest on an idle network, of those that the software has; None without any.

    What counts is the bandwidth that NCCL's tuner expects."""
    if not candidates:
        return None
    if len(candidates) > 1:
        candidates = [pattern for pattern in candidates if all(_has(costs, leg) for leg in pattern.legs)]
    if len(candidates) == 1:
        return candidates[0]

    def counted_s(pattern: Pattern) -> float:
        seconds, plan = _timed(op, pattern, nbytes, costs)
        return plan.latency_s + (seconds - plan.latency_s) / min(leg.moves.counted for leg in pattern.legs)

    return min(candidates, key=counted_s)


def _has(costs: TransportCosts, leg: Leg) -> bool:
    return leg.moves.way != "pat" or costs.transport(leg.kind).pat


def _timed(op: str, pattern: Pattern, nbytes: float, costs: TransportCosts) -> tuple[float, Plan]:
    always = OPERATIONS[op].nbytes if op in OPERATIONS else None
    return timed(pattern, nbytes if always is None else always, costs)


def algorithms(op: str) -> Mapping[str, Algorithm]:
    """Return the algorithms of an operation. Raises `InputError` for an unknown one."""
    return _operation(op).algorithms


def bus_factor(op: str, n: int) -> float:
    """Return busbw / algbw of an operation of n ranks. Raises `InputError` for an unknown one."""
    return _operation(op).bus_factor(n)


def _operation(op: str) -> Operation:
    if op not in OPERATIONS:
        near = closest(op, OPERATIONS)
        raise InputError("unknown operation", key="op", found=op, allowed=", ".join(OPERATIONS), fix=near)
    return OPERATIONS[op]


def _pattern(name: str, algorithm: Algorithm, cluster: Cluster, ranks: tuple[int, ...]) -> Pattern:
    """Return the pattern of an algorithm on a group, from the cluster's memo where it is there.

    Patterns do not depend on size, and a job plans the same groups again and again. Only the first group of those whose
    members sit alike in their nodes is strung; the others are placed."""
    key = (name, algorithm, ranks)
    pattern: Pattern | None = cluster.memo.get(key)
    if pattern is None:
        seats, nodes = _seated(cluster, ranks)
        shapes = cluster.memo.get((algorithm, seats))
        if shapes is None:
            number = {node: place for place, node in enumerate(nodes)}
            shapes = [shape_of(cluster, moves, number) for moves in algorithm(cluster, ranks)]
            cluster.memo[algorithm, seats] = shapes
        pattern = cluster.memo[key] = place_pattern(name, shapes, cluster, nodes)
    return pattern


def _seated(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return how a group's members sit in their nodes, as a number that alike groups share, and the nodes."""
    seated: tuple[int, tuple[int, ...]] | None = cluster.memo.get(("seated", ranks))
    if seated is None:
        node, slot = cluster.located(np.array(ranks, dtype=np.int64))
        nodes = dict.fromkeys(node.tolist())
        number_of = np.zeros(cluster.n_nodes, dtype=np.int64)
        number_of[list(nodes)] = np.arange(len(nodes))
        seats = number_of[node].tobytes(), slot.tobytes()
        alike = cluster.memo.setdefault("seats", {})
        kinds = cluster.way_kind_column[list(nodes)].tobytes()
        number = alike.setdefault((seats, kinds), len(alike))
        seated = cluster.memo["seated", ranks] = number, tuple(nodes)
    return seated


def idle_seconds(operation: Plan, cluster: Cluster, costs: TransportCosts) -> float:
    """Return the seconds of a plan when nothing else moves but the background traffic of the cluster.

    A phase takes latency + bytes / min(cap, tightest link), or its fair share where that traffic crosses its links."""
    capacity = cluster.link_column(
        lambda _layout, _at, link: costs.reachable_Bps(link.kind, link.bandwidth_Bps), np.float64
    )
    background = [Phase(math.inf, flow.loads, 0.0, flow.rate_Bps) for flow in cluster.background]
    total = 0.0
    for phase in operation.phases:
        if background:
            phase = phase.by_nic(cluster.is_port)
            rate_Bps = max_min_rates([phase, *background], capacity)[0]
        else:
            links, loads = phase.columns
            rate_Bps = min(phase.cap_Bps, float((capacity[links] / loads).min(initial=math.inf)))
        total += phase.latency_s + phase.nbytes / rate_Bps
    return total
