"""Programs cut into a beginning and extensions, so that they can be played as they grow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from simulator.engine import StepSource
from simulator.program import Extension, Program, Role, Step, expecting
from simulator.timeline import Timeline

#: Index of a role, lane and step -> number of the piece in which the step comes; it never falls along a lane.
PieceOf = Callable[[int, str, Step], int]


def cut(program: Program, piece_of: PieceOf) -> tuple[Program, list[Extension]]:
    """Return the piece 0 of ``program``, which declares the communication of the others, and the others in order."""
    numbers = {piece_of(role, lane, step) for role, one in enumerate(program.roles) for lane, _, step in one.steps()}

    def lanes(role: int, number: int) -> dict[str, tuple[Step, ...]]:
        return {
            lane: tuple(step for step in steps if piece_of(role, lane, step) == number)
            for lane, steps in program.roles[role].lanes.items()
        }

    roles = range(len(program.roles))
    extensions = [Extension({role: lanes(role, number) for role in roles}) for number in range(1, max(numbers) + 1)]
    beginning = replace(program, roles=tuple(Role(program.roles[role].name, lanes(role, 0)) for role in roles))
    return expecting(beginning, *extensions), extensions


def by_step(role: int, lane: str, step: Step) -> int:
    """Return the training step that ``step`` belongs to, by the suffix of its label (`lowering.steps.repeated`)."""
    return int(step.label.partition("@")[2] or 0)


def by_start(program: Program, timeline: Timeline, pieces: int) -> PieceOf:
    """Cut at equal times of ``timeline``: a step is in the piece in which its lane comes to it."""
    posted: dict[tuple[int, str], float] = {}
    for rank, label, posted_s in zip(timeline.rank.tolist(), timeline.labels, timeline.posted_s.tolist(), strict=True):
        key = program.role_of[rank], label
        posted[key] = min(posted.get(key, posted_s), posted_s)

    def piece_of(role: int, lane: str, step: Step) -> int:
        return min(int(pieces * posted[role, step.label] / timeline.length_s), pieces - 1)

    return piece_of


def in_order(extensions: Iterable[Extension]) -> Callable[[], StepSource]:
    """Return what begins to extend a program by ``extensions``, one after another."""
    extensions = list(extensions)

    def more() -> StepSource:
        left = iter(extensions)
        return lambda now_s: next(left, None)

    return more


def assert_same(whole: Timeline, grown: Timeline) -> None:
    """Every op of every simulated rank is on the same lane, and begins and ends when it does in the other Timeline."""
    assert grown.ranks_like == whole.ranks_like
    assert grown.clocks_hz == whole.clocks_hz
    order = ["rank", "lane", "start_s", "end_s", "name"]
    first, second = (
        timeline.frame().sort_values(order, kind="stable", ignore_index=True) for timeline in (whole, grown)
    )
    for column in ("rank", "lane", "name", "kind", "phase", "stage", "microbatch", "nbytes"):
        assert list(first[column]) == list(second[column])
    for column in ("start_s", "end_s"):
        assert np.abs(first[column] - second[column]).max() <= 1e-9 * whole.length_s
    carried = {(link.name, purpose): nbytes for link in grown.links for purpose, nbytes in link.by_purpose.items()}
    expected = {(link.name, purpose): nbytes for link in whole.links for purpose, nbytes in link.by_purpose.items()}
    assert carried.keys() == expected.keys()
    assert all(abs(carried[key] - nbytes) <= 1e-9 * nbytes for key, nbytes in expected.items())
