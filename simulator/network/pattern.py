"""What a collective does to the links, whatever its size, and how long a message of some size then takes.

An algorithm lists the hops of a group of ranks as `Moves`. Added up they are a `Shape`, the same for all groups whose
members sit alike in their nodes, and on the nodes of one group a `Pattern`: the bytes on every link per byte of
message, and the hops that the first byte makes. `timed` turns it into a `Plan` for a size, choosing among NCCL's
protocols as its tuner does: the one that is fastest on an idle network (NCCL src/graph/tuning.cc, ncclTopoGetAlgoTime:
latency + bytes / bandwidth).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from typing import Protocol as Interface

from simulator.cluster.cluster import Cluster
from simulator.cluster.node import Route
from simulator.config.transport import Transport, TransportKind
from simulator.network.plan import Phase, Plan

#: From the least to the most limiting: a hop is of the last kind that it crosses.
_KINDS: tuple[TransportKind, ...] = ("nvlink", "pcie", "infiniband", "roce", "tcp", "nvme", "memory")


class TransportCosts(Interface):
    """The part of Costs that the network asks."""

    def transport(self, kind: str) -> Transport: ...

    def link_efficiency(self, kind: str) -> float: ...


class Hop(NamedTuple):
    """A transfer between end points (GPUs, or hosts' memory), through NIC ``nic`` of both nodes if given, that carries
    ``load`` bytes per byte of message and stands ``weight`` times on the critical path."""

    sender: int
    receiver: int
    nic: int | None
    load: float
    weight: float


@dataclass(frozen=True, eq=False)
class Moves:
    """What an algorithm does on a group of ranks.

    ``own`` is the share of the message that each rank handles without a link. ``efficiency`` is the bandwidth reached,
    relative to a ring of the same load. ``peers`` > 0 marks sends and receives, to so many peers each.
    """

    hops: Iterable[Hop]
    own: float = 0.0
    efficiency: float = 1.0
    peers: int = 0


@dataclass(frozen=True, eq=False)
class Shape:
    """Hops added up, of a group on nodes 0, 1, 2 ... that stand for any others, one by one.

    ``inside``: (node, position in its layout, bytes per byte of message) of links of nodes, NIC ports among them.
    ``across``: (node, NIC, node, NIC, bytes, weight) between NICs. ``hops`` counts the hops of the critical path by
    kind; ``link_latency_s`` is the latency of their links, without those between switches. ``sent`` is what all members
    together send, per byte of message.
    """

    moves: Moves
    inside: tuple[tuple[int, int, float], ...]
    across: tuple[tuple[int, int, int, int, float, float], ...]
    hops: tuple[tuple[TransportKind, float], ...]
    link_latency_s: float
    sent: float


@dataclass(frozen=True, eq=False)
class Pattern:
    """An algorithm on a group of ranks of a cluster.

    Phases have as reference flow the one on the tightest link: ``loads`` are relative to it, and it carries
    ``flow_bytes`` per byte of message. ``line_s`` holds, per kind of link, the seconds per byte of message that its
    busiest link needs at line rate. ``kind`` is the transport that sets the pace, the last in `_KINDS` that is crossed.
    ``hops``, ``link_latency_s`` (of all links) and ``sent`` are as in `Shape`; ``own``, ``efficiency`` and ``peers`` as
    in `Moves`.
    """

    algorithm: str
    kind: TransportKind
    loads: tuple[tuple[int, float], ...]
    flow_bytes: float
    line_s: tuple[tuple[TransportKind, float], ...]
    hops: tuple[tuple[TransportKind, float], ...]
    link_latency_s: float
    sent: float
    own: float
    efficiency: float
    peers: int

    @property
    def timing(self) -> tuple[object, ...]:
        """All that the time of a message on idle links depends on, latencies without the last digits, which depend on
        the order of a sum over hops."""
        latency = float(f"{self.link_latency_s:.12e}")
        return (
            self.algorithm,
            self.kind,
            self.flow_bytes,
            self.line_s,
            self.hops,
            latency,
            self.own,
            self.efficiency,
            self.peers,
        )


def shape_of(cluster: Cluster, moves: Moves) -> Shape:
    """Add up hops: loads link by link, latencies along the critical path."""
    layout = cluster.layout
    total: dict[tuple[int, int, int | None], tuple[float, float]] = {}
    for sender, receiver, nic, load, weight in moves.hops:
        before = total.get((sender, receiver, nic), (0.0, 0.0))
        total[sender, receiver, nic] = before[0] + load, before[1] + weight
    inside: dict[tuple[int, int], float] = {}
    across: dict[tuple[int, int, int, int], tuple[float, float]] = {}
    path: dict[TransportKind, float] = {}
    link_latency_s = 0.0
    for (sender, receiver, nic), (load, weight) in total.items():
        a, gpu_a = cluster.locate(sender)
        b, gpu_b = cluster.locate(receiver)
        back: Route = ()
        if a == b:
            out = layout.between[gpu_a, gpu_b]
        else:
            nic_a, nic_b = cluster.nics_between(gpu_a, gpu_b) if nic is None else (nic, nic)
            out, back = layout.out(gpu_a, nic_a), layout.back(nic_b, gpu_b)
            before = across.get((a, nic_a, b, nic_b), (0.0, 0.0))
            across[a, nic_a, b, nic_b] = before[0] + load, before[1] + weight
        for node, positions in ((a, out), (b, back)):
            for position in positions:
                inside[node, position] = inside.get((node, position), 0.0) + load
        if weight:
            crossed = [layout.edges[position] for position in (*out, *back)]
            kinds = [edge.kind for edge in crossed]
            kind = next(kind for kind in reversed(_KINDS) if kind in kinds)
            path[kind] = path.get(kind, 0.0) + weight
            link_latency_s += weight * sum([edge.latency_s for edge in crossed])
    return Shape(
        moves=moves,
        inside=tuple([(*at, load) for at, load in inside.items()]),
        across=tuple([(*ends, *both) for ends, both in across.items()]),
        hops=tuple(path.items()),
        link_latency_s=link_latency_s,
        sent=sum([load for load, _ in total.values()]),
    )


def placed(algorithm: str, shape: Shape, cluster: Cluster, nodes: Sequence[int]) -> Pattern:
    """The shape with its node i on ``nodes[i]``, as the pattern of the algorithm of that name."""
    links, moves = cluster.links, shape.moves
    first = [node * len(cluster.layout.edges) for node in nodes]
    loads = {first[node] + position: load for node, position, load in shape.inside}
    link_latency_s = shape.link_latency_s
    for a, nic_a, b, nic_b, load, weight in shape.across:
        for index in cluster.trunks_between(nodes[a], nic_a, nodes[b], nic_b):
            loads[index] = loads.get(index, 0.0) + load
            link_latency_s += weight * links[index].latency_s
    line_s: dict[TransportKind, float] = {}
    tightest_s, flow_bytes = 0.0, 1.0
    for index, load in loads.items():
        link = links[index]
        busy_s = load / link.bandwidth_Bps
        if busy_s > line_s.get(link.kind, 0.0):
            line_s[link.kind] = busy_s
            if busy_s > tightest_s:
                tightest_s, flow_bytes = busy_s, load
    return Pattern(
        algorithm=algorithm,
        kind=next(kind for kind in reversed(_KINDS) if kind in line_s),
        loads=tuple([(index, load / flow_bytes) for index, load in loads.items()]),
        flow_bytes=flow_bytes,
        line_s=tuple(line_s.items()),
        hops=shape.hops,
        link_latency_s=link_latency_s,
        sent=shape.sent,
        own=moves.own,
        efficiency=moves.efficiency,
        peers=moves.peers,
    )


def timed(pattern: Pattern, nbytes: float, costs: TransportCosts) -> tuple[float, Plan]:
    """The plan of a message of ``nbytes``, and its seconds on an idle network.

    For each protocol: latency = base + hops x (software per hop + their links), and bytes take
    ``line * (1 + sqrt(half_bytes / flow)) + own / copy`` seconds each, where flow is what the busiest link carries, and
    line is that of the kind of link that the protocol makes slowest. The square root is what a flow cut into the best
    number of chunks loses while the pipeline fills: n hops of k chunks of x bytes together last
    ``(n - 1 + k) (a + x / (k B))``, whose least is ``x / B + 2 sqrt((n - 1) a x / B) + (n - 1) a``. Chunks grow no more
    once they fill their buffer, at a flow of ``full_bytes``: from there on filling takes as long as for that flow.
    """
    return min(_by_protocol(pattern, nbytes, costs), key=lambda timed_plan: timed_plan[0])


def _by_protocol(pattern: Pattern, nbytes: float, costs: TransportCosts) -> Iterator[tuple[float, Plan]]:
    pace = costs.transport(pattern.kind)
    lines = [
        (seconds / costs.link_efficiency(kind), costs.transport(kind).ways(pattern.peers))
        for kind, seconds in pattern.line_s
    ]
    software = [(count, costs.transport(kind).ways(pattern.peers)) for kind, count in pattern.hops]
    start_s = pattern.link_latency_s
    if pattern.peers:
        start_s += pattern.peers * pace.peer_latency_s
    flow = nbytes * pattern.flow_bytes
    for name, protocol in pace.ways(pattern.peers).items():
        too_large = protocol.most_bytes is not None and flow > protocol.most_bytes
        if too_large or any(name not in protocols for _, protocols in lines):
            continue
        latency_s = start_s + protocol.base_latency_s
        for count, protocols in software:
            latency_s += count * protocols[name].hop_latency_s
        per_byte_s = max([line_s / protocols[name].bandwidth_fraction for line_s, protocols in lines])
        per_byte_s /= pattern.efficiency
        if protocol.half_bytes and nbytes:
            chunked = flow if protocol.full_bytes is None else min(flow, protocol.full_bytes)
            per_byte_s *= 1 + math.sqrt(protocol.half_bytes / chunked) * (chunked / flow)
        per_byte_s += pattern.own / (pace.p2p_copy_Bps if pattern.peers else pace.copy_Bps)
        phase = Phase(flow, pattern.loads, latency_s, pattern.flow_bytes / per_byte_s)
        yield latency_s + nbytes * per_byte_s, Plan(pattern.algorithm, (phase,), name, nbytes * pattern.sent)
