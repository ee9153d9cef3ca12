"""Seconds of a message of some size, and the protocol of NCCL's that carries it.

A kernel takes the protocol that is fastest on an idle network, as NCCL's tuner does (src/graph/tuning.cc,
ncclTopoGetAlgoTime: latency + bytes / bandwidth).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol as Interface

from simulator.hardware.transport import ProtocolName, Transport
from simulator.network.moves import KINDS
from simulator.network.pattern import Leg, Pattern
from simulator.network.plan import Phase, Plan


class TransportCosts(Interface):
    """The part of `simulator.costs.Costs` that the network asks."""

    def transport(self, kind: str) -> Transport: ...

    def reachable_Bps(self, kind: str, line_Bps: float) -> float: ...


def timed(pattern: Pattern, nbytes: float, costs: TransportCosts) -> tuple[float, Plan]:
    """Return the seconds of a message of ``nbytes`` on an idle network, and its plan.

    In each protocol a kernel takes base latency, and each of its legs hops x (software per hop + their links). Each
    byte takes ``line * (1 + sqrt(half_bytes / flow)) + local_share / copy`` seconds. Flow is what the busiest link
    carries, and line the seconds per byte of the kind of link that the protocol makes slowest.

    The square root is what a flow cut into the best number of chunks loses while the pipeline fills. With n hops, k
    chunks of x bytes together last ``(n - 1 + k) (a + x / (k B))``. The least of it is
    ``x / B + 2 sqrt((n - 1) a x / B) + (n - 1) a``. Chunks grow no more once they fill their buffer, at a flow of
    ``full_bytes``. From there on filling takes as long as for that flow.

    NVLink SHARP's kernel hands over a chunk of every head before the next of any. NCCL takes the size of chunks from
    what a head has (src/enqueue.cc, calcCollChunking). ``half_bytes`` is then ``head_bytes`` more for each head.
    """
    total_s = 0.0
    phases: list[Phase] = []
    names: dict[str, None] = {}
    for kernel in _kernels(pattern):
        kernel_s, kernel_phases, name = min(_by_protocol(kernel, nbytes, costs), key=lambda way: way[0])
        total_s += kernel_s
        phases += kernel_phases
        names[name] = None
    plan = Plan(pattern.algorithm, tuple(phases), "+".join(names), nbytes * pattern.sent, pattern.channels)
    return total_s, plan


def _kernels(pattern: Pattern) -> list[list[Leg]]:
    kernels: list[list[Leg]] = []
    for leg in pattern.legs:
        if leg.moves.goes_on:
            kernels[-1].append(leg)
        else:
            kernels.append([leg])
    return kernels


def _by_protocol(
    kernel: Sequence[Leg], nbytes: float, costs: TransportCosts
) -> Iterator[tuple[float, list[Phase], str]]:
    """Yield seconds, phases and name of each protocol that can carry the message."""
    slowest = max(kernel, key=lambda leg: KINDS.index(leg.kind))
    for name, protocol in costs.transport(slowest.kind).ways(slowest.moves.way).items():
        phases: list[Phase] = []
        total_s = 0.0
        for number, leg in enumerate(kernel):
            took = _timed_leg(leg, nbytes, name, 0.0 if number else protocol.base_latency_s, costs)
            if took is None:
                break
            total_s += took[0]
            phases.append(took[1])
        else:
            yield total_s, phases, name


def _timed_leg(
    leg: Leg, nbytes: float, name: ProtocolName, start_s: float, costs: TransportCosts
) -> tuple[float, Phase] | None:
    """Return the seconds of a leg in one protocol after ``start_s``, and its phase; None where it cannot carry them."""
    pace, moves = costs.transport(leg.kind), leg.moves
    lines = [
        (1 / costs.reachable_Bps(kind, 1 / seconds), costs.transport(kind).ways(moves.way))
        for kind, seconds in leg.line_s
    ]
    protocols = pace.ways(moves.way)
    if name not in protocols or any(name not in line_protocols for _, line_protocols in lines):
        return None
    protocol, flow = protocols[name], nbytes * leg.flow_bytes
    if protocol.most_bytes is not None and flow > protocol.most_bytes:
        return None
    latency_s = leg.link_latency_s
    if moves.peers:
        latency_s += moves.peers * pace.peer_latency_s
    latency_s += start_s
    for kind, count in leg.hops:
        latency_s += count * moves.software * costs.transport(kind).ways(moves.way)[name].hop_latency_s
    per_byte_s = max([line_s / line_protocols[name].bandwidth_fraction for line_s, line_protocols in lines])
    per_byte_s /= moves.efficiency
    half_bytes = protocol.half_bytes + moves.heads * (protocol.head_bytes or 0.0)
    if half_bytes and nbytes:
        chunked = flow if protocol.full_bytes is None else min(flow, protocol.full_bytes)
        per_byte_s *= 1 + math.sqrt(half_bytes / chunked) * (chunked / flow)
    per_byte_s += moves.local_share / (pace.p2p_copy_Bps if moves.way == "p2p" else pace.copy_Bps)
    return latency_s + nbytes * per_byte_s, Phase(flow, leg.loads, latency_s, leg.flow_bytes / per_byte_s)
