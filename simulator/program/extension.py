"""Extensions of a program: further steps, which may come while it is played."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from simulator.program.ops import Comm, comms_of
from simulator.program.program import Program, Role
from simulator.program.step import Step
from simulator.program.validation import ProgramError, validate_amount, validate_memory, validate_op


@dataclass(frozen=True)
class Extension:
    """Further steps of a program: index of a role -> lane name -> steps. Every rank of the role gets the same.

    ``release_s`` is the release time of scheduling theory: before it no host issues anything of the extension, and no
    lane begins with it. An extension that is released at 0 has been known to hosts from the beginning.
    LaneSteps may come as any iterable, and are kept as tuples.
    """

    lanes: Mapping[int, Mapping[str, tuple[Step, ...]]]
    release_s: float = 0.0

    def __post_init__(self) -> None:
        lanes = {
            number: {lane: tuple(steps) for lane, steps in lanes_of_role.items()}
            for number, lanes_of_role in self.lanes.items()
        }
        object.__setattr__(self, "lanes", lanes)

    @property
    def is_empty(self) -> bool:
        """True where no lane gets a step."""
        return not any(steps for lanes in self.lanes.values() for steps in lanes.values())

    def steps(self, role: int, lane: str) -> tuple[Step, ...]:
        """Return the steps that a lane of a role gets."""
        return self.lanes.get(role, {}).get(lane, ())


def extended(program: Program, *extensions: Extension) -> Program:
    """Return ``program`` with the steps of ``extensions`` behind its own, one extension after another.

    Raises `ProgramError` where an extension names an unknown role or lane, or repeats a label of its role.
    """
    labels = {number: {step.label for _, _, step in role.steps()} for number, role in enumerate(program.roles)}
    for extension in extensions:
        validate_extension(program, extension, labels)

    def lanes(number: int, role: Role) -> dict[str, tuple[Step, ...]]:
        return {
            lane: (*steps, *(step for extension in extensions for step in extension.steps(number, lane)))
            for lane, steps in role.lanes.items()
        }

    roles = tuple(replace(role, lanes=lanes(number, role)) for number, role in enumerate(program.roles))
    return replace(program, roles=roles)


def expecting(program: Program, *samples: Extension) -> Program:
    """Return ``program`` with the communication of ``samples`` declared in its roles (`Role.later`).

    Raises `ProgramError` where a sample names an unknown role or lane.
    """
    for sample in samples:
        _validate_lanes(program, sample)

    def role_expecting(number: int, role: Role) -> Role:
        later: dict[str, dict[Comm, None]] = {lane: dict.fromkeys(comms) for lane, comms in role.later.items()}
        for sample in samples:
            for lane, steps in sample.lanes.get(number, {}).items():
                for op in {id(step.op): step.op for step in steps}.values():
                    later.setdefault(lane, {}).update(dict.fromkeys(comms_of(op)))
        return replace(role, later={lane: tuple(comms) for lane, comms in later.items() if comms})

    return replace(program, roles=tuple(role_expecting(number, role) for number, role in enumerate(program.roles)))


def validate_extension(program: Program, extension: Extension, labels: Mapping[int, set[str]]) -> None:
    """Raise `ProgramError` where ``extension`` cannot follow ``program`` and the extensions before it.

    ``labels``: index of a role -> labels of its steps so far, to which those of the extension are added. A step may
    wait for one of a later extension.
    """
    _validate_lanes(program, extension)
    validate_amount(f"{program.name}: an extension", "release_s", extension.release_s)
    for number, lanes in extension.lanes.items():
        where = f"{program.name}: role {program.roles[number].name!r}"
        for lane, steps in lanes.items():
            for step in steps:
                if step.label in labels[number]:
                    raise ProgramError(f"{where}: two steps are labelled {step.label!r}")
                labels[number].add(step.label)
                validate_memory(where, step)
            for step in {id(step.op): step for step in steps}.values():
                validate_op(where, lane, step)


def _validate_lanes(program: Program, extension: Extension) -> None:
    """Raise `ProgramError` where ``extension`` names a role that no rank plays, or a lane that its role has not."""
    for number, lanes in extension.lanes.items():
        if number not in program.role_of:
            played = ", ".join(str(role) for role in sorted(set(program.role_of)))
            raise ProgramError(f"{program.name}: an extension is for role {number}; ranks play {played}")
        role = program.roles[number]
        for lane in lanes:
            if lane not in role.lanes:
                raise ProgramError(
                    f"{program.name}: role {role.name!r}: an extension has steps for lane {lane!r}; its lanes are "
                    f"{', '.join(role.lanes)}. Give the role that lane, empty where nothing is on it yet"
                )
