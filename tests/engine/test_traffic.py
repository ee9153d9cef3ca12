"""Who met on which link, and what each lost: read off the events, whatever they were played with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import simpy

from benchmarks import bench_shared_spine
from simulator.analysis.time.links import contention, links_of_purpose
from simulator.cluster import build_cluster
from simulator.config.section import as_data
from simulator.config.validation import validated
from simulator.engine import Placed, simulate, simulate_together
from simulator.engine.invariants import check
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.network.flows import Network
from simulator.network.max_min import saturations
from simulator.network.plan import Phase, Plan
from simulator.network.simulated_time import SimulatedTime
from simulator.program import AllToAll, Collective, Program, Role, Step
from simulator.timeline import Timeline
from tests.support.clusters import CLUSTERS, HOP_s, NIC_Bps, nic_cluster
from tests.support.grids import every_pair
from tests.support.jobs import job, play
from tests.support.programs import comm_called
from tests.support.transfers import IDEAL, SHORTCUTS, at_once, ends


def lost(timeline: Timeline, link: str) -> dict[tuple[str, str], tuple[float, float, float]]:
    """(axis, op) -> (at once, together, lost) of those that met on a link."""
    found = next(met for met in timeline.contention if met.link == link)
    return {(flow.axis, flow.op): (flow.at_once, flow.seconds, flow.lost_s) for flow in found.flows}


# The record of the network


def recorded(
    capacity: Sequence[float], *transfers: tuple[float, *tuple[Phase, ...]]
) -> tuple[dict[int, dict[int, float]], float]:
    """What each phase of the transfers, started at their times, lost on each link, and when the last one ended."""
    env = SimulatedTime()
    network = Network(env, capacity)
    landed: list[float] = []

    def start(phases: tuple[Phase, ...], _: simpy.Event) -> None:
        network.transfer(Plan("", phases), lambda: landed.append(env.now))

    for at, *phases in transfers:
        env.timeout(at).callbacks.append(partial(start, tuple(phases)))
    env.run()
    network.finish(env.now)
    number = {id(phase): i for i, phase in enumerate([phase for _, *phases in transfers for phase in phases])}
    result: dict[int, dict[int, float]] = {}
    for full, seconds in network.saturated_s.items():
        for phase, rate, held in zip(full.phases, full.rates, full.held_up, strict=True):
            of = result.setdefault(number[id(phase)], {})
            of[full.link] = of.get(full.link, 0.0) + (seconds * (1 - rate / phase.cap_Bps) if held else 0.0)
    return result, max(landed)


@pytest.mark.parametrize("fold", [True, False])
def test_two_links_alike_in_a_row_both_hold_up(fold: bool) -> None:
    """Two workers of one node push to a server on another, through the sender's NIC and the receiver's, which are alike
    and full together, and pull the other way through both. One class or two, all four are told: two for each way."""
    cluster = {**CLUSTERS["pcie_nodes"], "nodes": 2}
    node = {**cluster["node"], "host_memory_bandwidth_Bps": 200e9}
    cluster["node"] = node | {"gpus": {**node["gpus"], "type": "a100-sxm-80gb"}}
    layout = {"dp": 2, "data_parallel": "parameter_server"}
    rows = play(job(model__layers=2) | {"parallelism": layout, "cluster": cluster}, fold=fold).to_dict()["contention"]
    nics = {(flow["op"], row["count"]) for row in rows if row["kind"] == "infiniband" for flow in row["flows"]}
    assert nics == {("push", 2), ("pull", 2)}


@pytest.mark.parametrize(("late", "end"), [(0.0, 8.0), (1.0, 7.0), (2.0, 6.0)])
def test_transfers_in_step_end_later_than_one_after_the_other(late: float, end: float) -> None:
    """Links of 10 B/s; A and B each move 20 bytes over link 0, then 20 over link 1.

    In step each has 5 B/s everywhere: link 1 is idle for 4 s, then link 0, and both end at 8. B a second later: A
    alone moves 10 bytes in that second, and its other 10 until 3; B, which has moved 10 by then, ends its first 20 at
    4. On link 1 A has moved 10 bytes by 4, and its other 10 by 6; B has moved 10 by then and ends at 7. Two seconds
    later B never meets A, and ends at 6. So does a slow GPU shorten a step in which ranks wait for servers.
    """
    phases = [Phase(20.0, ((link, 1.0),), 0.0, 10.0) for link in (0, 1, 0, 1)]
    assert recorded([10.0, 10.0], (0.0, *phases[:2]), (late, *phases[2:]))[1] == pytest.approx(end)


def test_nothing_is_lost_while_the_first_byte_is_on_the_way() -> None:
    """Links of 10 B/s. A's first phase shares link 1 with B: 5 B/s each, and its 20 bytes are there at 4. Its second
    begins at that instant, with nobody else on link 0; its bytes move from 7 on, each of them twice over the link: 5
    B/s where its cap is 10, so that it loses half of the 4 s until 11. B has 10 B/s from 4 on, and ends at 12."""
    first, second = Phase(20.0, ((0, 1.0), (1, 1.0)), 0.0, 10.0), Phase(20.0, ((0, 2.0),), 3.0, 10.0)
    lost, end = recorded([10.0, 10.0], (0.0, first, second), (0.0, Phase(100.0, ((1, 1.0),), 0.0, 10.0)))
    assert lost == {0: {1: pytest.approx(2.0)}, 1: {0: pytest.approx(2.0)}, 2: {1: pytest.approx(2.0)}}
    assert end == pytest.approx(12.0)


@pytest.mark.parametrize("late", [0.0, 1.0, 4.0, 9.0, 9.999])
def test_two_transfers_lose_what_they_take_longer(late: float) -> None:
    """A: 100 bytes from 0, B: 100 bytes from ``late``, on 10 B/s. Alone each takes 10 s. Together A ends at 20 - late
    and B at 20 (see `tests.network.test_flows_in_time`), so that each has lost 10 - late."""
    a, b = (Phase(100.0, ((0, 1.0),), 0.0, 10.0) for _ in range(2))
    found, end = recorded([10.0], (0.0, a), (late, b))
    assert end == pytest.approx(20.0)
    assert found[0][0] == pytest.approx(10 - late, rel=1e-9)
    assert found[1][0] == pytest.approx(10 - late, rel=1e-9)


def test_the_link_that_holds_a_flow_up_is_named() -> None:
    """A crosses links 0 (10 B/s) and 1 (4 B/s) and would move 4 B/s alone, B only 0, C only 1. A and C have 2 B/s each,
    held up by link 1; B takes 8 of link 0, where A is not at its limit. A's 20 bytes take 10 s, 5 more than alone; C's
    20 bytes likewise (4 B/s alone); B's 80 bytes end at 10 with them, 2 s later than alone."""
    a = Phase(20.0, ((0, 1.0), (1, 1.0)), 0.0, 4.0)
    b = Phase(80.0, ((0, 1.0),), 0.0, 10.0)
    c = Phase(20.0, ((1, 1.0),), 0.0, 4.0)
    found, end = recorded([10.0, 4.0], (0.0, a), (0.0, b), (0.0, c))
    assert end == pytest.approx(10.0)
    assert found[0] == pytest.approx({0: 0.0, 1: 5.0})
    assert found[1] == pytest.approx({0: 2.0})
    assert found[2] == pytest.approx({1: 5.0})


@pytest.mark.parametrize("cap", [2.0, 4.0, 5.0, 8.0])
def test_a_capped_flow_is_there_and_may_lose_nothing(cap: float) -> None:
    """On 10 B/s with a flow that can take all of it: below its fair share of 5 a capped one loses nothing, and is
    named; above, it loses 1 - 5 / cap of every second."""
    capped, other = Phase(100.0, ((0, 1.0),), 0.0, cap), Phase(1e4, ((0, 1.0),), 0.0, 10.0)
    found, _ = recorded([10.0], (0.0, capped), (0.0, other))
    rate = min(cap, 5.0)
    assert found[0][0] == pytest.approx(100 / rate - 100 / cap, abs=1e-9)
    assert found[1][0] == pytest.approx(100 / rate * (1 - (10 - rate) / 10))


def test_nothing_is_recorded_where_nobody_is_held_up() -> None:
    """Alone, one after another, on links of their own, or together below what the link carries."""
    on = [Phase(10.0, ((0, 1.0),), 0.0, 10.0), Phase(10.0, ((1, 1.0),), 0.0, 10.0)]
    small = [Phase(10.0, ((2, 1.0),), 0.0, 4.0), Phase(10.0, ((2, 1.0),), 0.0, 5.0)]
    transfers = [(0.0, on[0]), (0.0, on[1]), (5.0, on[0]), *((0.0, phase) for phase in small)]
    assert recorded([10.0, 10.0, 10.0], *transfers)[0] == {}
    assert saturations(small, [4.0, 5.0], [10.0, 10.0, 10.0]) == ()


# Two operations on one NIC


@every_pair(
    {
        "fold, coalesce": SHORTCUTS,
        "nodes": [2, 3, 4, 8],
        "ratio": [0.25, 1.0, 3.0],
    }
)
def test_two_rings_on_one_nic(nodes: int, ratio: float, fold: bool, coalesce: bool) -> None:
    """Two ring all-reduces of S and R S bytes over the same n NICs at once, which begin to move after the same latency
    l = 2 (n - 1) hops. Each sends b = 2 (n - 1) / n of its bytes through every NIC, at C / 2 until the smaller has sent
    b m, m = min(S, R S): at l + 2 b m / C; the larger one then alone, until l + b (S + R S) / C. Both have lost
    b m / C, which is what the smaller one would take."""
    size = 1e9
    groups = {"dp": [range(nodes)], "edp": [range(nodes)]}
    program = at_once(
        groups,
        Collective("a", "all_reduce", size, "dp", "dp", algorithm="ring"),
        Collective("b", "all_reduce", ratio * size, "edp", "dp", algorithm="ring", stream="b"),
    )
    timeline = simulate(program, nic_cluster(nodes), IDEAL, fold=fold, coalesce=coalesce)
    check(program, timeline)
    part, least = 2 * (nodes - 1) / nodes / NIC_Bps, min(size, ratio * size)
    latency, last = 2 * (nodes - 1) * HOP_s, part * (size + ratio * size)
    first = 2 * part * least
    a, b = (first, last) if ratio >= 1 else (last, first)
    assert ends(timeline) == pytest.approx({"step0": latency + a, "step1": latency + b}, rel=1e-9)
    met = lost(timeline, "node0.nic0:tx")
    for axis in ("dp", "edp"):
        assert met[axis, "all_reduce"] == pytest.approx((1, first, part * least), rel=1e-9)


@every_pair(
    {
        "fold, coalesce": SHORTCUTS,
        "nodes": [2, 4, 8],
        "ratio": [0.5, 1.0, 4.0],
    }
)
def test_a_gradient_ring_against_an_expert_all_to_all(nodes: int, ratio: float, fold: bool, coalesce: bool) -> None:
    """On n nodes of one GPU and NIC each, a ring all-reduce sends 2 (n - 1) / n of its S bytes through each NIC from
    2 (n - 1) hops on; an all-to-all of R S bytes per rank sends (n - 1) / n of them, to all at once, from one hop on.
    At first the all-to-all is alone, then each has half the NIC."""
    size = 2e9
    program = at_once(
        {"dp": [range(nodes)], "ep": [range(nodes)]},
        Collective("grads", "all_reduce", size, "dp", "dp", algorithm="ring"),
        AllToAll("tokens", ratio * size, "ep", "ep"),
    )
    timeline = simulate(program, nic_cluster(nodes), IDEAL, fold=fold, coalesce=coalesce)
    check(program, timeline)
    ring, tokens = 2 * (nodes - 1) / nodes * size / NIC_Bps, (nodes - 1) / nodes * ratio * size / NIC_Bps
    ring_from, tokens_from = 2 * (nodes - 1) * HOP_s, HOP_s
    left = tokens - (ring_from - tokens_from)  # of the all-to-all when the ring begins to move
    both = 2 * min(ring, left)
    ring_end = ring_from + (both if ring <= left else both + ring - left)
    tokens_end = ring_from + (both if left <= ring else both + left - ring)
    assert ends(timeline) == pytest.approx({"step0": ring_end, "step1": tokens_end}, rel=1e-9)
    met = lost(timeline, "node0.nic0:tx")
    for who in (("dp", "all_reduce"), ("ep", "all_to_all")):
        assert met[who] == pytest.approx((1, both, both / 2), rel=1e-9)


def test_operations_on_a_nic_share_it_whatever_they_move_inside_their_nodes() -> None:
    """Two nodes of four GPUs behind one NIC: a tree all-reduce of 8 GPUs, whose NVLinks carry several times what the
    NIC does, and a send from node to node. While both last each has half the NIC."""
    spec = as_data(nic_cluster(2, 4).spec, defaults=False)
    spec["node"]["nics"]["count"] = 1
    spec["node"]["nvlink"]["bandwidth_Bps"] = 20e9
    cluster = build_cluster(validated(ClusterSpec, spec))
    tree = Collective("grads", "all_reduce", 1e9, "dp", "dp", algorithm="tree")
    send, receive = (comm_called("act", op, 1e12, "pp", "pp", peer=peer) for op, peer in (("send", 1), ("recv", 0)))
    sender, other, receiver = (
        Role(name, {"dp": (Step("tree", tree),), **({"pp": (Step("send", op),)} if op else {})})
        for name, op in (("sender", send), ("other", None), ("receiver", receive))
    )
    groups = {"dp": (tuple(range(8)),), "pp": ((0, 4),)}
    program = Program((sender, other, receiver), (0, 1, 1, 1, 2, 1, 1, 1), groups)
    alone = ends(simulate(at_once({"dp": [range(8)]}, tree), cluster, IDEAL))["step0"]
    timeline = simulate(program, cluster, IDEAL)
    # Of a tree on two nodes the NIC carries all of the message each way: 1 s of bytes, 2 s at half, and some latency.
    end = ends(timeline)["tree"]
    assert end == pytest.approx(2.0, rel=0.02)
    assert alone < 1.1
    assert lost(timeline, "node0.nic0:tx")["dp", "all_reduce"][2] == pytest.approx(end - alone, rel=1e-3)


# What shortcuts leave alone


def rounded(timeline: Timeline) -> list[dict[str, Any]]:
    """The report's table, without the name of the link that stands for others."""
    rows = [{**row, "link": ""} for row in contention(timeline, limit=10_000)]
    return sorted(rows, key=lambda row: (row["kind"], row["count"], str(row["flows"])))


@pytest.mark.parametrize(
    ("cluster", "section"),
    [
        ("pcie", {"tp": 2, "dp": 2}),
        ("pcie_nodes", {"tp": 2, "dp": 4}),
        ("oversubscribed", {"dp": 4, "pp": 2}),
        ("oversubscribed", {"dp": 4, "pp": 2, "zero": 3}),
        (
            "three_tiers",
            {"tp": 2, "dp": 4, "pp": 2, "bucket_bytes": 25_000_000, "overlap": {"grad_reduce": True, "p2p": True}},
        ),
    ],
)
def test_folding_and_coalescing_leave_what_was_lost(cluster: str, section: dict[str, Any]) -> None:
    """Groups that are played as one, and collectives inside a block, meet as those of the plain run do: on every link
    of a class as many at once, for as long, at the same loss."""
    spec = CLUSTERS[cluster]
    node = {**spec["node"], "gpus": {**spec["node"]["gpus"], "type": "a100-sxm-80gb"}}
    workload = job(model__hidden=1024) | {"parallelism": section}
    workload["cluster"] = {key: value for key, value in spec.items() if key != "nodes"} | {"node": node}
    short, plain = play(workload, fold=True, coalesce=True).spans, play(workload, fold=False, coalesce=False).spans
    by_name = {met.link: met for met in plain.contention}
    assert short.contention
    for met in short.contention:
        twin = by_name[met.link]
        assert [(f.axis, f.op) for f in met.flows] == [(f.axis, f.op) for f in twin.flows]
        for flow, other in zip(met.flows, twin.flows, strict=True):
            assert (flow.at_once, flow.seconds, flow.lost_s) == pytest.approx(
                (other.at_once, other.seconds, other.lost_s), rel=1e-6, abs=1e-12
            )
    assert sum(met.count for met in short.contention) == len(plain.contention)


# R50: which links who uses


def rail_cluster(nodes: int, oversubscription: float) -> dict[str, Any]:
    """Nodes of two GPUs behind one NIC, leaves of 4 ports down at every oversubscription: 8 in all without any."""
    radix = 4 + max(1, round(4 / oversubscription))
    return {
        "name": "rails",
        "node": {
            "gpus": {"type": "a100-sxm-80gb", "count": 2},
            "nvlink": {"kind": "nvswitch", "bandwidth_Bps": 300e9},
            "pcie": {"generation": 4},
            "nics": {"count": 1, "bandwidth_bps": 200e9, "latency_s": 2e-6},
        },
        "fabric": {"radix": radix, "oversubscription": oversubscription, "tiers": 3},
        "nodes": nodes,
    }


def test_the_report_says_which_links_each_kind_crosses_and_so_why_nothing_changed() -> None:
    """Rule R50. Tensor-parallel pairs share a node: NVLink. Of 4 stages x 4 replicas on 16 nodes each stage has the 4
    nodes of one leaf, so that gradients stay below it, and neighbours lie under different ones: only pp crosses the
    uplinks. Cutting those to a quarter leaves dp and tp as they are, and the report shows why. With ranks in the other
    order a pipeline has a leaf for itself, and it is the gradients that cross the uplinks, and take longer."""

    @cache
    def report(order: str, oversubscription: float) -> dict[str, Any]:
        section = {"tp": 2, "pp": 4, "dp": 4, "rank_order": order}
        workload = job(model__layers=4, model__hidden=2048, training__global_batch=16) | {"parallelism": section}
        workload["cluster"] = rail_cluster(16, oversubscription)
        return play(workload).to_dict()

    def crossed(result: dict[str, Any], kind: str) -> list[str]:
        return [row["links"] for row in result["communication"][kind]["links"]]

    for oversubscription in (1.0, 4.0):
        stages = report("tp-cp-dp-pp", oversubscription)
        assert crossed(stages, "tp") == ["node*.gpu*.nvlink"]
        assert "node*.nic*" in crossed(stages, "dp")
        assert "rail*.leaf*.up" in crossed(stages, "pp")
        assert not any(name.endswith(".up") for name in crossed(stages, "dp"))
    before, after = report("tp-cp-dp-pp", 1.0), report("tp-cp-dp-pp", 4.0)
    for kind in ("tp", "dp"):
        assert after["communication"][kind]["time_s"] == pytest.approx(before["communication"][kind]["time_s"])
    before, after = report("tp-cp-pp-dp", 1.0), report("tp-cp-pp-dp", 4.0)
    assert "rail*.leaf*.up" not in crossed(after, "pp")
    assert crossed(after, "dp")[0] == "rail*.leaf*.up"  # the slowest
    assert after["communication"]["dp"]["time_s"] > 1.5 * before["communication"]["dp"]["time_s"]


def test_bytes_of_purposes_add_up_to_those_of_the_link() -> None:
    timeline = play(job(parallelism__tp=2, parallelism__pp=2, parallelism__dp=2)).spans
    for link in timeline.links:
        assert sum(link.by_purpose.values()) == pytest.approx(link.nbytes)
    rows = links_of_purpose(timeline, "dp")
    assert rows
    assert [row["busy_s"] for row in rows] == sorted((row["busy_s"] for row in rows), reverse=True)


# Many GPUs


@pytest.mark.parametrize(
    ("nodes", "fold"), [(1024, True), (96, True), (96, False), pytest.param(1024, False, marks=pytest.mark.slow)]
)
def test_all_rails_at_once_share_an_oversubscribed_spine(nodes: int, fold: bool) -> None:
    """Up to 8,192 GPUs: per rail 16 data-parallel rings of every 16th node, so that every hop leaves a leaf of six
    nodes. One rail's six rings have room on the 13 uplinks: each goes at the speed of its NIC. All rails' 48 rings at
    once have 13 / 48 of that, wherever they leave a full leaf.

    Events do not grow with the ranks that fold; the plain run needs two per rank, and a few per group."""
    cluster, n = build_cluster(bench_shared_spine.spec(nodes)), nodes // 16
    sent_s = 2 * (n - 1) / n * 1e9 / 50e9

    def all_of(rails: int) -> Timeline:
        gpus = tuple(8 * node + rail for node in range(nodes) for rail in range(rails))
        placed = Placed(bench_shared_spine.reductions(nodes, rails), IDEAL, gpus, ())
        return simulate_together([placed], cluster, fold=fold)[0]

    one, every = all_of(1), all_of(8)
    latency_s = one.step_time_s - sent_s
    assert 0 < latency_s < 3e-3
    assert one.contention == ()
    assert every.step_time_s == pytest.approx(latency_s + sent_s * 48 / 13, rel=1e-4)
    met = max(every.contention, key=lambda met: met.flows[0].lost_s)
    assert ".up" in met.link
    assert round(met.flows[0].at_once) == 48
    assert met.flows[0].lost_s == pytest.approx(sent_s * (48 / 13 - 1), rel=1e-3)
    assert every.events <= (400 if fold else 2 * 8 * nodes + 10 * 128)


def test_two_programs_on_one_fabric_meet_and_know_each_other() -> None:
    """Two pairs of nodes, each with a one-way shift: under one switch they do not meet. A third program that sends from
    the first one's node shares its NIC, and both take twice as long but for the latency."""
    shift = Collective("s", "send_recv", 1e9, "dp", "dp")
    program = at_once({"dp": [range(2)]}, shift)
    cluster = nic_cluster(4, 2)

    def on(*gpus: int) -> Placed:
        return Placed(program, IDEAL, gpus, ())

    alone = ends(simulate_together([on(0, 2)], cluster)[0])["step0"]
    apart = simulate_together([on(0, 2), on(4, 6)], cluster)
    assert [ends(timeline)["step0"] for timeline in apart] == pytest.approx([alone, alone], rel=1e-9)
    assert apart[0].contention == ()
    spec = as_data(cluster.spec, defaults=False)
    spec["node"]["nics"]["count"] = 1
    narrow = build_cluster(validated(ClusterSpec, spec))
    alone = ends(simulate_together([on(0, 2)], narrow)[0])["step0"]
    for fold in (True, False):
        both = simulate_together([on(0, 2), on(1, 3)], narrow, fold=fold)
        for timeline in both:
            check(program, timeline)
        assert [ends(timeline)["step0"] for timeline in both] == pytest.approx([alone + 1, alone + 1], rel=1e-9)
        assert [len(met.flows) for met in both[0].contention] == [2] * len(both[0].contention)
        assert math.isclose(both[0].contention[0].flows[0].lost_s, 1.0, rel_tol=1e-9)
