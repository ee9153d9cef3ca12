"""The program that the engine plays.

A `Program` gives every rank a `Role`; ranks that do the same work share one. A role has lanes (CUDA streams), and a
lane is a tuple of `Step`s. A step runs one `Block` of kernels, one `Comm`, or one `Batch` of point-to-point transfers.
Order within a lane is program order; ``after`` edges are the only order between lanes of a rank; ranks meet only in
communication. Groups are named by axis (``tp``, ``dp``, ``pp`` ...), so that a role need not know who its peers are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from simulator.program.ops import Batch, Block, Comm, but_tag, comms_of, quick_key
from simulator.program.slots import slot_setters
from simulator.program.vocabulary import StepPhase

if TYPE_CHECKING:  # numpy is loaded where a program is played
    from simulator.arrays import Ints
    from simulator.program.seated_groups import SeatedGroups


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of a lane.

    ``after`` holds labels of steps of the same rank that must have ended.
    ``stage`` is the model stage (chunk * pp + pipeline rank for interleaved schedules), -1 where it has none.
    ``part`` tells apart pieces of one thing: those that a pass is cut into, and parts of the parameters on servers.
    Memory: ``alloc_bytes`` are held from the step's start, ``free_bytes`` are given back at its end.
    Either may be negative, where the other outweighs it: a backward pass may leave more gradients than it frees.
    ``workspace_bytes`` are held only while it runs.
    ``hooks``: modules whose hooks the host runs before it.
    """

    label: str
    op: Block | Comm | Batch
    after: tuple[str, ...] = ()
    phase: StepPhase = StepPhase.COMMUNICATION
    microbatch: int = -1
    stage: int = -1
    chunk: int = 0
    part: str = ""
    alloc_bytes: float = 0.0
    free_bytes: float = 0.0
    workspace_bytes: float = 0.0
    hooks: int = 0


_SETTERS = slot_setters(Step)
# `reordered` looks up no name: a loop over all setters takes it half as long again, and more.
_set_label, _set_op, _set_after = _SETTERS["label"], _SETTERS["op"], _SETTERS["after"]
_set_phase, _set_microbatch, _set_stage = _SETTERS["phase"], _SETTERS["microbatch"], _SETTERS["stage"]
_set_chunk, _set_part, _set_alloc = _SETTERS["chunk"], _SETTERS["part"], _SETTERS["alloc_bytes"]
_set_free, _set_workspace = _SETTERS["free_bytes"], _SETTERS["workspace_bytes"]
_set_hooks = _SETTERS["hooks"]
#: Makes a step from a micro-batch, a label, an operation, and the labels of the steps before it.
StepMaker = Callable[[int, str, Block | Comm | Batch, tuple[str, ...]], Step]


def reordered(step: Step, after: tuple[str, ...], **changes: Any) -> Step:
    """Return ``step`` after other steps, and with further ``changes`` of its fields.

    It is as `dataclasses.replace`, in a third of the time: programs have hundreds of thousands of steps.
    """
    other = object.__new__(Step)
    _set_label(other, step.label)
    _set_op(other, step.op)
    _set_after(other, after)
    _set_phase(other, step.phase)
    _set_microbatch(other, step.microbatch)
    _set_stage(other, step.stage)
    _set_chunk(other, step.chunk)
    _set_part(other, step.part)
    _set_alloc(other, step.alloc_bytes)
    _set_free(other, step.free_bytes)
    _set_workspace(other, step.workspace_bytes)
    _set_hooks(other, step.hooks)
    for name, value in changes.items():
        _SETTERS[name](other, value)
    return other


def step_maker(step: Step) -> StepMaker:
    """Return a maker of copies of ``step`` that have another micro-batch, label, operation and steps before them."""
    changed = ("microbatch", "label", "op", "after")
    kept = [(put, getattr(step, name)) for name, put in _SETTERS.items() if name not in changed]

    def with_microbatch(microbatch: int, label: str, op: Block | Comm | Batch, after: tuple[str, ...]) -> Step:
        other = object.__new__(Step)
        for put, value in kept:
            put(other, value)
        _set_microbatch(other, microbatch)
        _set_label(other, label)
        _set_op(other, op)
        _set_after(other, after)
        return other

    return with_microbatch


def lanes_of_tuples(lanes: Mapping[str, Iterable[Step]]) -> dict[str, tuple[Step, ...]]:
    """Return ``lanes`` with the steps of each as a tuple: a generator could be read only once."""
    return {lane: tuple(steps) for lane, steps in lanes.items()}


def first_of_each(steps: Iterable[Step], key: Callable[[Step], Hashable]) -> Iterable[Step]:
    """Return the first of ``steps`` with each key, in their order."""
    first: dict[Hashable, Step] = {}
    for step in steps:
        first.setdefault(key(step), step)
    return first.values()


@dataclass(frozen=True)
class Role:
    """Work of the ranks of one kind: lane name -> steps, which may come as any iterable and are kept as tuples.

    ``later``: lane name -> communication that extensions of the program may bring, of whatever name and purpose.
    """

    name: str
    lanes: Mapping[str, tuple[Step, ...]]
    later: Mapping[str, tuple[Comm, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lanes", lanes_of_tuples(self.lanes))
        object.__setattr__(self, "later", {lane: tuple(comms) for lane, comms in self.later.items()})

    def steps(self) -> Iterator[tuple[str, int, Step]]:
        """Yield every step as (lane, index, step), lane by lane."""
        for lane, steps in self.lanes.items():
            for index, step in enumerate(steps):
                yield lane, index, step

    @cached_property
    def first_steps(self) -> Mapping[str, tuple[Step, ...]]:
        """The first step of each operation of each lane.

        Transfers that differ in their tags alone are one operation.
        """
        return {
            lane: tuple(first_of_each(steps, lambda step: quick_key(step.op))) for lane, steps in self.lanes.items()
        }

    @cached_property
    def comms(self) -> tuple[tuple[str, Comm], ...]:
        """All communication as (lane, communication), that of extensions too.

        What steps share comes once, as do transfers that differ in their tags alone.
        """
        distinct: dict[Hashable, tuple[str, Comm]] = {}
        for lane, steps in self.first_steps.items():
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
