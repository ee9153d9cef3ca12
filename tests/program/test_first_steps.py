"""Rules are checked once for each operation, at its first step, in the order of the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from simulator.program import Block, Compute, Fixed, Program, ProgramError, Role, Step, StepPhase, validate


class CountedSteps(tuple[Step, ...]):
    """Steps that count how many of them have been looked at."""

    looked_at = 0

    def __iter__(self) -> Iterator[Step]:
        for step in super().__iter__():
            self.looked_at += 1
            yield step


def looked_at(n_steps: int) -> int:
    """Return how often the check looks at one of so many steps, each of which has a block of its own."""
    steps = CountedSteps(
        Step(f"{n}", Block(f"{n}", (Compute("k", Fixed(1.0), StepPhase.FORWARD),))) for n in range(n_steps)
    )
    role = Role("all", {"compute": steps})
    columns = role.columns["compute"]
    prototypes = CountedSteps(columns.prototypes)
    vars(role)["columns"] = {"compute": replace(columns, prototypes=prototypes)}  # where a role keeps its columns
    validate(Program((role,), (0,), {}))
    return steps.looked_at + prototypes.looked_at


def test_twice_as_many_operations_are_twice_as_many_looks() -> None:
    """A search through the steps for each operation would look at four times as many."""
    assert 0 < looked_at(200) == 2 * looked_at(100)


def test_of_two_faults_the_first_is_told() -> None:
    """Both steps free or allocate what is no number of bytes, each in another way."""
    work = Block("work", (Compute("k", Fixed(1.0), StepPhase.FORWARD),))
    steps = (Step("first", work, alloc_bytes=float("inf")), Step("second", work, free_bytes=float("inf")))
    with pytest.raises(ProgramError, match="step 'first': alloc_bytes"):
        validate(Program((Role("all", {"compute": steps}),), (0,), {}))


def test_operations_of_a_lane_are_in_the_order_of_their_first_steps() -> None:
    """The first block is run again behind the second."""
    one, two = (Block(name, (Compute("k", Fixed(1.0), StepPhase.FORWARD),)) for name in ("one", "two"))
    role = Role("all", {"compute": (Step("a", one), Step("b", two), Step("c", one)), "tp": ()})
    assert {lane: [step.label for step in steps] for lane, steps in role.operations.items()} == {
        "compute": ["a", "b"],
        "tp": [],
    }
