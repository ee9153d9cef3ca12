"""Growth of a program while it is played: extensions are asked for, checked, and handed to the lanes."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

import simpy

from simulator.costs import Costs
from simulator.engine.coalescing import CoalescedBlocks
from simulator.engine.group_comms import spec_of
from simulator.engine.issue_order import EarlierCompute, HostSpeeds, HostWork, host_work
from simulator.engine.lane import Lane
from simulator.engine.placement import StepSource
from simulator.engine.rank import Rank
from simulator.network.simulated_time import SimulatedTime
from simulator.program import (
    COMPUTE_LANE,
    Comm,
    Extension,
    Program,
    ProgramError,
    Role,
    Step,
    comms_of,
    extended,
    validate_extension,
)

#: More extensions than this at one instant are taken for a source that never ends.
MOST_AT_ONCE = 1_000

#: Type of a GPU, and speeds of its host.
_HostKind = tuple[str, HostSpeeds]


class _Share(NamedTuple):
    """The share of a lane of a role in extension ``number``: ``steps``, from position ``first`` of the lane on.

    ``host_work``: the work of hosts around the steps of a compute lane. Extension 0 is the program itself.
    """

    number: int
    first: int
    steps: Sequence[Step]
    release_s: float
    host_work: Mapping[_HostKind, tuple[HostWork, ...]]


class Growth:
    """The growth of a ``program`` on simulated ``ranks``, by the extensions that ``source`` returns.

    An extension is asked for at the end of the instant at which a first lane has run all of its steps of the last one.
    Lanes without steps wait until one comes for them.
    """

    def __init__(
        self,
        env: SimulatedTime,
        program: Program,
        source: StepSource,
        costs: Costs,
        ranks: Sequence[Rank],
        blocks: CoalescedBlocks,
    ) -> None:
        self._env = env
        self._program = program
        if not callable(source):
            raise ProgramError(
                f"{program.name}: more() returned a {type(source).__name__}; it must return a source, a function of "
                f"the time that returns the next Extension"
            )
        self._source = source
        self._blocks = blocks
        self._extensions: list[Extension] = []
        self._is_asked = self._is_over = False
        self._asked_at_s, self._asked_at_once = -1.0, 0
        kinds: dict[int, dict[_HostKind, Costs]] = {}
        for rank in ranks:
            kinds.setdefault(rank.role, {})[_host_kind(rank)] = costs.for_gpu(rank.speed.gpu)
        self._roles = {role: _GrowingRole(program.roles[role], kinds_of_role) for role, kinds_of_role in kinds.items()}
        self._labels = {number: role.labels for number, role in self._roles.items()}
        #: Rank and lane -> event of the arrival of steps, and how many shares the lane has had.
        self._waiting: dict[tuple[Rank, str], tuple[simpy.Event, int]] = {}

    @property
    def program(self) -> Program:
        """The program with all extensions so far."""
        return extended(self._program, *self._extensions)

    def begin(self) -> None:
        """Ask for an extension now where the program has no steps yet."""
        if all(not shares[0].steps for role in self._roles.values() for shares in role.shares.values()):
            self._ask()

    def go_through(self, lane: Lane, rank: Rank, name: str) -> Generator[simpy.Event, None, None]:
        """Let ``lane`` of ``rank``, called ``name``, run its steps and those of extensions, until there are no more."""
        shares = self._roles[rank.role].shares[name]
        for had in itertools.count():
            if had == len(shares) and not self._is_over:
                arrival = self._env.event()
                self._waiting[rank, name] = arrival, had
                yield from rank.wait_for_extension(name, arrival)
            if had == len(shares):
                return
            share = shares[had]
            if share.host_work:
                rank.host.begin(share.host_work[_host_kind(rank)], share.release_s)
            yield from lane.go_through(share.steps, share.first)
            if share.steps and share.number == len(self._extensions):
                self._ask()

    def _ask(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._env.at_end_of_instant(self._receive)

    def _receive(self) -> None:
        extension = self._source(self._env.now)
        if extension is None:
            self._is_over = True
            self._wake(list(self._waiting))
            return
        if not isinstance(extension, Extension):
            raise ProgramError(
                f"{self._program.name}: the source returned a {type(extension).__name__} at {self._env.now:g} s; it "
                f"must return an Extension, or None where there is no more"
            )
        self._check(extension)
        if extension.release_s <= self._env.now:
            self._hand_out(extension)
        else:
            self._env.process(self._hand_out_later(extension))

    def _hand_out_later(self, extension: Extension) -> Generator[simpy.Event, None, None]:
        yield self._env.timeout(extension.release_s - self._env.now)
        self._hand_out(extension)

    def _hand_out(self, extension: Extension) -> None:
        """Give lanes their shares, and wake those that have waited for one."""
        self._extensions.append(extension)
        self._is_asked = False
        for number, lanes in extension.lanes.items():
            self._roles[number].extend(len(self._extensions), lanes, extension.release_s)
            for lane, steps in lanes.items():
                self._blocks.add_steps(number, lane, steps)
        roles, waiting = self._roles, self._waiting.items()
        self._wake([(rank, lane) for (rank, lane), (_, had) in waiting if len(roles[rank.role].shares[lane]) > had])
        if extension.is_empty:
            self._ask()

    def _wake(self, waiting: Sequence[tuple[Rank, str]]) -> None:
        """Wake lanes. Compute lanes are first, so that hosts have issued what others begin with."""
        for rank, lane in sorted(waiting, key=lambda one: one[1] != COMPUTE_LANE):
            arrival, _ = self._waiting.pop((rank, lane))
            arrival.succeed()

    def _check(self, extension: Extension) -> None:
        """Raise `ProgramError` where ``extension`` cannot be played."""
        validate_extension(self._program, extension, self._labels)
        for number, lanes in extension.lanes.items():
            for lane, steps in lanes.items():
                self._roles[number].check_declared(lane, steps)
        now = self._env.now
        self._asked_at_once = self._asked_at_once + 1 if now == self._asked_at_s else 1
        self._asked_at_s = now
        if self._asked_at_once > MOST_AT_ONCE:
            raise ProgramError(
                f"{self._program.name}: {MOST_AT_ONCE} extensions came at {now:g} s, and the clock stands still. "
                f"Let their steps take time, or return None where there is no more"
            )
        if extension.is_empty and extension.release_s <= now:
            raise ProgramError(
                f"{self._program.name}: an extension without steps, asked for at {now:g} s, is released at "
                f"{extension.release_s:g} s. Release it later, to be asked again then, or return None where there is "
                f"no more"
            )


class _GrowingRole:
    """A role of a program that grows; its ranks' GPUs and hosts are of these ``kinds``, with their costs.

    ``shares``: lane name -> the shares that each rank's lane goes through, in order.
    """

    def __init__(self, role: Role, kinds: Mapping[_HostKind, Costs]) -> None:
        self.labels = {step.label for _, _, step in role.steps()}
        self.shares = {lane: [_Share(0, 0, steps, 0.0, {})] for lane, steps in role.lanes.items()}
        self._name = role.name
        self._kinds = kinds
        self._declared = {_declaration(lane, comm) for lane, comm in role.comms()}
        self._checked: set[tuple[str, int]] = set()
        compute = role.lanes.get(COMPUTE_LANE, ())
        self._computed = {step.label for step in compute}
        self._last_computed = compute[-1] if compute else None

    def extend(self, number: int, lanes: Mapping[str, Sequence[Step]], release_s: float) -> None:
        """Give lanes their shares of extension ``number``.

        The compute lane has a share of each, as its host issues the communication of other lanes.
        """
        earlier = EarlierCompute(self._computed, self._last_computed)
        added = Role(self._name, {lane: tuple(steps) for lane, steps in lanes.items()})
        for lane, shares in self.shares.items():
            steps, work = added.lanes.get(lane, ()), {}
            if lane == COMPUTE_LANE:
                work = {kind: host_work(added, costs, kind[1], earlier) for kind, costs in self._kinds.items()}
            if steps or work:
                first = shares[-1].first + len(shares[-1].steps)
                shares.append(_Share(number, first, steps, release_s, work))
        compute = added.lanes.get(COMPUTE_LANE, ())
        self._computed.update(step.label for step in compute)
        self._last_computed = compute[-1] if compute else self._last_computed

    def check_declared(self, lane: str, steps: Sequence[Step]) -> None:
        """Raise `ProgramError` where a step has communication that nothing was planned for."""
        for step in steps:
            if (lane, id(step.op)) in self._checked:
                continue
            self._checked.add((lane, id(step.op)))
            for comm in comms_of(step.op):
                if _declaration(lane, comm) not in self._declared:
                    raise ProgramError(
                        f"role {self._name!r}: step {step.label!r} on lane {lane!r} has {comm.op} {comm.name!r} of "
                        f"{comm.nbytes:.0f} bytes on axis '{comm.axis}', which the role does not declare. "
                        f"Name it in Role.later[{lane!r}]; simulator.program.expecting does so from a sample"
                    )


def _host_kind(rank: Rank) -> _HostKind:
    return rank.speed.gpu, rank.host.speeds


def _declaration(lane: str, comm: Comm) -> tuple[object, ...]:
    """Return what has to be known of communication before the clock starts."""
    return lane, comm.axis, spec_of(comm, -1)
