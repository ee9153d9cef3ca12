"""The passes that add sends and receives to a schedule: text in, text out."""

import pytest

from simulator.cluster.ideal import ideal_cluster
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.lowering.hand_overs import HandOver, SingleTransfers
from simulator.lowering.lanes import Lanes
from simulator.lowering.pipeline import lower
from simulator.lowering.posted_lane import PostedLane
from simulator.program import Block, Compute, Fixed, PointToPointKind, Program, Role, Step, comms_of
from simulator.schedules import SCHEDULES, Action

WORK = Block("work", ())


def step(action: Action, after: tuple[str, ...]) -> Step:
    return Step(str(action), WORK, after, phase=action.kind, microbatch=action.microbatch, stage=action.stage)


def lanes_of(name: str, p: int, m: int, v: int, *, overlap: bool, batched: bool = False) -> list[Lanes]:
    schedule = SCHEDULES[name]
    return lower(schedule.order(p, m, v), schedule, p * v, 1.0, step, overlap=overlap, batched=batched)


def text(lanes: Lanes) -> dict[str, str]:
    """lane -> its steps as label(what it waits for)."""
    return {
        lane: " ".join(f"{s.label}({','.join(s.after)})" if s.after else s.label for s in steps)
        for lane, steps in lanes.items()
    }


def test_blocking_1f1b_batches_send_forward_with_receive_backward() -> None:
    """p 2, m 2, rank 0 runs F0 F1 B0 B1. Between F0 and F1 only a send lies; between F1 and B0 a send and a receive
    with the same neighbour, one batch; before B1 one receive. Each gap is posted after the compute before it and
    awaited by the compute after it."""
    first, last = (text(lanes) for lanes in lanes_of("1f1b", 2, 2, 1, overlap=False))
    assert first["pp"] == "0SEND_F0(0F0) 0SEND_F1+0RECV_B0(0F1) 0RECV_B1(0B0)"
    assert first["compute"] == "0F0 0F1(0SEND_F0) 0B0(0SEND_F1+0RECV_B0) 0B1(0RECV_B1)"
    assert last["pp"] == "1RECV_F0 1SEND_B0+1RECV_F1(1B0) 1SEND_B1(1B1)"
    assert last["compute"] == "1F0(1RECV_F0) 1B0 1F1(1SEND_B0+1RECV_F1) 1B1"


def test_blocking_warmup_sends_before_it_receives() -> None:
    """p 3, rank 1 between its first two forwards: to rank 2 and from rank 0, two batches, as Megatron's loop posts."""
    middle = text(lanes_of("1f1b", 3, 3, 1, overlap=False)[1])
    assert middle["pp"].startswith("1RECV_F0 1SEND_F0(1F0) 1RECV_F1(1F0)")


def test_blocking_interleaved_posts_one_batch_per_slot() -> None:
    """p 2, m 2, v 2, rank 0: four warm-up forwards, then four backwards, all gaps one batch each."""
    first = text(lanes_of("interleaved", 2, 2, 2, overlap=False)[0])
    assert first["pp"] == (
        "0SEND_F0(0F0) 0SEND_F1+2RECV_F0(0F1) 2SEND_F0+2RECV_F1(2F0) 2SEND_F1+2RECV_B0(2F1) "
        "2SEND_B0+2RECV_B1(2B0) 2SEND_B1+0RECV_B0(2B1) 0RECV_B1(0B0)"
    )


def test_overlapped_transfers_have_lanes_of_their_own() -> None:
    """A send follows its compute, a compute its receive; nothing else waits."""
    first = text(lanes_of("1f1b", 2, 2, 1, overlap=True)[0])
    assert first == {
        "compute": "0F0 0F1 0B0(0RECV_B0) 0B1(0RECV_B1)",
        "pp_send_fwd": "0SEND_F0(0F0) 0SEND_F1(0F1)",
        "pp_recv_bwd": "0RECV_B0 0RECV_B1",
    }


def test_overlapped_interleaved_posts_ahead_on_a_stream_per_neighbour() -> None:
    """p 2, m 2, v 2. Rank 1 computes 1F0 right after rank 0's 0F0, and so on in turns: rank 0 posts the receive that
    2F0 needs when rank 1 has sent it in that order, before 0F1 begins; what it sends and receives is one stream."""
    first = text(lanes_of("interleaved", 2, 2, 2, overlap=True)[0])
    assert first == {
        "compute": "0F0 0F1 2F0(2RECV_F0) 2F1(2RECV_F1) 2B0(2RECV_B0) 2B1(2RECV_B1) 0B0(0RECV_B0) 0B1(0RECV_B1)",
        "pp_1": "0SEND_F0(0F0) 2RECV_F0(0F0) 0SEND_F1(0F1) 2RECV_F1(0F1) 2SEND_F0(2F0) 2SEND_F1(2F1) 2RECV_B0(2F1) "
        "2SEND_B0(2B0) 2RECV_B1(2B0) 2SEND_B1(2B1) 0RECV_B0(2B1) 0RECV_B1(0B0)",
    }


def test_batched_transfers_wait_behind_the_receives_before_them_whatever_the_neighbour() -> None:
    """p 3, m 3, v 2, rank 1. What it receives from both neighbours is one lane, in the order of posting; a send goes to
    its neighbour behind its computation and the receive posted last, and no receive waits for a send."""
    middle = text(lanes_of("interleaved", 3, 3, 2, overlap=True, batched=True)[1])
    assert set(middle) == {"compute", "pp_0", "pp_2", "pp_recv"}
    assert middle["pp_recv"].startswith("1RECV_F0 1RECV_F1(1F0) 1RECV_F2(1F1) 4RECV_F0(1F2)")
    assert middle["pp_2"].startswith("1SEND_F0(1F0,1RECV_F0) 1SEND_F1(1F1,1RECV_F1) 1SEND_F2(1F2,1RECV_F2)")


@pytest.mark.parametrize("apart", [False, True])
def test_an_overlapped_pair_waits_as_one_or_one_after_the_other_and_sends_together(apart: bool) -> None:
    """DualPipeV, p 2, rank 0 runs 3F2 and 0B0 as one slot. As one pass both wait for what either needs; apart each for
    its own. The activation of another pair, 0F4 and 3B2, is sent behind its backward either way."""
    schedule = SCHEDULES["dualpipe_v"]
    order = schedule.order(2, 6, 2)
    assert (Action(3, "F", 2), Action(0, "B", 0)) in order[0]
    assert (Action(0, "F", 4), Action(3, "B", 2)) in order[0]
    lanes = lower(order, schedule, 4, 1.0, step, overlap=True, apart=apart)[0]
    after = {s.label: set(s.after) for steps in lanes.values() for s in steps}
    needed = [after["3F2"], after["0B0"]]
    assert needed == ([{"3RECV_F2"}, {"0RECV_B0"}] if apart else [{"3RECV_F2", "0RECV_B0"}, set()])
    assert after["0SEND_F4"] == {"3B2"}


@pytest.mark.parametrize("name", ["interleaved", "interleaved_zb", "zb_v", "dualpipe_v"])
def test_a_receive_that_waits_holds_up_those_of_other_neighbours(name: str) -> None:
    """Transfers take no time here. Two ranks take what they took, as each has one neighbour; among four a step takes
    longer, as middle ranks wait behind what the other side has not made yet."""
    schedule = SCHEDULES[name]
    work = {kind: Block(kind, (Compute(kind, Fixed(2.0 if kind == "B" else 1.0), kind),)) for kind in "FBIW"}

    def unit(action: Action, after: tuple[str, ...]) -> Step:
        return Step(str(action), work[action.kind], after, phase=action.kind)

    for p, m in ((2, 8), (4, 8), (4, 16)):
        lengths = []
        for batched in (False, True):
            order = schedule.order(p, m, 2)
            lanes = lower(order, schedule, 2 * p, 0.0, unit, overlap=True, batched=batched)
            roles = tuple(Role(str(n), {lane: tuple(s) for lane, s in one.items()}) for n, one in enumerate(lanes))
            program = Program(roles, tuple(range(p)), {"pp": (tuple(range(p)),)})
            lengths.append(simulate(program, ideal_cluster(p), Costs.ideal()).length_s)
        alone, batched_s = lengths
        assert batched_s == pytest.approx(alone) if p == 2 else batched_s > 1.03 * alone


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_receives_say_whether_they_are_posted_before_their_bytes_come(name: str, overlap: bool) -> None:
    """They spin from when they are posted, the first of a rank too, which follow on nothing; but for those beside the
    computation of schedules whose runtime does not post them ahead, which stand for receives posted as bytes come."""
    schedule, size = SCHEDULES[name], (4, 8, SCHEDULES[name].chunks or 2)
    assert schedule.check(*size) is None
    for lanes in lanes_of(name, *size, overlap=overlap):
        comms = [comm for steps in lanes.values() for s in steps for comm in comms_of(s.op)]
        assert {comm.spins for comm in comms if comm.op == "send"} == {False}
        ahead = schedule.posts_ahead or schedule.rows is not None or not overlap
        assert {comm.spins for comm in comms if comm.op == "recv"} == {ahead}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_transfer_has_two_ends(name: str, overlap: bool) -> None:
    """A pipeline of n stages on more than one rank passes n - 1 activations and n - 1 gradients per micro-batch."""
    for p, m, v in [(2, 2, 1), (4, 8, 1), (2, 4, 3), (4, 4, 2), (3, 8, 2)]:
        if SCHEDULES[name].check(p, m, v):
            continue
        labels = [
            label
            for lanes in lanes_of(name, p, m, v, overlap=overlap)
            for steps in lanes.values()
            for s in steps
            for label in s.label.split("+")
        ]
        sends = [label for label in labels if "SEND" in label]
        receives = [label for label in labels if "RECV" in label]
        turns = v - 1 if SCHEDULES[name].chunks == 2 else 0  # of a V, where the next stage is on the same rank
        assert len(sends) == len(receives) == 2 * (p * v - 1 - turns) * m


@pytest.mark.parametrize("as_they_come", [False, True])
def test_receives_alone_are_posted_as_their_bytes_come(as_they_come: bool) -> None:
    """Stage 0 on rank 0 hands micro-batches 0 and 1 to stage 1 on rank 1; the second follows what is kept of the first.

    Both differ in label and tag alone.
    """
    passes = [(Action(0, "F", microbatch), Action(1, "F", microbatch)) for microbatch in range(2)]
    hops = [HandOver(source, target, 0, 1, source, target) for source, target in passes]
    singles = SingleTransfers(hops, 8.0, as_they_come=as_they_come)
    lanes = {op: PostedLane[Step]() for op in PointToPointKind}
    for hop in hops:
        for op in PointToPointKind:
            singles.alike(hop, op).post_on(lanes[op], hop.source.microbatch, ("before",))
    for op, lane in lanes.items():
        steps = lane.steps(lambda step: step)
        assert len(steps.columns.prototypes) == 1
        for hop, step in zip(hops, steps, strict=True):
            expected = hop.comm(op, 8.0, as_it_comes=as_they_come and op is PointToPointKind.RECV)
            assert (step.op, step.label, step.after) == (expected, hop.label(op), ("before",))
