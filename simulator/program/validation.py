"""Rules that every program keeps."""

from __future__ import annotations

import math
from collections.abc import Hashable
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from simulator.errors import SimulatorError
from simulator.program.kernels import Attention, Fixed, GroupedMatmul, Matmul, Memory, Tiled
from simulator.program.ops import (
    AllToAll,
    Batch,
    Beside,
    Block,
    Collective,
    Comm,
    Compute,
    HostOperation,
    PointToPoint,
    RecordedWork,
    but_tag,
    comms_of,
    kernels_of,
)
from simulator.program.program import Program, Role
from simulator.program.step import Step
from simulator.program.steps import StepColumns
from simulator.program.vocabulary import (
    AXES,
    COMPUTE_LANE,
    Axis,
    CollectiveKind,
    CommKind,
    HostKind,
    PointToPointKind,
    RecordedKind,
    axis_of,
)

if TYPE_CHECKING:
    from simulator.arrays import Ints

T = TypeVar("T", bound=Hashable)

#: Kind of operation -> the type that has its fields.
COMM_TYPES: dict[CommKind, type[Collective] | type[PointToPoint] | type[HostOperation] | type[RecordedWork]] = {
    **dict.fromkeys(CollectiveKind, Collective),
    CollectiveKind.ALL_TO_ALL: AllToAll,
    **dict.fromkeys(PointToPointKind, PointToPoint),
    **dict.fromkeys(HostKind, HostOperation),
    RecordedKind.RECORDED: RecordedWork,
}
#: Type of a kernel -> its fields that count time, bytes, FLOPs or a size of its shape.
_AMOUNTS: dict[type, tuple[str, ...]] = {
    Matmul: ("m", "n", "k", "batch"),
    GroupedMatmul: ("n", "k", "tokens"),
    Attention: ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim", "window", "chunk"),
    Tiled: ("flops", "read_bytes", "write_bytes", "chunk", "width", "launches"),
    Memory: ("read_bytes", "write_bytes", "flops", "width", "parts", "launches", "elements"),
    Fixed: ("seconds", "flops", "bytes"),
}


class ProgramError(SimulatorError):
    """A program that breaks its own rules: the builder's fault, or a wrong hand-written file."""


def validate(program: Program, *, grows: bool = False) -> None:
    """Raise `ProgramError` where the program cannot mean anything.

    Refused are unknown roles, labels, axes, operations and peers, and amounts that are negative or not finite.
    Where it ``grows``, a step may wait for one of an extension to come.
    """
    if program.role_of and not 0 <= min(program.role_of) <= max(program.role_of) < len(program.roles):
        raise ProgramError(f"{program.name}: role_of names a role that does not exist")
    _validate_groups(program)
    checked: set[tuple[str, Hashable]] = set()
    for role, ranks in zip(program.roles, program.ranks_of_roles, strict=True):
        if len(ranks):
            _validate_role(program, role, ranks, grows, checked)


def _validate_groups(program: Program) -> None:
    for axis, groups in program.groups.items():
        _axis(program.name, axis)
        members = [rank for group in groups for rank in group]
        if len(set(members)) != len(members):
            raise ProgramError(f"{program.name}: a rank stands in two groups of axis '{axis}'")
        if members and not 0 <= min(members) <= max(members) < program.n_ranks:
            raise ProgramError(f"{program.name}: axis '{axis}' names a rank outside 0..{program.n_ranks - 1}")


def _validate_role(program: Program, role: Role, ranks: Ints, grows: bool, checked: set[tuple[str, Hashable]]) -> None:
    """Raise unless the steps of a role are sound; operations that were ``checked`` on a lane are so for all roles."""
    where = f"{program.name}: role {role.name!r}"
    labels = _labels(where, role)
    ends: set[tuple[str, int | None]] = set()
    ops: set[tuple[str, Hashable]] = set()
    for lane, columns in role.columns.items():
        if not grows:
            _validate_awaited(where, columns, labels)
        for step in columns.prototypes:
            validate_memory(where, step)
        for step in role.operations[lane]:
            if not _is_new((lane, _same_rules(step.op)), ops):
                continue
            if _is_new((lane, _same_rules(step.op)), checked):
                validate_op(where, lane, step)
            for comm in comms_of(step.op):
                if _is_new(_ends(comm), ends):
                    _validate_ends(f"{where}: step {step.label!r}", program, comm, ranks)
    _validate_later(where, program, role, ranks, ends)


def _validate_later(where: str, program: Program, role: Role, ranks: Ints, ends: set[tuple[str, int | None]]) -> None:
    """Raise unless what extensions may bring is sound; whom it is with is so where it is among ``ends``."""
    for lane, comms in role.later.items():
        at = f"{where}: later steps of lane {lane!r}"
        if lane not in role.lanes:
            raise ProgramError(f"{at}: there is no such lane")
        for comm in comms:
            _validate_comm(at, comm)
            if _is_new(_ends(comm), ends):
                _validate_ends(at, program, comm, ranks)


def _validate_awaited(where: str, steps: StepColumns, labels: set[str]) -> None:
    """Raise where a step waits for a label that the role does not have."""
    if not labels.issuperset(chain.from_iterable(steps.after)):
        each = zip(steps.label, steps.after, strict=True)
        step, label = next((step, label) for step, after in each for label in after if label not in labels)
        raise ProgramError(f"{where}: step {step!r} waits for {label!r}, which does not exist")


def _is_new(key: T, seen: set[T]) -> bool:
    """Return whether ``key`` is not among those ``seen``, and add it to them."""
    is_new = key not in seen
    seen.add(key)
    return is_new


def _ends(comm: Comm) -> tuple[str, int | None]:
    """Return with whom a communication is: all of a group, or one peer."""
    return comm.axis, comm.peer if isinstance(comm, PointToPoint) else None


def _same_rules(op: Block | Comm | Batch) -> Hashable:
    """Return a key that operations share to which all rules apply alike."""
    if isinstance(op, Block):
        return id(op)  # one serves all micro-batches
    return op.alike if isinstance(op, Batch) else but_tag(op)


def _labels(where: str, role: Role) -> set[str]:
    """Return the labels of a role's steps, each of which must be there once."""
    labels = [label for columns in role.columns.values() for label in columns.label]
    distinct = set(labels)
    if len(distinct) != len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ProgramError(f"{where}: two steps are labelled {twice!r}")
    return distinct


def validate_op(where: str, lane: str, step: Step) -> None:
    """Raise `ProgramError` unless ``lane`` may run the operation of ``step``, whatever the ranks.

    Blocks hold kernels and collectives, one at least, and stand on the compute lane; batches hold transfers.
    """
    if isinstance(step.op, Block) and lane != COMPUTE_LANE:
        raise ProgramError(f"{where}: step {step.label!r} computes on lane {lane!r}, not {COMPUTE_LANE!r}")
    where = f"{where}: step {step.label!r}"
    match step.op:
        case Block():
            _validate_block(where, step.op)
        case Batch():
            for one in step.op.comms:
                if not isinstance(one, PointToPoint):
                    raise ProgramError(f"{where}: {one.op} {one.name!r} cannot be in a batch; a send or recv can")
        case Comm():
            pass
    for comm in {id(comm): comm for comm in comms_of(step.op)}.values():
        _validate_comm(where, comm)


def _validate_block(where: str, block: Block) -> None:
    if not block.ops:
        raise ProgramError(f"{where}: the block {block.name!r} has no ops; leave the step out")
    for op in {id(op): op for op in block.ops}.values():  # layers share their ops
        comm: Compute | Comm = op.comm if isinstance(op, Beside) else op
        if isinstance(comm, Comm) and not isinstance(comm, Collective):
            raise ProgramError(f"{where}: {comm.op} {comm.name!r} cannot be in a block; a collective can")
        if isinstance(op, Beside) and not op.kernels:
            raise ProgramError(f"{where}: {op.comm.name!r} must be beside one kernel or more")
        for compute in kernels_of(op):
            _validate_kernel(where, compute)


def validate_memory(where: str, step: Step) -> None:
    """Raise `ProgramError` where memory of ``step`` is not finite, or its workspace negative."""
    at = f"{where}: step {step.label!r}"
    for name, nbytes in (("alloc_bytes", step.alloc_bytes), ("free_bytes", step.free_bytes)):
        if not math.isfinite(nbytes):
            raise ProgramError(f"{at}: {name} is {nbytes:g}; it must be finite")
    validate_amount(at, "workspace_bytes", step.workspace_bytes)


def validate_amount(where: str, name: str, amount: float | tuple[float, ...]) -> None:
    """Raise `ProgramError` where ``amount``, or one of several, is negative or not finite."""
    for value in amount if isinstance(amount, tuple) else (amount,):
        if not 0 <= value < math.inf:
            raise ProgramError(f"{where}: {name} is {value:g}; it must be finite and at least 0")


def _validate_kernel(where: str, compute: Compute) -> None:
    for name in _AMOUNTS[type(compute.kernel)]:
        value = getattr(compute.kernel, name)
        if isinstance(value, tuple) or not 0 <= value < math.inf:  # few are; a text for each takes long
            validate_amount(f"{where}: kernel {compute.name!r}", name, value)


def _validate_comm(where: str, comm: Comm) -> None:
    kind = COMM_TYPES.get(comm.op)
    if kind is None:
        raise ProgramError(f"{where}: unknown operation '{comm.op}'")
    if type(comm) is not kind:
        raise ProgramError(f"{where}: {comm.op} is of type {kind.__name__}, not {type(comm).__name__}")
    names: tuple[str, ...] = ("nbytes",)
    if isinstance(comm, AllToAll):
        names = ("nbytes", "send_shares", "receive_shares", "per_node")
    elif isinstance(comm, RecordedWork):
        names = ("seconds",)
    for name in names:
        validate_amount(f"{where}: {comm.op} {comm.name!r}", name, getattr(comm, name))
    if isinstance(comm, PointToPoint) and comm.as_it_comes and comm.sends:
        raise ProgramError(f"{where}: {comm.op} cannot be posted as its bytes come; a recv can")
    purposes = AXES[_axis(where, comm.axis)].purposes
    if comm.purpose not in purposes:
        allowed = " or ".join(purposes)
        raise ProgramError(f"{where}: {comm.name!r} on axis '{comm.axis}' is for {allowed}, not '{comm.purpose}'")


def _axis(where: str, name: str) -> Axis:
    try:
        return axis_of(name)
    except KeyError:
        names = ", ".join(f"{axis}0" if facts.numbered else axis for axis, facts in AXES.items())
        raise ProgramError(f"{where}: unknown axis '{name}'; there are {names}") from None


def _validate_ends(where: str, program: Program, comm: Comm, ranks: Ints) -> None:
    """Raise unless every rank of a role is able to make the call."""
    groups = program.seated(comm.axis) if comm.axis in program.groups else None
    lonely = ranks if groups is None else ranks[groups.group_of[ranks] < 0]
    if groups is None or len(lonely):
        raise ProgramError(f"{where}: rank {lonely[0]} has no group on axis '{comm.axis}'")
    if not isinstance(comm, PointToPoint):
        return
    is_wrong = (groups.position_of[ranks] == comm.peer) | (groups.size[groups.group_of[ranks]] <= comm.peer)
    if comm.peer < 0 or is_wrong.any():
        rank = ranks[0 if comm.peer < 0 else is_wrong.argmax()]
        raise ProgramError(f"{where}: peer {comm.peer} of rank {rank} is not another member of its {comm.axis} group")
