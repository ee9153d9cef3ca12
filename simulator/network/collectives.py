"""Collectives by name: which algorithms there are, and the plan of one operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from simulator.cluster.cluster import Cluster
from simulator.config.files import closest
from simulator.errors import InputError
from simulator.network import direct, ring, tree
from simulator.network.pattern import Pattern, TransportCosts, timed
from simulator.network.plan import Plan

Algorithm = Callable[[Cluster, tuple[int, ...]], Pattern]

#: Operation -> name -> algorithm. A barrier is an all-reduce of `BARRIER_BYTES`.
ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {"ring": ring.all_reduce, "tree": tree.all_reduce},
    "all_gather": {"ring": ring.all_gather},
    "reduce_scatter": {"ring": ring.reduce_scatter},
    "all_to_all": {"pairwise": direct.all_to_all},
    "broadcast": {"ring": ring.broadcast},
    "send_recv": {"direct": direct.send_recv},
    "barrier": {"ring": ring.all_reduce, "tree": tree.all_reduce},
}
#: One 4-byte element, as torch.distributed.barrier reduces with NCCL.
BARRIER_BYTES = 4.0


def plan(
    op: str,
    nbytes: float,
    ranks: Sequence[int],
    cluster: Cluster,
    costs: TransportCosts,
    algorithm: str = "auto",
) -> Plan:
    """How ``ranks`` (GPU numbers, in the group's order) perform ``op`` on ``nbytes``, nccl-tests' size.

    ``auto`` takes the algorithm that is fastest on an idle network, as NCCL's tuner does; a named one that this
    operation does not have is refused. A group of one has nothing to do: no phases.

    Raises `InputError`.
    """
    return fastest(op, patterns(op, ranks, cluster, algorithm), nbytes, costs)


def patterns(op: str, ranks: Sequence[int], cluster: Cluster, algorithm: str = "auto") -> tuple[Pattern, ...]:
    """What ``op`` may do to the links, one pattern per algorithm that ``algorithm`` allows; none for a group of one.

    Raises `InputError`.
    """
    known = algorithms(op)
    if algorithm != "auto" and algorithm not in known:
        raise InputError(
            f"{op} has no such algorithm", key="algorithm", found=algorithm, allowed=", ".join(["auto", *known])
        )
    members = tuple(ranks)
    if len(members) == 1:
        return ()
    return tuple(
        _pattern(function, cluster, members) for name, function in known.items() if algorithm in ("auto", name)
    )


def fastest(op: str, candidates: Sequence[Pattern], nbytes: float, costs: TransportCosts) -> Plan:
    """The plan of the candidate that is fastest on an idle network; without candidates, one with no phases."""
    if not candidates:
        return Plan("none", ())
    return _timed(op, choose(op, candidates, nbytes, costs), nbytes, costs)[1]


def choose(op: str, candidates: Sequence[Pattern], nbytes: float, costs: TransportCosts) -> Pattern:
    """The candidate that is fastest on an idle network."""
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda pattern: _timed(op, pattern, nbytes, costs)[0])


def _timed(op: str, pattern: Pattern, nbytes: float, costs: TransportCosts) -> tuple[float, Plan]:
    return timed(pattern, BARRIER_BYTES if op == "barrier" else nbytes, costs)


def algorithms(op: str) -> dict[str, Algorithm]:
    """The algorithms of an operation. Raises `InputError` for an unknown one."""
    if op not in ALGORITHMS:
        near = closest(op, ALGORITHMS)
        raise InputError("unknown operation", key="op", found=op, allowed=", ".join(ALGORITHMS), fix=near)
    return ALGORITHMS[op]


@lru_cache(maxsize=16384)
def _pattern(algorithm: Algorithm, cluster: Cluster, ranks: tuple[int, ...]) -> Pattern:
    """Patterns do not depend on size, and a job plans the same groups again and again."""
    return algorithm(cluster, ranks)


def idle_seconds(operation: Plan, cluster: Cluster, costs: TransportCosts) -> float:
    """How long the plan takes when nothing else moves: per phase, latency + bytes / min(cap, tightest link)."""
    total = 0.0
    for phase in operation.phases:
        rate = phase.cap_Bps
        for index, load in phase.loads:
            link = cluster.links[index]
            rate = min(rate, link.bandwidth_Bps * costs.link_efficiency(link.kind) / load)
        total += phase.latency_s + phase.nbytes / rate
    return total


def bus_factor(op: str, n: int) -> float:
    """busbw / algbw of nccl-tests (doc/PERFORMANCE.md): the bytes on the busiest port per byte of size, n ranks."""
    match op:
        case "all_reduce" | "barrier":
            return 2 * (n - 1) / n
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return (n - 1) / n
        case _:
            return 1.0
