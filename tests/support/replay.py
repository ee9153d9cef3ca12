"""Collectives played message by message, with the data that they carry; `tests.support.scripts` writes them down.

A message leaves when what it carries has arrived at its sender and both ports are free; it holds them for
bytes / bandwidth, and arrives a latency later. A port sends what was ready first, in the order in which it is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from simulator.network.flows import Network
from simulator.network.plan import Phase, Plan
from simulator.network.simulated_time import SimulatedTime

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


def _followers(script: Script) -> dict[int, list[int]]:
    """Message -> those that wait for it."""
    followers: dict[int, list[int]] = {}
    for index, message in enumerate(script.messages):
        for other in message.after:
            followers.setdefault(other, []).append(index)
    return followers


def _turns(wires: Sequence[Wire]) -> dict[Hashable, deque[int]]:
    """Port -> the messages that cross it, in the order in which they are written down."""
    turns: dict[Hashable, deque[int]] = {}
    for index, (out, into, _, _) in enumerate(wires):
        for port in (out, into):
            turns.setdefault(port, deque()).append(index)
    return turns


def _heads(
    queues: dict[Hashable, list[tuple[float, int]]], free: dict[Hashable, float], now: float
) -> list[tuple[int, Hashable]]:
    """First message of the queue of each port that is free ``now``, with the port; what was ready first comes first."""
    ready = ((*queue[0], port) for port, queue in queues.items() if queue and free.get(port, 0.0) <= now)
    return [(index, port) for _, index, port in sorted(ready, key=lambda head: head[:2])]


def play(
    script: Script, wire: Callable[[Place, Place], Wire], *, posted: bool = True
) -> tuple[float, dict[Hashable, float]]:
    """Seconds until the last message has arrived, and bytes per port. ``posted`` false: a rank takes one message after
    another, and the next when the last has arrived, so that ports are held for the latency too (Hockney's alpha + beta
    m)."""
    carried: dict[Hashable, float] = {}
    free: dict[Hashable, float] = {}
    followers = _followers(script)
    missing = [len(message.after) for message in script.messages]
    arrived_at = [0.0] * len(script.messages)
    queues: dict[Hashable, list[tuple[float, int]]] = {}
    wires = [wire(message.sender, message.receiver) for message in script.messages]
    in_turn = {} if posted else _turns(wires)
    for index in [index for index, count in enumerate(missing) if not count]:
        heappush(queues.setdefault(wires[index][0], []), (0.0, index))
    instants, now, last, left = [0.0], 0.0, 0.0, len(missing)
    while instants:
        now = heappop(instants)
        soon = now * (1 + 1e-12)
        for index, out in _heads(queues, free, soon):
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
    env = SimulatedTime()
    network = Network(env, [wires[0][2]] * len(numbers))
    followers = _followers(script)
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
        if not message.after:
            heappush(queues.setdefault(connection(index), []), index)
    for key in list(queues):
        start(key)
    env.run()
    assert not any(missing), "messages wait for each other"
    return last[0]
