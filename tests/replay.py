"""Collectives played message by message, with the data that they carry: what the algorithms of `simulator.network` are
held against. Written from the papers, rank by rank, and knowing nothing of flows.

A message leaves when what it carries has arrived at its sender and both ports are free; it holds them for
bytes / bandwidth, and arrives a latency later. A port sends what was ready first, in the order in which it is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

import simpy

from simulator.network.flows import Network
from simulator.network.plan import Phase, Plan

#: A rank, or a switch that sums up.
Place = Hashable
#: A part of the message.
Part = Hashable
#: What a message from one place to another crosses: port out, port in, bytes/s, latency.
Wire = tuple[Hashable, Hashable, float, float]


class Message(NamedTuple):
    sender: Place
    receiver: Place
    parts: tuple[Part, ...]
    nbytes: float
    adds: bool
    after: tuple[int, ...]


@dataclass
class Script:
    """Messages in the order in which they are written down; one carries what its sender has by then."""

    messages: list[Message] = field(default_factory=list)
    _brought: dict[tuple[Place, Part], list[int]] = field(default_factory=dict)

    def send(self, sender: Place, receiver: Place, parts: Iterable[Part], nbytes: float, adds: bool = False) -> None:
        """``adds``: the receiver adds it to what it has, instead of replacing that."""
        carried = tuple(parts)
        needs = dict.fromkeys(index for part in carried for index in self._brought.get((sender, part), []))
        self.messages.append(Message(sender, receiver, carried, nbytes, adds, tuple(needs)))

    def deliver(self, since: int) -> None:
        """What was written down from ``since`` on has arrived for those that are written down later."""
        for index in range(since, len(self.messages)):
            message = self.messages[index]
            for part in message.parts:
                self._brought.setdefault((message.receiver, part), []).append(index)

    def step(self, messages: Iterable[tuple[Place, Place, Iterable[Part], float, bool]]) -> None:
        """Messages that do not wait for each other."""
        since = len(self.messages)
        for message in messages:
            self.send(*message)
        self.deliver(since)


def data(script: Script, owns: Callable[[Place, Part], bool]) -> dict[tuple[Place, Part], frozenset[Place]]:
    """Whose contributions every place has of every part in the end, if ``owns`` says who contributes to what. Fails
    where a contribution is added twice."""
    held: dict[tuple[Place, Part], frozenset[Place]] = {}

    def at(place: Place, part: Part) -> frozenset[Place]:
        return held.get((place, part), frozenset({place} if owns(place, part) else ()))

    arrived = set()
    for index, message in enumerate(script.messages):
        assert set(message.after) <= arrived
        for part in message.parts:
            brought, had = at(message.sender, part), at(message.receiver, part)
            assert brought, f"{message.sender} has nothing of {part}"
            assert not (message.adds and brought & had), f"{part} of {brought & had} is added twice"
            held[message.receiver, part] = brought | had if message.adds else brought
        arrived.add(index)
    return held


def play(
    script: Script, wire: Callable[[Place, Place], Wire], *, posted: bool = True
) -> tuple[float, dict[Hashable, float]]:
    """Seconds until the last message has arrived, and bytes per port. ``posted`` false: a rank takes one message after
    another, and the next when the last has arrived, so that ports are held for the latency too (Hockney's alpha + beta
    m)."""
    carried: dict[Hashable, float] = {}
    free: dict[Hashable, float] = {}
    followers: dict[int, list[int]] = {}
    missing = [len(message.after) for message in script.messages]
    arrived_at = [0.0] * len(script.messages)
    queues: dict[Hashable, list[tuple[float, int]]] = {}
    wires = [wire(message.sender, message.receiver) for message in script.messages]
    in_turn: dict[Hashable, deque[int]] = {}
    for index, (out, into, _, _) in enumerate(wires if not posted else ()):
        for port in (out, into):
            in_turn.setdefault(port, deque()).append(index)
    for index, message in enumerate(script.messages):
        for other in message.after:
            followers.setdefault(other, []).append(index)
        if not missing[index]:
            heappush(queues.setdefault(wires[index][0], []), (0.0, index))
    instants, now, last, left = [0.0], 0.0, 0.0, len(missing)
    while instants:
        now = heappop(instants)
        soon = now * (1 + 1e-12)
        heads = sorted(
            ((*queue[0], out) for out, queue in queues.items() if queue and free.get(out, 0.0) <= soon),
            key=lambda head: head[:2],
        )
        for _, index, out in heads:
            _, into, bandwidth_Bps, latency_s = wires[index]
            if arrived_at[index] > soon or free.get(into, 0.0) > soon:
                continue
            if not posted:
                if any(in_turn[port][0] != index for port in (out, into)):
                    continue
                for port in (out, into):
                    in_turn[port].popleft()
            heappop(queues[out])
            nbytes = script.messages[index].nbytes
            ends = now + nbytes / bandwidth_Bps
            for port in (out, into):
                free[port] = ends if posted else ends + latency_s
                carried[port] = carried.get(port, 0.0) + nbytes
            heappush(instants, ends)
            heappush(instants, ends + latency_s)
            left, last = left - 1, max(last, ends + latency_s)
            for follower in followers.get(index, ()):
                missing[follower] -= 1
                arrived_at[follower] = max(arrived_at[follower], ends + latency_s)
                if not missing[follower]:
                    heappush(
                        queues.setdefault(wires[follower][0], []), (arrived_at[follower] if posted else 0.0, follower)
                    )
        while instants and instants[0] <= soon:
            heappop(instants)
    assert not left, "messages wait for each other"
    return last, carried


def play_shared(script: Script, wire: Callable[[Place, Place], Wire]) -> float:
    """As `play`, but what leaves or enters a port at one time shares it evenly, as packets of several connections do;
    messages of one connection go one after another. A connection is of two places and the first item of a part."""
    numbers: dict[Hashable, int] = {}
    wires = [wire(message.sender, message.receiver) for message in script.messages]
    for out, into, _, _ in wires:
        numbers.setdefault(out, len(numbers))
        numbers.setdefault(into, len(numbers))
    env = simpy.Environment()
    network = Network(env, [wires[0][2]] * len(numbers))
    followers: dict[int, list[int]] = {}
    missing = [len(message.after) for message in script.messages]
    queues: dict[Hashable, list[int]] = {}
    busy: set[Hashable] = set()
    last = [0.0]

    def connection(index: int) -> Hashable:
        message = script.messages[index]
        return message.sender, message.receiver, message.parts[0][0]  # type: ignore[index]

    def start(key: Hashable) -> None:
        if key in busy or not queues.get(key):
            return
        busy.add(key)
        index = heappop(queues[key])
        out, into, _, _ = wires[index]
        moved = Phase(script.messages[index].nbytes, ((numbers[out], 1.0), (numbers[into], 1.0)), 0.0)
        network.transfer(Plan("message", (moved,)), partial(sent, index))

    def sent(index: int) -> None:
        busy.discard(connection(index))
        start(connection(index))
        env.timeout(wires[index][3]).callbacks.append(lambda _: arrived(index))

    def arrived(index: int) -> None:
        last[0] = env.now
        for follower in followers.get(index, ()):
            missing[follower] -= 1
            if not missing[follower]:
                heappush(queues.setdefault(connection(follower), []), follower)
                start(connection(follower))

    for index, message in enumerate(script.messages):
        for other in message.after:
            followers.setdefault(other, []).append(index)
        if not message.after:
            heappush(queues.setdefault(connection(index), []), index)
    for key in list(queues):
        start(key)
    env.run()
    assert not any(missing), "messages wait for each other"
    return last[0]


def ring_reduce_scatter(n: int, size: float, script: Script | None = None) -> Script:
    """In step s rank i adds what it has of part i - s to the next one's; it ends with all of part i + 1."""
    script = script or Script()
    for s in range(n - 1):
        script.step((i, (i + 1) % n, [(i - s) % n], size / n, True) for i in range(n))
    return script


def ring_all_gather(n: int, size: float, script: Script | None = None) -> Script:
    """In step s rank i hands on part i + 1 - s."""
    script = script or Script()
    for s in range(n - 1):
        script.step((i, (i + 1) % n, [(i + 1 - s) % n], size / n, False) for i in range(n))
    return script


def ring_all_reduce(n: int, size: float) -> Script:
    return ring_all_gather(n, size, ring_reduce_scatter(n, size))


def chain_broadcast(n: int, size: float, chunks: int) -> Script:
    script = Script()
    for chunk in range(chunks):
        for i in range(n - 1):
            script.step([(i, i + 1, [chunk], size / chunks, False)])
    return script


def chain_reduce(n: int, size: float, chunks: int) -> Script:
    script = Script()
    for chunk in range(chunks):
        for i in range(n - 1, 0, -1):
            script.step([(i, i - 1, [chunk], size / chunks, True)])
    return script


def direct_reduce_scatter(n: int, size: float, script: Script | None = None) -> Script:
    script = script or Script()
    script.step((i, (i + d) % n, [(i + d) % n], size / n, True) for d in range(1, n) for i in range(n))
    return script


def direct_all_gather(n: int, size: float, script: Script | None = None) -> Script:
    script = script or Script()
    script.step((i, (i + d) % n, [i], size / n, False) for d in range(1, n) for i in range(n))
    return script


def direct_all_reduce(n: int, size: float) -> Script:
    return direct_all_gather(n, size, direct_reduce_scatter(n, size))


def pairwise_all_to_all(n: int, size: float) -> Script:
    script = Script()
    script.step((i, (i + d) % n, [(i, (i + d) % n)], size / n, False) for d in range(1, n) for i in range(n))
    return script


def halving_doubling_all_reduce(n: int, size: float) -> Script:
    p = 1
    while 2 * p <= n:
        p *= 2
    extra = n - p
    every = range(p)
    real = [2 * i if i < extra else i + extra for i in every]
    script = Script()
    script.step((2 * i + 1, 2 * i, every, size, True) for i in range(extra))
    mine = {i: set(every) for i in every}
    distance = 1
    while distance < p:
        keeps = {i: {part for part in mine[i] if (part & distance) == (i & distance)} for i in every}
        gives = {i: sorted(mine[i] - keeps[i]) for i in every}
        script.step((real[i], real[i ^ distance], gives[i], size * len(gives[i]) / p, True) for i in every)
        mine, distance = keeps, 2 * distance
    while distance > 1:
        distance //= 2
        script.step((real[i], real[i ^ distance], sorted(mine[i]), size * len(mine[i]) / p, False) for i in every)
        mine = {i: mine[i] | mine[i ^ distance] for i in every}
    script.step((2 * i, 2 * i + 1, every, size, False) for i in range(extra))
    return script


def bruck_all_gather(n: int, size: float) -> Script:
    script, have = Script(), 1
    while have < n:
        count = min(have, n - have)
        script.step((i, (i - have) % n, [(i + k) % n for k in range(count)], size * count / n, False) for i in range(n))
        have += count
    return script


def bruck_all_to_all(n: int, size: float) -> Script:
    script, bit = Script(), 1
    at = {(i, j): i for i in range(n) for j in range(n)}
    while bit < n:
        moving: dict[int, list[Part]] = {}
        for (i, j), place in at.items():
            if (j - i) % n & bit:
                moving.setdefault(place, []).append((i, j))
        script.step((i, (i + bit) % n, parts, size * len(parts) / n, False) for i, parts in sorted(moving.items()))
        for i, parts in moving.items():
            for part in parts:
                at[part] = (i + bit) % n
        bit *= 2
    return script


def binomial(n: int, size: float, kind: str) -> Script:
    """broadcast, reduce, scatter or gather: rank i's parent is i without its lowest set bit."""
    script = Script()
    bits = [1 << k for k in range(n.bit_length()) if 1 << k < n]
    towards_root = kind in ("reduce", "gather")
    for bit in bits if towards_root else reversed(bits):
        pairs = [(i - bit, i) for i in range(n) if i & bit and not i & (bit - 1)]
        messages = []
        for parent, child in pairs:
            below = range(child, min(child + bit, n))
            whole = kind in ("broadcast", "reduce")
            ends = (child, parent) if towards_root else (parent, child)
            messages.append(
                (*ends, [0] if whole else below, size if whole else size * len(below) / n, kind == "reduce")
            )
        script.step(messages)
    return script


def linear(n: int, size: float, kind: str) -> Script:
    script = Script()
    whole = kind in ("broadcast", "reduce")
    for i in range(1, n):
        ends = (i, 0) if kind in ("reduce", "gather") else (0, i)
        script.step([(*ends, [0] if whole else [i], size if whole else size / n, kind == "reduce")])
    return script


def tree_all_reduce(parents: list[list[int]], size: float, chunks: int) -> Script:
    """Chunks go up each tree, added up on the way, and down again; every tree has its own part of the message."""
    script = Script()
    for chunk in range(chunks):
        for number, of in enumerate(parents):
            part, nbytes = (number, chunk), size / len(parents) / chunks
            order = sorted(range(len(of)), key=lambda node: -_depth(of, node))
            for node in order:
                if of[node] >= 0:
                    script.step([(node, of[node], [part], nbytes, True)])
            for node in reversed(order):
                if of[node] >= 0:
                    script.step([(of[node], node, [part], nbytes, False)])
    return script


def _depth(of: list[int], node: int) -> int:
    depth = 0
    while of[node] >= 0:
        node, depth = of[node], depth + 1
    return depth


def nvls_all_reduce(n: int, size: float, chunks: int) -> Script:
    """Of each head's part, chunk by chunk: all GPUs to the switch, the sum to the head, back, and on to all."""
    script = Script()
    for chunk in range(chunks):
        for head in range(n):
            part, nbytes = (head, chunk), size / n / chunks
            script.step((i, ("sum", head), [part], nbytes, True) for i in range(n))
            script.step([(("sum", head), head, [part], nbytes, False)])
            script.step([(head, ("copy", head), [part], nbytes, False)])
            script.step((("copy", head), i, [part], nbytes, False) for i in range(n))
    return script


def hierarchical_all_reduce(nodes: int, gpus: int, size: float) -> Script:
    """Rank (node, place). Parts (place, node): those of one place travel along its rail."""
    script = Script()

    def part(place: int) -> list[Part]:
        return [(place % gpus, number) for number in range(nodes)]

    every = [(node, place) for node in range(nodes) for place in range(gpus)]
    for s in range(gpus - 1):
        script.step(((a, i), (a, (i + 1) % gpus), part(i - s), size / gpus, True) for a, i in every)
    each = size / gpus / nodes
    for s in range(nodes - 1):
        script.step(((a, i), ((a + 1) % nodes, i), [((i + 1) % gpus, (a - s) % nodes)], each, True) for a, i in every)
    for s in range(nodes - 1):
        script.step(
            ((a, i), ((a + 1) % nodes, i), [((i + 1) % gpus, (a + 1 - s) % nodes)], each, False) for a, i in every
        )
    for s in range(gpus - 1):
        script.step(((a, i), (a, (i + 1) % gpus), part(i + 1 - s), size / gpus, False) for a, i in every)
    return script


def rail_all_to_all(nodes: int, gpus: int, size: float) -> Script:
    """Rank (node, place). Parts are pairs of ranks: first to the place of the receiver, then to its node."""
    script = Script()
    every = [(node, place) for node in range(nodes) for place in range(gpus)]
    script.step(
        (
            (a, i),
            (a, (i + d) % gpus),
            [((a, i), (b, (i + d) % gpus)) for b in range(nodes)],
            size / gpus,
            False,
        )
        for d in range(1, gpus)
        for a, i in every
    )
    script.step(
        (
            (a, i),
            ((a + d) % nodes, i),
            [((a, j), ((a + d) % nodes, i)) for j in range(gpus)],
            size / nodes,
            False,
        )
        for d in range(1, nodes)
        for a, i in every
    )
    return script
