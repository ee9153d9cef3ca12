"""Lanes of a program that grows: they ask for extensions, and wait for them."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence

import simpy

from simulator.engine.growth import Growth, host_type
from simulator.engine.lane import Lane
from simulator.engine.rank import Rank
from simulator.network.simulated_time import SimulatedTime
from simulator.program import COMPUTE_LANE, Extension


class GrowingLanes:
    """The lanes of ranks whose program grows as ``growth`` says.

    An extension is asked for at the end of the instant at which a first lane has run all of its steps of the last one.
    Lanes without steps wait until one comes for them.
    """

    def __init__(self, env: SimulatedTime, growth: Growth) -> None:
        self._env = env
        self._growth = growth
        self._is_asked = self._is_over = False
        #: Rank and lane -> event of the arrival of steps, and how many shares the lane has had.
        self._waiting: dict[tuple[Rank, str], tuple[simpy.Event, int]] = {}

    def begin(self) -> None:
        """Ask for an extension now where the program has no steps yet."""
        if self._growth.has_no_steps:
            self._ask()

    def go_through(self, lane: Lane, rank: Rank, name: str) -> Generator[simpy.Event, None, None]:
        """Let ``lane`` of ``rank``, called ``name``, run its steps and those of extensions, until there are no more."""
        shares = self._growth.shares(rank.role, name)
        for had in itertools.count():
            if had == len(shares) and not self._is_over:
                arrival = self._env.event()
                self._waiting[rank, name] = arrival, had
                yield from rank.wait_for_extension(name, arrival)
            if had == len(shares):
                return
            share = shares[had]
            if share.host_work:
                rank.host.begin(share.host_work[host_type(rank.placed)], share.release_s)
            yield from lane.go_through(share.steps, share.first)
            if share.steps and share.number == self._growth.n_extensions:
                self._ask()

    def _ask(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._env.at_end_of_instant(self._receive)

    def _receive(self) -> None:
        extension = self._growth.next_extension(self._env.now)
        if extension is None:
            self._is_over = True
            self._wake(list(self._waiting))
        elif extension.release_s <= self._env.now:
            self._hand_out(extension)
        else:
            self._env.process(self._hand_out_later(extension))

    def _hand_out_later(self, extension: Extension) -> Generator[simpy.Event, None, None]:
        yield self._env.timeout(extension.release_s - self._env.now)
        self._hand_out(extension)

    def _hand_out(self, extension: Extension) -> None:
        """Give lanes their shares, and wake those that have waited for one."""
        self._is_asked = False
        self._growth.add(extension)
        shares, waiting = self._growth.shares, self._waiting.items()
        self._wake([(rank, lane) for (rank, lane), (_, had) in waiting if len(shares(rank.role, lane)) > had])
        if extension.is_empty:
            self._ask()

    def _wake(self, waiting: Sequence[tuple[Rank, str]]) -> None:
        """Wake lanes. Compute lanes are first, so that hosts have issued what others begin with."""
        for rank, lane in sorted(waiting, key=lambda one: one[1] != COMPUTE_LANE):
            arrival, _ = self._waiting.pop((rank, lane))
            arrival.succeed()
