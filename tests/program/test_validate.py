"""The rules of a program, one by one: what breaks them is refused, with the place in the message."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from simulator.costs import Costs
from simulator.engine import simulate
from simulator.program import (
    AXES,
    AllToAll,
    Attention,
    Batch,
    Beside,
    Block,
    Collective,
    Comm,
    Compute,
    Extension,
    Fixed,
    GroupedMatmul,
    Matmul,
    Memory,
    PointToPoint,
    Program,
    ProgramError,
    Role,
    Step,
    extended,
    validate,
)
from tests.support.clusters import nic_cluster

EVERY_AXIS = ", ".join(f"{axis}0" if facts.numbered else axis for axis, facts in AXES.items())
WORK = Block("work", (Compute("k", Fixed(1.0), "F"),))
REDUCE = Collective("sum", "all_reduce", 8.0, "tp", "tp")
SEND = PointToPoint("out", "send", 8.0, "pp", "pp", peer=1)
RECV = PointToPoint("in", "recv", 8.0, "pp", "pp", peer=0)


def role(name: str, *steps: Step, **lanes: tuple[Step, ...]) -> Role:
    return Role(name, {"compute": steps, **lanes})


#: Ranks 0 and 1 are a tp group of stage 0, ranks 2 and 3 of stage 1.
GOOD = Program(
    roles=(
        role("stage0", Step("work", WORK), Step("sum", REDUCE), pp=(Step("out", SEND, ("work",)),)),
        role("stage1", Step("sum", REDUCE), pp=(Step("in", RECV),)),
    ),
    role_of=(0, 0, 1, 1),
    groups={"tp": ((0, 1), (2, 3)), "pp": ((0, 2), (1, 3))},
    name="good",
)


def with_steps(*steps: Step, **lanes: tuple[Step, ...]) -> Program:
    """GOOD with other steps in the compute lane of its first role."""
    return replace(GOOD, roles=(role("stage0", *steps, **lanes), GOOD.roles[1]))


def with_comm(**changes: Any) -> Program:
    comm = replace(SEND if "peer" in changes or changes.get("op") in ("send", "recv") else REDUCE, **changes)
    return with_steps(Step("x", comm))


def test_a_good_program_is_silent_and_runs() -> None:
    """The network names every rank of these in the cases below, so that what they refuse is the one thing changed."""
    validate(GOOD)
    assert simulate(GOOD, nic_cluster(4), Costs.ideal()).step_time_s > 1.0


def with_later(**later: tuple[Comm, ...]) -> Program:
    """GOOD whose first role may get communication in extensions."""
    return replace(GOOD, roles=(replace(GOOD.roles[0], later=later), GOOD.roles[1]))


def test_a_program_that_grows_may_wait_for_what_comes() -> None:
    """A label that is not there, and a declared communication on a lane of the role."""
    validate(with_steps(Step("work", WORK, ("later",))), grows=True)
    validate(with_later(pp=(SEND,)))


BROKEN: list[tuple[str, Program, str]] = [
    ("role too large", replace(GOOD, role_of=(0, 0, 1, 2)), "good: role_of names a role that does not exist"),
    ("role negative", replace(GOOD, role_of=(0, 0, 1, -1)), "good: role_of names a role that does not exist"),
    (
        "two groups of an axis",
        replace(GOOD, groups={**GOOD.groups, "tp": ((0, 1), (1, 2, 3))}),
        "good: a rank stands in two groups of axis 'tp'",
    ),
    (
        "twice in a group",
        replace(GOOD, groups={**GOOD.groups, "tp": ((0, 1, 0), (2, 3))}),
        "good: a rank stands in two groups of axis 'tp'",
    ),
    (
        "a rank too large",
        replace(GOOD, groups={**GOOD.groups, "dp": ((0, 4),)}),
        "good: axis 'dp' names a rank outside 0..3",
    ),
    (
        "a rank below 0",
        replace(GOOD, groups={**GOOD.groups, "dp": ((-1, 0),)}),
        "good: axis 'dp' names a rank outside 0..3",
    ),
    (
        "equal labels in a lane",
        with_steps(Step("a", WORK), Step("a", WORK)),
        "good: role 'stage0': two steps are labelled 'a'",
    ),
    (
        "equal labels in two lanes",
        with_steps(Step("a", WORK), Step("b", WORK), other=(Step("b", WORK),)),
        "good: role 'stage0': two steps are labelled 'b'",
    ),
    (
        "waits for nothing known",
        with_steps(Step("a", WORK, ("b",))),
        "good: role 'stage0': step 'a' waits for 'b', which does not exist",
    ),
    (
        "waits for another rank's step",
        with_steps(Step("a", WORK, ("in",))),
        "good: role 'stage0': step 'a' waits for 'in', which does not exist",
    ),
    (
        "kernels beside the compute lane",
        with_steps(Step("a", WORK), other=(Step("b", WORK),)),
        "good: role 'stage0': step 'b' computes on lane 'other', not 'compute'",
    ),
    ("unknown operation", with_comm(op="sum"), "good: role 'stage0': step 'x': unknown operation 'sum'"),
    (
        "an axis without groups",
        with_comm(axis="ep", purpose="ep"),
        "good: role 'stage0': step 'x': rank 0 has no group on axis 'ep'",
    ),
    (
        "an axis of no kind",
        with_comm(axis="tpp"),
        f"good: role 'stage0': step 'x': unknown axis 'tpp'; there are {EVERY_AXIS}",
    ),
    (
        "one of several axes without its number",
        replace(GOOD, groups={**GOOD.groups, "copies": ((0, 1),)}),
        f"good: unknown axis 'copies'; there are {EVERY_AXIS}",
    ),
    (
        "a purpose that the axis does not serve",
        with_comm(purpose="dp"),
        "good: role 'stage0': step 'x': 'sum' on axis 'tp' is for tp, not 'dp'",
    ),
    (
        "a collective with another's name",
        with_comm(op="all_to_all"),
        "good: role 'stage0': step 'x': all_to_all is of type AllToAll, not Collective",
    ),
    (
        "a block of nothing",
        with_steps(Step("x", Block("b", ()))),
        "good: role 'stage0': step 'x': the block 'b' has no ops; leave the step out",
    ),
    (
        "a transfer in a block",
        with_steps(Step("x", Block("b", (SEND,)))),
        "good: role 'stage0': step 'x': send 'out' cannot be in a block; a collective can",
    ),
    (
        "a collective in a batch",
        with_steps(Step("x", Batch((REDUCE,)))),
        "good: role 'stage0': step 'x': all_reduce 'sum' cannot be in a batch; a send or recv can",
    ),
    (
        "a collective beside nothing",
        with_steps(Step("x", Block("b", (Beside(REDUCE, ()),)))),
        "good: role 'stage0': step 'x': 'sum' must be beside one kernel or more",
    ),
    (
        "a send that is posted when its bytes come",
        with_comm(peer=1, as_it_comes=True),
        "good: role 'stage0': step 'x': send cannot be posted as its bytes come; a recv can",
    ),
    (
        "no group of its own",
        replace(with_comm(axis="dp", purpose="dp"), groups={**GOOD.groups, "dp": ((2, 3),)}),
        "good: role 'stage0': step 'x': rank 0 has no group on axis 'dp'",
    ),
    (
        "no peer",
        with_comm(peer=-1),
        "good: role 'stage0': step 'x': peer -1 of rank 0 is not another member of its pp group",
    ),
    (
        "peer too large",
        with_comm(peer=2),
        "good: role 'stage0': step 'x': peer 2 of rank 0 is not another member of its pp group",
    ),
    (
        "peer itself",
        with_comm(peer=0),
        "good: role 'stage0': step 'x': peer 0 of rank 0 is not another member of its pp group",
    ),
    (
        "later on no lane",
        with_later(dp=(REDUCE,)),
        "good: role 'stage0': later steps of lane 'dp': there is no such lane",
    ),
    (
        "later for another purpose",
        with_later(compute=(replace(REDUCE, purpose="pp"),)),
        "good: role 'stage0': later steps of lane 'compute': 'sum' on axis 'tp' is for tp, not 'pp'",
    ),
    (
        "later with nobody",
        with_later(pp=(replace(SEND, peer=2),)),
        "good: role 'stage0': later steps of lane 'pp': peer 2 of rank 0 is not another member of its pp group",
    ),
]


NO_AMOUNTS = [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (-1.0, "-1")]


def wrong_amounts(value: float) -> list[tuple[str, Step]]:
    """Return (what a message names, a step that has ``value`` there) for each amount of a step."""
    uneven = AllToAll("moe", 8.0, "ep", "ep")
    kernels: list[tuple[str, Any]] = [
        ("seconds", Fixed(value)),
        ("flops", Fixed(1.0, flops=value)),
        ("bytes", Fixed(1.0, bytes=value)),
        *((name, replace(Memory("norm", 8.0, 8.0), **{name: value})) for name in ("read_bytes", "write_bytes")),
        ("flops", Memory("norm", 8.0, 8.0, value)),
        ("k", Matmul(8, 8, value)),  # type: ignore[arg-type]
        ("tokens", GroupedMatmul((8, value), 8, 8)),  # type: ignore[arg-type]
        ("kv_len", Attention(1, 8, 8, 64, value, 64)),  # type: ignore[arg-type]
    ]
    blocks = [(f"kernel 'k': {name}", Block("b", (Compute("k", kernel, "F"),))) for name, kernel in kernels]
    ops: list[tuple[str, Any]] = [
        *blocks,
        ("kernel 'k': seconds", Block("b", (Beside(REDUCE, (Compute("k", Fixed(value), "F"),)),))),
        ("all_reduce 'sum': nbytes", replace(REDUCE, nbytes=value)),
        ("all_reduce 'sum': nbytes", Block("b", (replace(REDUCE, nbytes=value),))),
        ("send 'out': nbytes", Batch((replace(SEND, nbytes=value),))),
        ("all_to_all 'moe': send_shares", replace(uneven, send_shares=(0.5, value))),
        ("all_to_all 'moe': receive_shares", replace(uneven, receive_shares=(0.5, value))),
        ("all_to_all 'moe': per_node", replace(uneven, per_node=value)),
    ]
    return [*((name, Step("x", op)) for name, op in ops), ("workspace_bytes", Step("x", WORK, workspace_bytes=value))]


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize(("value", "shown"), NO_AMOUNTS)
def test_amounts_are_finite_and_not_negative(value: float, shown: str, grows: bool) -> None:
    """Amounts of kernels, communication and workspaces, in a program and in what extends it."""
    for name, step in wrong_amounts(value):
        message = f"good: role 'stage0': step 'x': {name} is {shown}; it must be finite and at least 0"
        with pytest.raises(ProgramError) as caught:
            validate(with_steps(Step("y", WORK), step), grows=grows)
        assert str(caught.value) == message
        with pytest.raises(ProgramError) as caught:
            extended(GOOD, Extension({0: {"compute": (Step("y", WORK), step)}}))
        assert str(caught.value) == message
    with pytest.raises(ProgramError, match=f"later steps of lane 'pp': send 'out': nbytes is {shown}; it must"):
        validate(with_later(pp=(replace(SEND, nbytes=value),)), grows=grows)
    with pytest.raises(ProgramError, match=f"good: an extension: release_s is {shown}; it must"):
        extended(GOOD, Extension({}, release_s=value))


@pytest.mark.parametrize("name", ["alloc_bytes", "free_bytes"])
def test_memory_is_finite_and_may_be_the_net_of_both(name: str) -> None:
    """A step that gives back less than it leaves frees a negative amount."""
    validate(with_steps(Step("x", WORK, **{name: -8.0})))
    for value in (math.nan, math.inf, -math.inf):
        for grows in (False, True):
            with pytest.raises(ProgramError, match=f"good: role 'stage0': step 'x': {name} is {value:g}; it must be f"):
                validate(with_steps(Step("x", WORK, **{name: value})), grows=grows)
        with pytest.raises(ProgramError, match=f"step 'x': {name} is {value:g}"):
            extended(GOOD, Extension({0: {"compute": (Step("x", WORK, **{name: value}),)}}))


def test_steps_of_a_generator_are_kept() -> None:
    """Whoever reads a role or an extension a second time meets the same steps."""
    growing = Role("r", {"compute": (Step(label, WORK) for label in "ab")}, {"tp": (comm for comm in [REDUCE])})
    assert [[step.label for _, _, step in growing.steps()] for _ in range(2)] == [["a", "b"]] * 2
    assert growing.later == {"tp": (REDUCE,)}
    extension = Extension({0: {"compute": (Step(label, WORK) for label in "ab")}})
    assert [[step.label for step in extension.steps(0, "compute")] for _ in range(2)] == [["a", "b"]] * 2


@pytest.mark.parametrize(("program", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_every_rule(program: Program, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        validate(program)
    assert str(caught.value) == message


@pytest.mark.parametrize(("program", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_the_engine_validates_before_it_plays(program: Program, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        simulate(program, nic_cluster(4), Costs.ideal())
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("wrap", "comm"),
    [
        (lambda comm: Block("b", (comm,)), REDUCE),
        (lambda comm: Block("b", (Beside(comm, WORK.ops),)), REDUCE),
        (lambda comm: Batch((comm,)), SEND),
        (lambda comm: comm, REDUCE),
    ],
    ids=["in a block", "beside kernels", "in a batch", "alone"],
)
def test_communication_is_found_wherever_it_stands(wrap: Any, comm: Comm) -> None:
    validate(with_steps(Step("x", wrap(comm))))
    with pytest.raises(ProgramError, match="step 'x': unknown operation 'sum'"):
        validate(with_steps(Step("x", wrap(replace(comm, op="sum")))))


def test_a_role_that_nobody_plays_may_be_anything() -> None:
    """It has no rank whose groups could be looked up."""
    validate(replace(GOOD, roles=(*GOOD.roles, role("unused", Step("x", replace(REDUCE, axis="ep", purpose="ep"))))))


def test_steps_of_a_lane_may_wait_for_later_ones() -> None:
    """Whether the program then goes on is for the clock to say: a deadlock is no ill-formed program."""
    validate(with_steps(Step("a", WORK, ("b",)), Step("b", WORK)))


UNEVEN = [
    pytest.param(
        replace(with_steps(Step("x", REDUCE)), groups={"tp": ((0,),), "pp": GOOD.groups["pp"]}),
        "rank 1 has no group on axis 'tp'",
        id="no group of the second rank",
    ),
    pytest.param(
        replace(with_steps(Step("x", SEND)), groups={"tp": GOOD.groups["tp"], "pp": ((0, 2), (3, 1))}),
        "peer 1 of rank 1 is not another member of its pp group",
        id="another place in the group of the second rank",
    ),
]


@pytest.mark.parametrize(("program", "reason"), UNEVEN)
def test_every_rank_of_a_role_is_held_to_its_rules(program: Program, reason: str) -> None:
    """Ranks 0 and 1 play one role; what is right for rank 0 is not for rank 1."""
    with pytest.raises(ProgramError, match=reason):
        validate(program)


def test_a_changed_copy_has_groups_of_its_own() -> None:
    """What a program remembers of its groups does not pass to a copy with other groups."""
    validate(GOOD)
    swapped = replace(GOOD, groups={"tp": ((2, 3), (0, 1)), "pp": GOOD.groups["pp"]})
    assert [swapped.group_index("tp", rank) for rank in range(4)] == [1, 1, 0, 0]
    assert [GOOD.group_index("tp", rank) for rank in range(4)] == [0, 0, 1, 1]
    assert GOOD.group_index("pp", 3) == 1


@pytest.mark.parametrize("rank", [-1, -4, 4, 1000])
def test_a_rank_outside_of_the_program_is_in_no_group(rank: int) -> None:
    """Ranks are 0 to 3 here; a negative number does not count from the end."""
    assert GOOD.group_index("tp", rank) == -1


MICRO_BATCHES = [(8.0, "0F0"), (8.0, "0F1"), (9.0, "0F2")]


def test_transfers_that_differ_in_their_tags_alone_come_once_of_a_role() -> None:
    """Two sends of micro-batches are one, a send of more bytes is another, and so is one on another lane."""
    steps = [Step(tag, PointToPoint("send", "send", nbytes, "pp", "pp", 1, tag)) for nbytes, tag in MICRO_BATCHES]
    lanes = {lane: [replace(step, label=f"{lane} {step.label}") for step in steps] for lane in ("one", "two")}
    assert [(lane, comm.nbytes) for lane, comm in Role("sends", lanes).comms] == [
        ("one", 8.0),
        ("one", 9.0),
        ("two", 8.0),
        ("two", 9.0),
    ]


def test_a_transfer_is_checked_however_many_like_it_were_sound() -> None:
    """The third one alone names a peer that is not there."""
    peers = (1, 1, 2)
    steps = [Step(f"s{n}", PointToPoint("send", "send", 8.0, "pp", "pp", peer, f"{n}")) for n, peer in enumerate(peers)]
    program = Program((Role("a", {"pp": steps}), Role("b", {})), (0, 1), {"pp": ((0, 1),)})
    with pytest.raises(ProgramError, match="step 's2': peer 2"):
        validate(program)
