"""What is refused of programs that are extended while the clock runs, and what sources may do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from simpy.core import EmptySchedule, StopSimulation

from simulator.engine import StepSource
from simulator.engine.growth import MOST_AT_ONCE
from simulator.errors import DeadlockError
from simulator.program import (
    Extension,
    Program,
    ProgramError,
    Purpose,
    Role,
    Step,
    expecting,
    extended,
)
from tests.support.engines import ENGINES, each_engine  # noqa: F401
from tests.support.growing import in_order
from tests.support.grown_programs import REDUCTION, grow, kernel, one_role, spans

pytestmark = pytest.mark.usefixtures("each_engine")


# What is refused.


def refused(extension: Extension, lanes: dict[str, tuple[Step, ...]] | None = None) -> str:
    beginning = one_role(lanes or {"compute": (kernel("a", 1.0),), "dp": ()}, 2, dp=(REDUCTION,))
    with pytest.raises(ProgramError) as error:
        grow(beginning, in_order([extension]))
    return str(error.value)


def test_communication_that_was_not_declared_is_refused() -> None:
    """The sentence says where to declare it."""
    other = replace(REDUCTION, nbytes=2e9)
    message = refused(Extension({0: {"dp": (Step("r", REDUCTION), Step("s", other))}}))
    assert "step 's' on lane 'dp' has all_reduce 'r' of 2000000000 bytes on axis 'dp'" in message
    assert "Name it in Role.later['dp']" in message


def test_communication_is_declared_for_its_lane() -> None:
    """Collectives that nothing can delay are told by the lanes that communicate."""
    assert "Name it in Role.later['compute']" in refused(Extension({0: {"compute": (Step("r", REDUCTION),)}}))


def test_names_and_purposes_need_no_declaration() -> None:
    """The network carries the same bytes, whatever they are called."""
    beginning = one_role({"compute": (), "dp": ()}, 2, dp=(REDUCTION,))
    renamed = replace(REDUCTION, name="norm", purpose=Purpose.OPTIMIZER)
    played = grow(beginning, in_order([Extension({0: {"dp": (Step("n", renamed),)}})]))
    assert set(spans(played)) == {"n"}


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        ({1: {}}, "an extension is for role 1; ranks play 0"),
        ({0: {"pp": ()}}, "an extension has steps for lane 'pp'; its lanes are compute, dp"),
        ({0: {"compute": (kernel("a", 1.0),)}}, "two steps are labelled 'a'"),
        ({0: {"compute": (kernel("b", 1.0), kernel("b", 1.0))}}, "two steps are labelled 'b'"),
        ({0: {"dp": (kernel("b", 1.0),)}}, "step 'b' computes on lane 'dp'"),
        ({0: {"compute": ()}}, "an extension without steps, asked for at 1 s, is released at 0 s"),
    ],
)
def test_what_cannot_be_played_is_refused(lanes: Any, message: str) -> None:
    assert message in refused(Extension(lanes))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_amounts_that_come_are_checked(seconds: float) -> None:
    """A kernel's length and a release, before SimPy meets them."""
    assert f"step 'b': kernel 'b': seconds is {seconds:g};" in refused(
        Extension({0: {"compute": (kernel("b", seconds),)}})
    )
    assert f"an extension: release_s is {seconds:g};" in refused(Extension({0: {"compute": ()}}, seconds))


def test_a_source_returns_extensions() -> None:
    with pytest.raises(ProgramError, match="program: the source returned a str at 0 s; it must return an Extension"):
        grow(one_role({"compute": ()}), lambda: lambda _: "more")  # type: ignore[arg-type, return-value]


def test_more_returns_a_source() -> None:
    """A list of extensions is none."""
    with pytest.raises(ProgramError, match=r"program: more\(\) returned a list; it must return a source"):
        grow(one_role({"compute": ()}), list)


def test_samples_are_of_the_programs_roles_and_lanes() -> None:
    beginning = one_role({"compute": ()}, 2)
    for lanes, message in (
        ({1: {}}, "program: an extension is for role 1; ranks play 0"),
        ({0: {"dp": (Step("r", REDUCTION),)}}, "an extension has steps for lane 'dp'; its lanes are compute."),
    ):
        with pytest.raises(ProgramError, match=message):
            expecting(beginning, Extension(lanes))


def test_labels_are_of_a_role() -> None:
    """Two roles may each have a step of one label, in one extension or in several."""
    roles = tuple(Role(name, {"compute": ()}) for name in "ab")
    both = Program(roles, (0, 1), {})
    same = Extension({0: {"compute": (kernel("x", 1.0),)}, 1: {"compute": (kernel("x", 2.0),)}})
    played = grow(both, in_order([same]))
    assert [spans(played, rank)["x"] for rank in (0, 1)] == [(0.0, 1.0), (0.0, 2.0)]


def test_a_step_may_wait_for_one_that_comes_later() -> None:
    """The reduction waits for a kernel of the next extension, which ends at 2 s."""
    beginning = one_role({"compute": (kernel("a", 1.0),), "dp": (Step("r", REDUCTION, ("b",)),)}, 2)
    played = grow(beginning, in_order([Extension({0: {"compute": (kernel("b", 1.0),)}})]))
    assert spans(played)["r"][0] == pytest.approx(2.0)


def test_a_label_that_never_comes_is_told() -> None:
    beginning = one_role({"compute": (kernel("a", 1.0),), "dp": (Step("r", REDUCTION, ("b",)),)}, 2)
    with pytest.raises(DeadlockError) as error:
        grow(beginning, in_order([]), fold=False)
    lines = str(error.value).splitlines()
    assert lines[1] == "  rank 0, lane dp, step r: waits for step b of the same rank, which never came"
    assert len(lines) == 3


def test_lanes_that_wait_for_an_extension_are_told() -> None:
    """No extension is asked for, as no lane runs its steps to the end. The compute lane has none and waits for some."""
    beginning = one_role({"compute": (), "dp": (Step("r", REDUCTION, ("b",)),)}, 2)
    with pytest.raises(DeadlockError) as error:
        grow(beginning, in_order([Extension({0: {"compute": (kernel("b", 1.0),)}})]))
    assert (
        "rank 0, lane compute: waits for an extension of the program, asked for when a lane has run its steps of the "
        "last one"
    ) in str(error.value)


# Sources without an end.


def endless(seconds: float, asked: list[float]) -> Callable[[], StepSource]:
    def source(now_s: float) -> Extension:
        asked.append(now_s)
        return Extension({0: {"compute": (kernel(str(len(asked)), seconds),)}})

    return lambda: source


def test_a_source_that_lets_no_time_pass_is_stopped() -> None:
    asked: list[float] = []
    with pytest.raises(ProgramError, match=f"{MOST_AT_ONCE} extensions came at 0 s, and the clock stands still"):
        grow(one_role({"compute": ()}), endless(0.0, asked))
    assert len(asked) == MOST_AT_ONCE + 1


@pytest.mark.parametrize(
    "stop", [KeyboardInterrupt(), TimeoutError("five seconds are enough"), EmptySchedule(), StopSimulation()]
)
def test_what_a_source_raises_ends_the_play(stop: BaseException) -> None:
    """An interrupt of the user, a bound that a source sets itself, or what SimPy ends its own run by."""
    asked: list[float] = []
    source = endless(1.0, asked)()

    def until_5_s(now_s: float) -> Extension | None:
        if now_s >= 5:
            raise stop
        return source(now_s)

    with pytest.raises(type(stop)) as error:
        grow(one_role({"compute": ()}), lambda: until_5_s)
    assert error.value is stop
    assert asked == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_source_is_begun_anew_for_every_play() -> None:
    """The same program twice, from one factory: it keeps nothing from the play before."""
    more = in_order([Extension({0: {"compute": (kernel("b", 1.0),)}})])
    beginning = one_role({"compute": (kernel("a", 1.0),)})
    first, second = (grow(beginning, more) for _ in range(2))
    assert spans(first) == spans(second) == {"a": (0.0, 1.0), "b": (1.0, 2.0)}


# Without a clock.


def test_a_program_is_extended_in_order() -> None:
    beginning = one_role({"compute": (kernel("a", 1.0),), "dp": ()}, 2)
    extensions: Sequence[Extension] = [
        Extension({0: {"compute": (kernel("b", 1.0),), "dp": (Step("r", REDUCTION, ("b",)),)}}),
        Extension({0: {"compute": (kernel("c", 1.0),)}}),
    ]
    longer = extended(beginning, *extensions)
    assert [(lane, step.label) for lane, _, step in longer.roles[0].steps()] == [
        ("compute", "a"),
        ("compute", "b"),
        ("compute", "c"),
        ("dp", "r"),
    ]
    assert longer == extended(extended(beginning, extensions[0]), extensions[1])
    assert [step.label for _, _, step in beginning.roles[0].steps()] == ["a"]
    with pytest.raises(ProgramError, match="two steps are labelled 'b'"):
        extended(longer, extensions[0])


def test_samples_declare_each_communication_once() -> None:
    beginning = one_role({"compute": (), "dp": ()}, 2)
    sample = Extension({0: {"dp": (Step("r", REDUCTION), Step("s", REDUCTION))}})
    assert expecting(beginning, sample, sample).roles[0].later == {"dp": (REDUCTION,)}
