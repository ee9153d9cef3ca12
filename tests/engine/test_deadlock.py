"""Programs that cannot go on: they end with a report of who waits for whom, and never hang."""

from __future__ import annotations

import pytest

from simulator.costs import Costs
from simulator.engine import simulate
from simulator.errors import DeadlockError
from simulator.lowering.lanes import Lanes
from simulator.lowering.pipeline import lower
from simulator.program import Batch, Block, Compute, Fixed, Program, ProgramError, Role, Step, from_text
from simulator.schedules import SCHEDULES
from simulator.timeline import Timeline
from tests.support.clusters import HOP_s, NIC_Bps, nic_cluster
from tests.support.engines import each_engine  # noqa: F401

pytestmark = pytest.mark.usefixtures("each_engine")

EXCHANGE = """
program name=exchange
role left ranks=0
  lane pp
{left}
role right ranks=1
  lane pp
{right}
group pp 0,1
"""
SEND = """\
    step send
      comm {name} send nbytes=1e9 axis=pp purpose=pp peer={peer} tag={name}
"""
RECV = """\
    step recv
      comm {name} recv nbytes=1e9 axis=pp purpose=pp peer={peer} tag={name}
"""
BATCH = """\
    step both batch=2
      comm {out} send nbytes=1e9 axis=pp purpose=pp peer={peer} tag={out}
      comm {back} recv nbytes=1e9 axis=pp purpose=pp peer={peer} tag={back}
"""


def play(text: str, *, fold: bool = True) -> Timeline:
    program = from_text(text)
    return simulate(program, nic_cluster(program.n_ranks), Costs.ideal(), fold=fold)


def stuck(text: str) -> str:
    """The report of a program that deadlocks, the same with folding and without where no rank stands for another."""
    reports = []
    for fold in (True, False):
        with pytest.raises(DeadlockError) as caught:
            play(text, fold=fold)
        reports.append(str(caught.value))
    assert reports[0] == reports[1]
    return reports[0]


def test_two_ranks_that_both_send_first_wait_for_each_other() -> None:
    """A blocking send lasts until it is received; both receives come after."""
    left = SEND.format(name="x", peer=1) + RECV.format(name="y", peer=1)
    right = SEND.format(name="y", peer=0) + RECV.format(name="x", peer=0)
    assert stuck(EXCHANGE.format(left=left, right=right)).splitlines() == [
        "deadlock: 2 rank(s) cannot go on",
        "  rank 0, lane pp, step send: waits for rank 1 to call the other side of send 'x' x",
        "  rank 1, lane pp, step send: waits for rank 0 to call the other side of send 'y' y",
    ]


@pytest.mark.parametrize("order", ["batched", "one receives first"])
def test_the_same_exchange_runs_where_somebody_listens(order: str) -> None:
    """Batched, both directions start at once and end together, each on its own direction of the NIC; with one rank
    receiving first, one after the other."""
    transfer = HOP_s + 1e9 / NIC_Bps
    if order == "batched":
        left, right = BATCH.format(out="x", back="y", peer=1), BATCH.format(out="y", back="x", peer=0)
        expected = transfer
    else:
        left = SEND.format(name="x", peer=1) + RECV.format(name="y", peer=1)
        right = RECV.format(name="x", peer=0) + SEND.format(name="y", peer=0)
        expected = 2 * transfer
    for fold in (True, False):
        timeline = play(EXCHANGE.format(left=left, right=right), fold=fold)
        assert timeline.step_time_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_ring_of_blocking_sends(n: int) -> None:
    """Everybody sends to the next and then receives from the one before: all wait. One rank that receives first lets
    the others finish one after another, n transfers long."""

    def program(first_receives: bool) -> str:
        lines = ["program name=ring"]
        for rank in range(n):
            send = SEND.format(name=f"m{rank}", peer=(rank + 1) % n)
            recv = RECV.format(name=f"m{(rank - 1) % n}", peer=(rank - 1) % n)
            lines += [f"role r{rank} ranks={rank}", "  lane pp"]
            lines.append(recv + send if first_receives and rank == 0 else send + recv)
        return "\n".join([*lines, f"group pp {','.join(map(str, range(n)))}"])

    report = stuck(program(False))
    for rank in range(n):
        assert f"rank {rank}, lane pp, step send: waits for rank {(rank + 1) % n} " in report
    # Rank n-1 sends to rank 0 at once, rank n-2 to it when that is done, and so on.
    assert play(program(True)).step_time_s == pytest.approx(n * (HOP_s + 1), rel=1e-9)


CYCLE = """
program name=cycle
block 0 name=work
  compute k F fixed seconds=1.0
role all ranks=0-1
  lane compute
    step before block=0
    step x block=0 after={x}
  lane dp
    step y after={y}
      comm sum all_reduce nbytes=1e9 axis=dp purpose=dp algorithm=ring
group dp 0,1
"""


@pytest.mark.parametrize("fold", [True, False])
def test_after_edges_that_run_in_a_circle(fold: bool) -> None:
    """x waits for y, y for x; what stands before them has run. A rank's lanes stand in the order in which they stopped.
    The same program without the circle: a kernel, an all-reduce of two hops, a kernel."""
    with pytest.raises(DeadlockError) as caught:
        play(CYCLE.format(x="y", y="x"), fold=fold)
    lines = [
        f"  rank {rank}, lane {lane}, step {step}: waits for step {other} of the same rank, which has not ended"
        for rank in ((0,) if fold else (0, 1))
        for lane, step, other in (("dp", "y", "x"), ("compute", "x", "y"))
    ]
    assert str(caught.value).splitlines() == [f"deadlock: {1 if fold else 2} rank(s) cannot go on", *lines]
    timeline = play(CYCLE.format(x="y", y="before"), fold=fold)
    assert timeline.step_time_s == pytest.approx(1 + 2 * HOP_s + 1 + 1, rel=1e-9)


SELF = """
program name=self
block 0 name=work
  compute k F fixed seconds=1.0
role all ranks=0
  lane compute
    step before block=0
    step x block=0 after={waited}
    step later block=0
"""


@pytest.mark.parametrize("waited", ["x", "later"])
def test_a_step_that_waits_for_itself_or_for_a_later_one_of_its_lane(waited: str) -> None:
    assert stuck(SELF.format(waited=waited)).splitlines() == [
        "deadlock: 1 rank(s) cannot go on",
        f"  rank 0, lane compute, step x: waits for step {waited} of the same rank, which has not ended",
    ]
    assert play(SELF.format(waited="before")).step_time_s == 3.0


ABSENT = """
program name=absent
role all ranks=0-1
  lane dp
    step reduce
      comm grads all_reduce nbytes=8 axis=dp purpose=dp
role most ranks=2
  lane dp
role late ranks=3
  lane dp
    step first
      comm grads all_reduce nbytes=8 axis=dp purpose=dp
    step second
      comm again all_reduce nbytes=8 axis=dp purpose=dp
group dp 0,1,2
group dp 3,4
role last ranks=4
  lane dp
    step first
      comm grads all_reduce nbytes=8 axis=dp purpose=dp
"""


def test_a_collective_that_a_member_never_calls() -> None:
    """Rank 2 does not reduce, so ranks 0 and 1 wait for it; rank 4 reduces once, so rank 3 waits the second time."""
    with pytest.raises(DeadlockError) as caught:
        play(ABSENT, fold=False)
    assert str(caught.value).splitlines() == [
        "deadlock: 3 rank(s) cannot go on",
        "  rank 0, lane dp, step reduce: waits for rank 2 to call the other side of all_reduce 'grads'",
        "  rank 1, lane dp, step reduce: waits for rank 2 to call the other side of all_reduce 'grads'",
        "  rank 3, lane dp, step second: waits for rank 4 to call the other side of all_reduce 'again'",
    ]
    with pytest.raises(DeadlockError, match="rank 3, lane dp, step second: waits for rank 4 "):
        play(ABSENT, fold=True)


def test_a_collective_in_a_block_that_a_member_never_calls() -> None:
    """In-line collectives wait as others do; the report names the step that they stand in."""
    text = """
program name=inline
block 0 name=layer
  compute k F fixed seconds=1.0
  comm sum all_reduce nbytes=8 axis=tp purpose=tp
role one ranks=0
  lane compute
    step 0F0 block=0 phase=F
role other ranks=1
  lane compute
group tp 0,1
"""
    assert stuck(text).splitlines() == [
        "deadlock: 1 rank(s) cannot go on",
        "  rank 0, lane compute, step 0F0: waits for rank 1 to call the other side of all_reduce 'sum'",
    ]


def test_a_long_report_is_cut() -> None:
    """40 ranks that receive what nobody sends: 16 lines, and how many more there are."""
    lines = ["program name=many"]
    for rank in range(1, 41):
        lines += [f"role r{rank} ranks={rank}", "  lane pp", RECV.format(name=f"m{rank}", peer=0)]
    lines += ["role silent ranks=0", "  lane pp", f"group pp {','.join(map(str, range(41)))}"]
    report = stuck("\n".join(lines)).splitlines()
    assert report[0] == "deadlock: 40 rank(s) cannot go on"
    assert len(report) == 1 + 16 + 1
    assert report[-1] == "  ... and 24 more lanes"


DISAGREE = """
program name=disagree
role one ranks=0
  lane dp
    step reduce
      comm {one} axis=dp purpose=dp
role other ranks=1
  lane dp
    step reduce
      comm {other} axis=dp purpose=dp
group dp 0,1
"""


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a all_reduce nbytes=8", "b all_gather nbytes=8"),
        ("a all_reduce nbytes=8", "b all_reduce nbytes=16"),
        ("a barrier nbytes=0", "b all_reduce nbytes=0"),
        ("a send nbytes=8 peer=1", "b recv nbytes=16 peer=0"),
    ],
)
def test_members_that_call_different_things_are_refused(one: str, other: str, fold: bool) -> None:
    """On a real machine these hang or corrupt data; both calls are named."""
    with pytest.raises(ProgramError) as caught:
        play(DISAGREE.format(one=one, other=other), fold=fold)
    message = str(caught.value)
    for rank, call in ((0, one), (1, other)):
        name, op, *_ = call.split()
        nbytes = call.partition("nbytes=")[2].split()[0]
        assert f"rank {rank} calls {name!r} ({op}, {nbytes} bytes)" in message


@pytest.mark.parametrize(
    ("call", "hops", "nbytes"),
    [("all_reduce nbytes=8", 2, 8), ("reduce_scatter nbytes=8", 1, 4), ("barrier nbytes=0", 2, 4)],
)
def test_members_that_agree_need_not_use_the_same_name(call: str, hops: int, nbytes: float) -> None:
    """Only what moves has to agree. A ring of two is two hops and sends the message, or half of both; a barrier reduces
    4 bytes."""
    text = DISAGREE.format(one=f"a {call} algorithm=ring", other=f"b {call} algorithm=ring")
    assert play(text).step_time_s == pytest.approx(hops * HOP_s + nbytes / NIC_Bps, rel=1e-9)


def test_transfers_with_other_tags_do_not_meet() -> None:
    """The tag says which message; a send of x is no answer to a receive of y."""
    left, right = SEND.format(name="x", peer=1), RECV.format(name="y", peer=0)
    assert stuck(EXCHANGE.format(left=left, right=right)).splitlines()[1:] == [
        "  rank 0, lane pp, step send: waits for rank 1 to call the other side of send 'x' x",
        "  rank 1, lane pp, step recv: waits for rank 0 to call the other side of recv 'y' y",
    ]


def test_a_pair_of_sends_is_no_transfer() -> None:
    """Both ends of one message send it to each other: two messages that nobody receives."""
    left, right = SEND.format(name="x", peer=1), SEND.format(name="x", peer=0)
    assert "2 rank(s)" in stuck(EXCHANGE.format(left=left, right=right))


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8)])
def test_1f1b_whose_pairs_are_not_batched(p: int, m: int) -> None:
    """Megatron posts send-forward with receive-backward as one batch. Posted one by one, sends first, and blocking, the
    first such pair of every two neighbours is two sends that wait for each other; as batches the same program runs."""
    schedule = SCHEDULES["1f1b"]
    work = Block("work", (Compute("work", Fixed(1.0), "F"),))
    lanes = lower(
        schedule.order(p, m, 1),
        schedule,
        p,
        1e6,
        lambda action, after: Step(str(action), work, after, phase=action.kind, microbatch=action.microbatch),
        overlap=False,
    )

    def program(of_ranks: list[Lanes]) -> Program:
        roles = tuple(Role(str(rank), {lane: tuple(of[lane]) for lane in of}) for rank, of in enumerate(of_ranks))
        return Program(roles, tuple(range(p)), {"pp": (tuple(range(p)),)})

    assert simulate(program(lanes), nic_cluster(p), Costs.ideal()).step_time_s > 0
    with pytest.raises(DeadlockError, match=r"rank 0, .*waits for rank 1 to call the other side of send"):
        simulate(program([{**of, "pp": _one_by_one(of["pp"])} for of in lanes]), nic_cluster(p), Costs.ideal())


def _one_by_one(posted: list[Step]) -> list[Step]:
    """Each transfer of a batch alone, in its order; the last carries the label that computation waits for."""
    steps = []
    for step in posted:
        assert isinstance(step.op, Batch)
        *first, last = step.op.comms
        for number, comm in enumerate(first):
            steps.append(Step(f"{step.label}.{number}", comm, step.after))
        steps.append(Step(step.label, last, step.after))
    return steps
