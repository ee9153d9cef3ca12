"""Graphs are played: their lengths follow from hand-made cases."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from simulator.cluster import build_cluster
from simulator.config.cluster import load_cluster
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.errors import InputError
from simulator.network.collectives import fastest, idle_seconds, patterns, plan
from simulator.network.direct import ByteShares
from simulator.output import graph_tables
from simulator.traces.execution import report
from simulator.traces.execution.files import open_graphs
from simulator.traces.execution.graph import GraphComm, GraphNode, JobGraph, NodeKind, RankGraph
from simulator.traces.execution.lengths import NodeLengths
from simulator.traces.execution.meeting_order import meetings
from simulator.traces.execution.replay import GraphReplay, replay_graphs
from tests.support.chakra import COLLECTIVE, COMPUTE, RECEIVE, SEND, ChakraNode, node, save_chakra

pytest.importorskip("google.protobuf")
us = 1e-6


def played(folder: Path, *ranks: list[ChakraNode], cluster: str | None = None) -> GraphReplay:
    for rank, nodes in enumerate(ranks):
        save_chakra(folder / f"a.{rank}.et", *nodes)
    return replay_graphs(open_graphs([str(folder)]), cluster)


def test_kernels_take_turns_and_the_host_runs_beside_them(tmp_path: Path) -> None:
    """Two kernels of 3 and 4 us on one GPU take 7; the host's 5 beside them take none; the last kernel waits for it."""
    host = node(2, COMPUTE, 9, is_cpu_op=True)
    result = played(tmp_path, [node(0, COMPUTE, 3), node(1, COMPUTE, 4), host, node(3, COMPUTE, 1, after=[2])])
    assert result.step_s == pytest.approx(10 * us)
    assert (result.ranks[0].compute_s, result.ranks[0].host_s) == pytest.approx((8 * us, 9 * us))


def test_streams_and_threads_run_beside_each_other(tmp_path: Path) -> None:
    result = played(tmp_path, [node(0, COMPUTE, 3, tid=7), node(1, COMPUTE, 4, tid=20)])
    assert result.step_s == pytest.approx(4 * us)


def test_a_kernel_that_could_begin_first_is_first(tmp_path: Path) -> None:
    """Kernel 1 stands in front in the file, and waits 10 us for the host. Kernel 2 can run at once: 6, then 10 + 2."""
    host = node(0, COMPUTE, 10, is_cpu_op=True)
    result = played(tmp_path, [host, node(1, COMPUTE, 2, after=[0]), node(2, COMPUTE, 6)])
    assert result.step_s == pytest.approx(12 * us)


def test_ranks_meet_in_a_collective_and_then_take_the_shorter_length(tmp_path: Path) -> None:
    """Rank 1 comes 20 us later; rank 0's kernel of communication lasted 25 us, for it has waited 20. 30 + 5."""
    result = played(
        tmp_path,
        [node(0, COMPUTE, 10), node(1, COLLECTIVE, 25, after=[0], comm_size=8)],
        [node(0, COMPUTE, 30), node(1, COLLECTIVE, 5, after=[0], comm_size=8)],
    )
    assert result.step_s == pytest.approx(35 * us)
    assert [rank.communication_s for rank in result.ranks] == pytest.approx([5 * us, 5 * us])
    assert [rank.exposed_s for rank in result.ranks] == pytest.approx([5 * us, 5 * us])


def test_transfers_wait_for_both_ends(tmp_path: Path) -> None:
    """Rank 0 sends at 10; rank 1 is there at 4, gets it at 10 + 6, and computes until 18. Tags tell transfers apart."""
    sends = [node(0, COMPUTE, 10), node(1, SEND, 6, after=[0], comm_dst=1, comm_tag=3, comm_size=4)]
    other = node(2, SEND, 2, comm_dst=1, comm_tag=4, comm_size=4)
    receives = [
        node(0, COMPUTE, 4),
        node(1, RECEIVE, 12, after=[0], comm_src=0, comm_tag=3, comm_size=4),
        node(2, COMPUTE, 2, after=[1]),
        node(3, RECEIVE, 2, comm_src=0, comm_tag=4, comm_size=4),
    ]
    assert played(tmp_path, [*sends, other], receives).step_s == pytest.approx(18 * us)


def test_a_cluster_plays_communication_and_prices_kernels_by_the_roofline(tmp_path: Path) -> None:
    """A kernel at the peak of bf16, one at the memory's bandwidth, then an all-gather of what two ranks put in."""
    gpu = load_profile("h100-sxm-80gb").gpu_spec
    flops, nbytes = gpu.peak_flops_per_s["bf16"].value, gpu.memory_bandwidth_Bps.value
    nodes = [
        node(0, COMPUTE, num_ops=round(flops * 1e-3), tensor_size=1000),
        node(1, COMPUTE, num_ops=1000, tensor_size=round(nbytes * 2e-3), after=[0]),
        node(2, COLLECTIVE, comm_type=2, comm_size=1 << 20, after=[1]),
    ]
    cluster = build_cluster(load_cluster("dgx_h100"))
    costs = Costs.from_profiles({"h100-sxm-80gb": load_profile("h100-sxm-80gb")})
    gather_s = idle_seconds(plan("all_gather", 2 << 20, (0, 1), cluster, costs), cluster, costs)
    result = played(tmp_path, nodes, nodes, cluster="dgx_h100")
    assert result.step_s == pytest.approx(3e-3 + gather_s, rel=1e-6)


def test_lanes_of_ranks_do_not_wait_for_each_other_for_ever(tmp_path: Path) -> None:
    """Rank 0 must run kernel 2 before kernel 1, which waits for rank 1, and that for the result of 2.

    They take 2 us, 1 for a transfer, 3 on rank 1, 1 for the way back, and 4.
    """
    first = [
        node(0, RECEIVE, 1, comm_src=1, comm_tag=1, comm_size=4),
        node(1, COMPUTE, 4, after=[0]),
        node(2, COMPUTE, 2),
        node(3, SEND, 1, after=[2], comm_dst=1, comm_tag=0, comm_size=4),
    ]
    second = [
        node(0, RECEIVE, 1, comm_src=0, comm_tag=0, comm_size=4),
        node(1, COMPUTE, 3, after=[0]),
        node(2, SEND, 1, after=[1], comm_dst=0, comm_tag=1, comm_size=4),
    ]
    assert played(tmp_path, first, second).step_s == pytest.approx(11 * us)


def test_ranks_give_bytes_of_their_own_to_an_all_to_all(tmp_path: Path) -> None:
    """Rank 0 gives 3 parts, rank 1 one: as long as an all-to-all of 2 each whose shares are 3/4 and 1/4.

    The larger of the transfers in both directions decides: 3 parts each would take as long.
    """
    mib = 1 << 20

    def all_to_all(*nbytes: int) -> float:
        nodes = [[node(0, COLLECTIVE, comm_type=6, comm_size=size * 64 * mib)] for size in nbytes]
        return played(tmp_path, *nodes, cluster="dgx_h100").step_s

    cluster = build_cluster(load_cluster("dgx_h100"))
    costs = Costs.from_profiles({"h100-sxm-80gb": load_profile("h100-sxm-80gb")})
    shares = ByteShares(send=(0.75, 0.25))
    uneven = fastest("all_to_all", patterns("all_to_all", (0, 1), cluster, shares=shares), 128 * mib, costs)
    expected_s = idle_seconds(uneven, cluster, costs)
    assert all_to_all(3, 1) == pytest.approx(expected_s)
    assert all_to_all(3, 1) == pytest.approx(all_to_all(3, 3))


def test_tables_say_how_many_ranks_they_leave_out(tmp_path: Path) -> None:
    """Rows stand for 16 of 18 ranks that differ."""
    for rank in range(18):
        save_chakra(tmp_path / f"a.{rank}.et", node(0, COMPUTE, rank + 1))
    job = open_graphs([str(tmp_path)])
    result = report.replayed_graphs(job, replay_graphs(job))
    for tables in (graph_tables.replayed_graphs(result), graph_tables.shown_graphs(report.shown_graphs(job, 10))):
        console = Console(width=120)
        with console.capture() as printed:
            console.print(*tables)
        assert "\n 2 more" in printed.get() or "\n2 more" in printed.get()


def test_recorded_kernels_keep_their_lengths_on_another_cluster_and_it_is_said(tmp_path: Path) -> None:
    result = played(tmp_path, [node(0, COMPUTE, 10)], cluster="dgx_a100")
    assert result.step_s == pytest.approx(10 * us)
    assert result.warnings == ("kernels last as they were recorded, whatever GPU dgx_a100 has",)


def test_each_rank_has_the_peak_of_its_own_gpu(tmp_path: Path) -> None:
    """Two RTX 3090 stand before two RTX 4090, which do the same product faster by their peaks."""
    peaks = [load_profile(name).gpu_spec.peak_flops_per_s["bf16"].value for name in ("rtx-3090-24gb", "rtx-4090-24gb")]
    for rank in (1, 2):
        save_chakra(tmp_path / f"a.{rank}.et", node(0, COMPUTE, num_ops=10**12))
    result = replay_graphs(open_graphs([str(tmp_path)]), "workstation_mixed")
    assert [rank.end_s for rank in result.ranks] == pytest.approx([1e12 / peak for peak in peaks])


def test_a_type_that_the_gpu_has_no_peak_of_is_named(tmp_path: Path) -> None:
    job = open_graphs([save_chakra(tmp_path / "a.0.et", node(0, COMPUTE, num_ops=10**12))])
    (rank,) = job.ranks
    in_fp8 = replace(rank, nodes=(replace(rank.nodes[0], dtype="fp8"),))
    result = replay_graphs(replace(job, ranks=(in_fp8,)), "dgx_a100")
    assert result.warnings == ("a100-sxm-80gb has no peak of fp8: such kernels run at its peak of bf16",)
    assert result.step_s == pytest.approx(1e12 / load_profile("a100-sxm-80gb").gpu_spec.peak_flops_per_s["bf16"].value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"comm_algorithm": "tree"},
            "all_to_all of 8 bytes here, all_to_all of 8 bytes by tree at operation 0 of rank 1",
        ),
        ({"send_shares": (0.5, 0.5)}, "in shares of its own"),
        ({"send_shares": (1e300, 0.5)}, "is no list of shares"),
        ({"receive_shares": (math.nan, 0.5)}, "is no list of shares"),
        ({"per_node_share": math.nan}, "is no list of shares"),
    ],
)
def test_ranks_give_an_all_to_all_the_same_shares(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    even = node(0, COLLECTIVE, 1, comm_type=6, comm_size=8)
    uneven = node(0, COLLECTIVE, 1, comm_type=6, comm_size=8, **other)
    with pytest.raises(InputError) as problem:
        played(tmp_path, [even], [uneven])
    assert message in str(problem.value)


def test_shares_are_one_for_each_rank_and_a_ring_is_of_transfers(tmp_path: Path) -> None:
    """A collective stays one, whatever ring it names."""
    three = node(0, COLLECTIVE, 1, comm_type=6, comm_size=8, send_shares=(0.5, 0.25, 0.25))
    with pytest.raises(InputError, match="has no share for each of 2 ranks"):
        played(tmp_path, [three], [three])
    ring = node(0, COLLECTIVE, 7, comm_size=8, ring_group="1")
    assert [rank.communication_s for rank in played(tmp_path, [ring], [ring]).ranks] == pytest.approx([7 * us] * 2)


def test_a_rank_that_calls_a_group_of_others_is_named(tmp_path: Path) -> None:
    for rank in range(3):
        save_chakra(tmp_path / f"a.{rank}.et", node(0, COLLECTIVE, 1, comm_size=8, pg_name="1"))
    (tmp_path / "comm_group.json").write_text('{"1": [0, 1]}')
    with pytest.raises(InputError, match="rank 2 calls all_reduce of group 1, and is not in it") as problem:
        replay_graphs(open_graphs([str(tmp_path)]))
    assert str(problem.value).startswith(str(tmp_path / "a.2.et"))


def test_meetings_do_not_look_at_all_ranks_for_each_node() -> None:
    """Ranks are listed as often for many collectives as for one."""
    counts = []
    for calls in (1, 50):
        comm = GraphComm("all_reduce", 8.0, "1")
        nodes = tuple(GraphNode(number, "c", NodeKind.COLLECTIVE, (), 1e-6, comm=comm) for number in range(calls))
        groups = _CountedGroups({"1": tuple(range(4))})
        job = JobGraph(tuple(RankGraph(rank, str(rank), "Chakra", nodes) for rank in range(4)), groups)
        meetings(job, lengths := NodeLengths(job, None))
        assert all(map(lengths.is_complete, nodes))
        counts.append(groups.asked)
    assert counts[1] <= counts[0] + 49  # once more for each meeting, and not for each call of a rank


class _CountedGroups(dict[str, tuple[int, ...]]):
    """Groups that count how often their ranks are asked for."""

    asked = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[node(0, COLLECTIVE, 1, comm_size=8)], [node(0, COLLECTIVE, 1, comm_size=9)]], "ranks call different things"),
        ([[node(0, COLLECTIVE, 1, comm_size=8)], [node(0, COMPUTE, 1)]], "rank 1 has no call that belongs to it"),
        ([[node(0, SEND, 1, comm_dst=1, comm_size=8)], [node(0, COMPUTE, 1)]], "rank 1 has no call that belongs to it"),
        ([[node(0, SEND, 1, comm_dst=0, comm_size=8)]], "rank 0 sends to itself"),
        ([[node(0, SEND, 1, comm_dst=-7, comm_size=8)]], "is no rank"),
        ([[node(0, COMPUTE, num_ops=5)]], "has no duration"),
        ([[node(0, COLLECTIVE, comm_size=8)]], "has no duration"),
    ],
)
def test_traces_that_cannot_be_played_are_named(tmp_path: Path, ranks: list[list[ChakraNode]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        played(tmp_path, *ranks)


def test_ranks_that_wait_for_each_other_are_named(tmp_path: Path) -> None:
    """Each receives before it sends what the other one receives."""
    ranks = [
        [
            node(0, RECEIVE, 1, comm_src=1 - rank, comm_size=4),
            node(1, SEND, 1, after=[0], comm_dst=1 - rank, comm_size=4),
        ]
        for rank in range(2)
    ]
    with pytest.raises(InputError, match="wait for each other for ever") as problem:
        played(tmp_path, *ranks)
    assert problem.value.found == "rank 0 in operation 0; rank 1 in operation 0"


def test_communication_with_ranks_that_have_no_trace_keeps_its_length(tmp_path: Path) -> None:
    alone = played(tmp_path, [node(0, COLLECTIVE, 7, comm_size=8)], cluster="dgx_h100")
    assert alone.step_s == pytest.approx(7 * us)
    assert "1 communication with ranks that have no trace here" in alone.warnings[0]
    with pytest.raises(InputError, match="nothing tells which ranks take part"):
        played(tmp_path, [node(0, COLLECTIVE, comm_size=8)], cluster="dgx_h100")
    (tmp_path / "comm_group.json").write_text('{"1": [0, 1]}')
    idle = played(tmp_path, [node(0, COLLECTIVE, comm_size=8, pg_name="1")], cluster="dgx_h100")
    assert 1 * us < idle.step_s < 100 * us
