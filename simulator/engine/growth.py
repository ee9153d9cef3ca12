"""Growth of a program while it is played: extensions are asked for, checked, and added to the lanes of roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from simulator.costs import Costs
from simulator.engine.coalescing import CoalescedBlocks
from simulator.engine.group_comms import spec_of
from simulator.engine.issue_order import EarlierCompute, HostSpeeds, HostWork, host_work
from simulator.engine.placement import StepSource
from simulator.engine.rank import PlacedRank
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
HostType = tuple[str, HostSpeeds]


class LaneShare(NamedTuple):
    """The share of a lane of a role in extension ``number``: ``steps``, from position ``first`` of the lane on.

    ``host_work``: the work of hosts around the steps of a compute lane. Extension 0 is the program itself.
    """

    number: int
    first: int
    steps: Sequence[Step]
    release_s: float
    host_work: Mapping[HostType, tuple[HostWork, ...]]


class Growth:
    """The growth of a ``program`` on simulated ``ranks``, by the extensions that ``source`` returns.

    Each is checked when it comes, and added when it is released. ``shares`` are what lanes of roles then go through.
    """

    def __init__(
        self,
        program: Program,
        source: StepSource,
        costs: Costs,
        ranks: Sequence[PlacedRank],
        blocks: CoalescedBlocks,
    ) -> None:
        self._program = program
        if not callable(source):
            raise ProgramError(
                f"{program.name}: more() returned a {type(source).__name__}; it must return a source, a function of "
                f"the time that returns the next Extension"
            )
        self._source = source
        self._blocks = blocks
        self._extensions: list[Extension] = []
        self._asked_at_s, self._asked_at_once = -1.0, 0
        kinds: dict[int, dict[HostType, Costs]] = {}
        for rank in ranks:
            kinds.setdefault(rank.role, {})[host_type(rank)] = costs.for_gpu(rank.speed.gpu)
        self._roles = {role: _GrowingRole(program.roles[role], kinds_of_role) for role, kinds_of_role in kinds.items()}
        self._labels = {number: role.labels for number, role in self._roles.items()}

    @property
    def program(self) -> Program:
        """The program with all extensions so far."""
        return extended(self._program, *self._extensions)

    @property
    def n_extensions(self) -> int:
        """How many have been added."""
        return len(self._extensions)

    @property
    def has_no_steps(self) -> bool:
        """True where the program itself gives no lane a step."""
        return all(not shares[0].steps for role in self._roles.values() for shares in role.shares.values())

    def shares(self, role: int, lane: str) -> Sequence[LaneShare]:
        """Return the shares of a lane of a role so far, which its ranks go through in order."""
        return self._roles[role].shares[lane]

    def next_extension(self, now: float) -> Extension | None:
        """Ask the source; return an extension that can be played, or None where there is no more."""
        extension = self._source(now)
        if extension is None:
            return None
        if not isinstance(extension, Extension):
            raise ProgramError(
                f"{self._program.name}: the source returned a {type(extension).__name__} at {now:g} s; it "
                f"must return an Extension, or None where there is no more"
            )
        self._check(extension, now)
        return extension

    def add(self, extension: Extension) -> None:
        """Give lanes their shares of an extension."""
        self._extensions.append(extension)
        for number, lanes in extension.lanes.items():
            self._roles[number].extend(len(self._extensions), lanes, extension.release_s)
            for lane, steps in lanes.items():
                self._blocks.add_steps(number, lane, steps)

    def _check(self, extension: Extension, now: float) -> None:
        """Raise `ProgramError` where ``extension`` cannot be played."""
        validate_extension(self._program, extension, self._labels)
        for number, lanes in extension.lanes.items():
            for lane, steps in lanes.items():
                self._roles[number].check_declared(lane, steps)
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

    def __init__(self, role: Role, kinds: Mapping[HostType, Costs]) -> None:
        self.labels = {step.label for _, _, step in role.steps()}
        self.shares = {lane: [LaneShare(0, 0, steps, 0.0, {})] for lane, steps in role.lanes.items()}
        self._name = role.name
        self._kinds = kinds
        self._declared = {_declaration(lane, comm) for lane, comm in role.comms}
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
                shares.append(LaneShare(number, first, steps, release_s, work))
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


def host_type(rank: PlacedRank) -> HostType:
    """Return the kind of host that issues what ``rank`` does."""
    return rank.speed.gpu, rank.speed.host


def _declaration(lane: str, comm: Comm) -> tuple[object, ...]:
    """Return what has to be known of communication before the clock starts."""
    return lane, comm.axis, spec_of(comm, -1)
