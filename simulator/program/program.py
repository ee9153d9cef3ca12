"""The program that the engine plays.

A `Program` gives every rank a `Role`; ranks that do the same work share one. A role has lanes (CUDA streams), and a
lane has `Step`s. A step runs one `Block` of kernels, one `Comm`, or one `Batch` of point-to-point transfers.
Order within a lane is program order; ``after`` edges are the only order between lanes of a rank; ranks meet only in
communication. Groups are named by axis (``tp``, ``dp``, ``pp`` ...), so that a role need not know who its peers are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from simulator.program.ops import Comm, but_tag, comms_of, quick_key
from simulator.program.step import Step
from simulator.program.steps import LaneSteps, StepColumns

if TYPE_CHECKING:  # numpy is loaded where a program is played
    from simulator.arrays import Ints
    from simulator.program.seated_groups import SeatedGroups


@dataclass(frozen=True)
class Role:
    """Work of the ranks of one kind: lane name -> steps, which may come as any iterable.

    ``later``: lane name -> communication that extensions of the program may bring, of whatever name and purpose.
    """

    name: str
    lanes: Mapping[str, Sequence[Step]]
    later: Mapping[str, tuple[Comm, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lanes", {lane: LaneSteps.from_steps(steps) for lane, steps in self.lanes.items()})
        object.__setattr__(self, "later", {lane: tuple(comms) for lane, comms in self.later.items()})

    def steps(self) -> Iterator[tuple[str, int, Step]]:
        """Yield every step as (lane, index, step), lane by lane."""
        for lane, steps in self.lanes.items():
            for index, step in enumerate(steps):
                yield lane, index, step

    @cached_property
    def columns(self) -> Mapping[str, StepColumns]:
        """The steps of each lane as columns."""
        return {lane: LaneSteps.from_steps(steps).columns for lane, steps in self.lanes.items()}

    @cached_property
    def operations(self) -> Mapping[str, tuple[Step, ...]]:
        """A step of each operation of each lane, in their order.

        Transfers that differ in their tags alone are one operation.
        """
        operations: dict[str, tuple[Step, ...]] = {}
        for lane, columns in self.columns.items():
            first: dict[Hashable, Step] = {}
            for step in columns.prototypes:
                first.setdefault(quick_key(step.op), step)
            operations[lane] = tuple(first.values())
        return operations

    @cached_property
    def comms(self) -> tuple[tuple[str, Comm], ...]:
        """All communication as (lane, communication), that of extensions too.

        What steps share comes once, as do transfers that differ in their tags alone.
        """
        distinct: dict[Hashable, tuple[str, Comm]] = {}
        for lane, steps in self.operations.items():
            for step in steps:
                for comm in comms_of(step.op):
                    distinct.setdefault((lane, but_tag(comm)), (lane, comm))
        declared = [(lane, comm) for lane, comms in self.later.items() for comm in comms]
        return (*distinct.values(), *declared)


@dataclass(frozen=True)
class Program:
    """Roles, who plays them, and who talks to whom.

    ``role_of[rank]`` indexes ``roles``; ``groups[axis]`` lists disjoint, ordered rank tuples.
    ``servers`` are the nodes on whose hosts parameter servers run, each with an equal part of all parameters.
    """

    roles: tuple[Role, ...]
    role_of: tuple[int, ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    name: str = "program"
    servers: tuple[int, ...] = ()
    _seated: dict[str, SeatedGroups] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def n_ranks(self) -> int:
        return len(self.role_of)

    def group_index(self, axis: str, rank: int) -> int:
        """Return the index in ``groups[axis]`` of the group that holds ``rank``; -1 where none does.

        No group holds a rank that is not in the program.
        """
        return int(self.seated(axis).group_of[rank]) if 0 <= rank < self.n_ranks else -1

    def seated(self, axis: str) -> SeatedGroups:
        """Return the groups of an axis as arrays."""
        from simulator.program.seated_groups import SeatedGroups

        if axis not in self._seated:
            self._seated[axis] = SeatedGroups.from_groups(self.groups[axis], self.n_ranks)
        return self._seated[axis]

    @cached_property
    def role_numbers(self) -> Ints:
        """`role_of` as an array."""
        import numpy as np

        return np.array(self.role_of, dtype=np.int64)

    @cached_property
    def ranks_of_roles(self) -> tuple[Ints, ...]:
        """The ranks of every role."""
        import numpy as np

        by_role = np.argsort(self.role_numbers, kind="stable")
        cuts = np.searchsorted(self.role_numbers[by_role], np.arange(1, len(self.roles)))
        return tuple(np.split(by_role, cuts)) if self.roles else ()
