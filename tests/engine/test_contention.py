"""Communication that meets other communication on a NIC, and computation beside it: both are slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from simulator.cluster import build_cluster
from simulator.engine import simulate
from simulator.program import Program, from_text
from tests.support.clusters import HOP_s, NIC_Bps, nic_cluster
from tests.support.contention import beside, slowed
from tests.support.grids import every_pair
from tests.support.quick import ISSUED, ByPurpose
from tests.support.transfers import IDEAL, SHORTCUTS, ends, play

# Two pipelines of two stages, 0 -> 2 and 1 -> 3, each rank on a node of its own. Stage 0 reduces gradients (ranks 0 and
# 1) while it sends; stage 1 computes when it has received. A two-rank ring all-reduce of S bytes is two hops, and each
# rank sends 2 (n-1)/n S = S bytes through its NIC.
MEETING = """
program name=meeting
block 0 name=work
  compute work F fixed seconds=1.0
role stage0 ranks=0-1
  lane dp
    {reduce}
  lane pp_send
    {send}
role stage1 ranks=2-3
  lane pp_recv
    {recv}
  lane compute
    step work block=0 {after} phase=F
group dp 0,1
group dp 2,3
group pp 0,2
group pp 1,3
"""


def meeting(reduced: float | None, sent: float | None) -> Program:
    """With ``None`` in the place of either, the other is alone."""
    reduce = f"step reduce\n      comm grads all_reduce nbytes={reduced} axis=dp purpose=dp"
    send = f"step send\n      comm act send nbytes={sent} axis=pp purpose=pp peer=1"
    recv = f"step recv\n      comm act recv nbytes={sent} axis=pp purpose=pp peer=0"
    return from_text(
        MEETING.format(
            reduce=reduce if reduced is not None else "",
            send=send if sent is not None else "",
            recv=recv if sent is not None else "",
            after="after=recv" if sent is not None else "",
        )
    )


@pytest.mark.parametrize(("fold", "coalesce"), SHORTCUTS)
@pytest.mark.parametrize("reduced", [0.25e9, 0.9e9, 1e9, 2e9, 5e9])
def test_a_gradient_all_reduce_and_a_pipeline_send_delay_each_other(reduced: float, fold: bool, coalesce: bool) -> None:
    """S bytes are reduced and M sent, from time 0, out of one NIC of C bytes/s; l is the latency of a hop.

    Alone the send ends at l + M / C, the all-reduce at 2 l + S / C. Together: from l on the send has the NIC to itself,
    from 2 l on each has half. If M <= S the send ends first: of M, C l are gone by 2 l, and the rest takes
    2 (M - C l) / C, which is until 2 M / C. The all-reduce has then sent M - C l, and the rest of S goes at C: until
    l + (S + M) / C, when all bytes are through that could go from l on.
    If the all-reduce is the shorter, it ends at 2 l + 2 S / C, and the send has what is left: until l + (S + M) / C.
    """
    sent = 1e9
    if reduced >= sent:
        send_end, reduce_end = 2 * sent / NIC_Bps, HOP_s + (reduced + sent) / NIC_Bps
    else:
        send_end, reduce_end = HOP_s + (reduced + sent) / NIC_Bps, 2 * (HOP_s + reduced / NIC_Bps)
    timeline = play(meeting(reduced, sent), fold=fold, coalesce=coalesce)
    for stage0, stage1 in ((0, 2), (1, 3)):
        assert ends(timeline, stage0) == pytest.approx({"reduce": reduce_end, "send": send_end}, rel=1e-9)
        assert ends(timeline, stage1) == pytest.approx({"recv": send_end, "work": send_end + 1}, rel=1e-9)

    # Each by itself: what would come out if links were not shared. Both must be delayed by the smaller message at
    # least, give or take the latency during which they have not met.
    alone = ends(play(meeting(reduced, None)))["reduce"], ends(play(meeting(None, sent)))["send"]
    assert alone == pytest.approx((2 * HOP_s + reduced / NIC_Bps, HOP_s + sent / NIC_Bps), rel=1e-9)
    least = min(reduced, sent) / NIC_Bps - 2 * HOP_s
    assert reduce_end - alone[0] >= least > 0.2
    assert send_end - alone[1] >= least


OPPOSITE = """
program name=opposite
role stage0 ranks=0
  lane a
    step out
      comm out send nbytes=1e9 axis=pp purpose=pp peer=1
  lane b
    step back
      comm back recv nbytes=2e9 axis=pp purpose=pp peer=1
role stage1 ranks=1
  lane a
    step out
      comm out recv nbytes=1e9 axis=pp purpose=pp peer=0
  lane b
    step back
      comm back send nbytes=2e9 axis=pp purpose=pp peer=0
group pp 0,1
"""


def test_the_two_directions_of_a_nic_do_not_meet() -> None:
    """Full duplex: an activation out and a gradient back each take as long as alone."""
    timeline = play(from_text(OPPOSITE))
    for rank in (0, 1):
        assert ends(timeline, rank) == pytest.approx({"out": HOP_s + 1, "back": HOP_s + 2}, rel=1e-9)


def fan(n: int, sizes: Sequence[float]) -> Program:
    """Rank 0 sends to each of n others at once; message k carries ``sizes[k]``."""
    lines = ["program name=fan", "role source ranks=0"]
    for k, nbytes in enumerate(sizes, start=1):
        lines += [
            f"  lane send{k}",
            f"    step s{k}",
            f"      comm x{k} send nbytes={nbytes} axis=pp purpose=pp peer={k}",
        ]
    for k, nbytes in enumerate(sizes, start=1):
        lines += [f"role sink{k} ranks={k}", "  lane recv", f"    step r{k}"]
        lines += [f"      comm x{k} recv nbytes={nbytes} axis=pp purpose=pp peer=0"]
    lines.append(f"group pp {','.join(map(str, range(n + 1)))}")
    return from_text("\n".join(lines))


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("sizes", [(1e9,), (1e9, 1e9), (1e9, 2e9, 3e9), (3e9, 1e9, 2e9), (0.0, 1e9, 1e9)])
def test_sends_to_many_share_the_nic_they_leave_by(sizes: tuple[float, ...], fold: bool) -> None:
    """Sorted by size, flow k shares with those that are larger: between one end and the next, (n - k) times the
    difference of the sizes has to leave at C."""
    ordered = sorted(sizes)
    steps = [
        (len(sizes) - k) * (now - before) / NIC_Bps
        for k, (before, now) in enumerate(zip([0.0, *ordered], ordered, strict=False))
    ]
    end_of = dict(zip(ordered, accumulate(steps), strict=True))
    found = ends(play(fan(len(sizes), sizes), fold=fold))
    for k, nbytes in enumerate(sizes, start=1):
        assert found[f"s{k}"] == pytest.approx(HOP_s + end_of[nbytes], rel=1e-9)


@every_pair(
    {
        "fold, coalesce": SHORTCUTS,
        "nodes": [2, 4],
        "speed": [0.5, 0.8],
        "kernels": [(4.0,), (0.25,), (1.0, 0.0, 2.5), (0.25,) * 12],
    }
)
def test_kernels_beside_an_all_reduce_take_longer(
    kernels: tuple[float, ...], speed: float, nodes: int, fold: bool, coalesce: bool
) -> None:
    """The first block ends at 0.5; then an all-reduce and a row of kernels begin together. The all-reduce lasts
    T = 2 (n-1) hops + 2 (n-1)/n S / C, and meanwhile kernels run at ``speed``: what would have been done after w
    seconds of work is done after w / speed if that is within T, else speed T of it was done in T and the rest at full
    speed: w + (1 - speed) T."""
    nbytes = 1e9
    last = 2 * (nodes - 1) * HOP_s + 2 * (nodes - 1) / nodes * nbytes / NIC_Bps

    def at(work: float) -> float:
        return 0.5 + (work / speed if work <= speed * last else work + (1 - speed) * last)

    timeline = play(beside(nodes, kernels, nbytes), slowed(dp=speed), fold=fold, coalesce=coalesce)
    assert ends(timeline)["reduce"] == pytest.approx(0.5 + last, rel=1e-9)
    assert ends(timeline)["layers"] == pytest.approx(at(sum(kernels)), rel=1e-9)
    work = [0.0, *accumulate(kernels)]
    rows = timeline.frame()
    for rank in timeline.ranks:
        mine = rows[(rows["rank"] == rank) & rows["name"].str.startswith("k")]
        assert list(mine["name"]) == [f"k{i}" for i in range(len(kernels))]
        assert mine["start_s"].to_numpy() == pytest.approx([at(w) for w in work[:-1]], rel=1e-9)
        assert mine["end_s"].to_numpy() == pytest.approx([at(w) for w in work[1:]], rel=1e-9)


def test_without_interference_kernels_run_at_full_speed() -> None:
    """The same program where dp takes nothing, or another purpose does: 0.5 + 4 seconds."""
    for costs in (IDEAL, slowed(dp=1.0), slowed(tp=0.5), slowed(pp=0.5)):
        assert ends(play(beside(2, (4.0,), 1e9), costs))["layers"] == pytest.approx(4.5, rel=1e-12)


@pytest.mark.parametrize("queues", [True, False])
@pytest.mark.parametrize(
    ("op", "nodes", "seconds"),
    [
        # Of NCCL: at half speed for as long as it lasts, about 1 s, in which half a second of work gets done.
        ("all_reduce", 2, 2.0 - 0.5 + 1.0),
        # By copy engines and CPUs: whatever its purpose, it slows no kernel and waits for none.
        ("push", 1, 2.0),
        ("pull", 1, 2.0),
        ("to_host", 1, 2.0),
        ("from_host", 1, 2.0),
    ],
)
def test_only_what_nccl_carries_holds_sms(op: str, nodes: int, seconds: float, queues: bool) -> None:
    """Two seconds of kernels beside a second of communication of purpose dp, posted at the same time."""
    text = f"""
program name=servers
block 0 name=layers
  compute k0 F fixed seconds=1.0
  compute k1 F fixed seconds=1.0
role worker ranks=0-{nodes - 1}
  lane compute
    step layers block=0 phase=F
  lane beside
    step beside
      comm beside {op} nbytes=1e9 axis=dp purpose=dp
"""
    groups = ["group dp 0,1"] if nodes == 2 else ["group dp 0"]
    program = replace(from_text(text + "\n".join(groups)), servers=(1,))
    spec = nic_cluster(2).spec
    node = replace(spec.node, host_memory_bandwidth_Bps=1e12)
    cluster = build_cluster(replace(spec, node=node))
    costs = replace(IDEAL, interference=ByPurpose({"dp": 0.5}, queues))
    timeline = simulate(program, cluster, costs)
    assert ends(timeline)["layers"] == pytest.approx(seconds, rel=0.01)
    assert ends(timeline)["beside"] > 0.001


def test_the_slowest_of_two_interferences_counts() -> None:
    """Stage 0 computes 8 s beside a 1 GB send (pp: 0.5) and a 3 GB all-reduce (dp: 0.8), which share its NIC: the send
    ends at 2 s (see above), the all-reduce at l + 4 s. Done by then: 0.5 x 2 + 0.8 (l + 2); the rest at full speed."""
    work = MEETING.replace("seconds=1.0", "seconds=8.0").replace(
        "  lane dp\n", "  lane compute\n    step beside block=0 phase=F\n  lane dp\n"
    )
    program = from_text(
        work.format(
            reduce="step reduce\n      comm grads all_reduce nbytes=3e9 axis=dp purpose=dp",
            send="step send\n      comm act send nbytes=1e9 axis=pp purpose=pp peer=1",
            recv="step recv\n      comm act recv nbytes=1e9 axis=pp purpose=pp peer=0",
            after="after=recv",
        )
    )
    for fold, coalesce in SHORTCUTS:
        found = ends(play(program, slowed(pp=0.5, dp=0.8), fold=fold, coalesce=coalesce))
        assert found["send"] == pytest.approx(2.0, rel=1e-9)
        assert found["reduce"] == pytest.approx(HOP_s + 4, rel=1e-9)
        assert found["beside"] == pytest.approx(HOP_s + 4 + 8 - (1 + 0.8 * (HOP_s + 2)), rel=1e-9)


@pytest.mark.parametrize("coalesce", [True, False])
def test_waiting_for_the_host_is_not_slowed(coalesce: bool) -> None:
    """A launch takes 0.3 s, a kernel 0.1 s, 0.2 s beside the all-reduce: kernel i of the row (after the first block's
    one) is launched at 0.3 (i + 2), and starts then if the GPU is free, whether it is slowed or not. The first block
    runs from 0.3 to 0.8, so that the all-reduce is in flight from 0.8 for 2 l + 1 s."""
    costs = replace(slowed(dp=0.5), launch=dict.fromkeys(ISSUED, 0.3) | {"autograd": 0.0, "bucket": 0.0})
    timeline = play(beside(2, (0.1,) * 8, 1e9), costs, coalesce=coalesce)
    rows = timeline.frame()
    mine = rows[(rows["rank"] == 0) & rows["name"].str.startswith("k")]
    # Kernel 0, launched at 0.6, waits for the first block until 0.8, kernel 1, launched at 0.9, for kernel 0 until 1.0;
    # from then on the host is behind.
    starts = np.array([0.8, 1.0, *(0.3 * (i + 2) for i in range(2, 8))])
    # Kernel 4 starts at 1.8, when the all-reduce has 2 l left of it: speed 0.5 for 2 l, which costs it l.
    lengths = np.array([0.2, 0.2, 0.2, 0.2, 0.1 + HOP_s, 0.1, 0.1, 0.1])
    assert mine["start_s"].to_numpy() == pytest.approx(starts, rel=1e-9)
    assert mine["end_s"].to_numpy() == pytest.approx(starts + lengths, rel=1e-9)
