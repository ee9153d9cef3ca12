"""Nodes that are not alike: several types of GPU in one job, GPUs and network cards that are missing."""

from __future__ import annotations

import json
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import pytest

from simulator import run, share
from simulator.cli.app import main
from simulator.cluster import Cluster, build_cluster
from simulator.config import load_cluster, load_workload
from simulator.config.profile import load_profile
from simulator.config.section import as_data
from simulator.costs import Costs
from simulator.costs.slowest import slowest
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.hardware.transport import Protocol
from simulator.network.collectives import idle_seconds, plan
from tests.support.clusters import check_route
from tests.support.exact import assert_same
from tests.support.jobs import job, play

H100, A100 = "h100-sxm-80gb", "a100-sxm-80gb"


def mixed(h100: int = 1, a100: int = 1, **keys: Any) -> dict[str, Any]:
    groups = [{"count": h100, "node": "dgx_h100"}, {"count": a100, "node": "dgx_a100"}]
    return {"name": "mixed", "groups": groups, "fabric": {"kind": "rail_fat_tree", "tiers": 3, "radix": 40}, **keys}


#: Clusters of two nodes or more, at least 14 GPUs, that break one symmetry each.
ODD: dict[str, dict[str, Any]] = {
    "mixed": mixed(),
    "missing GPU": {"name": "dgx_a100", "nodes": 2, "overrides": [{"gpu": "node1.gpu4", "missing": True}]},
    "missing GPU of every node": {
        "name": "dgx_a100",
        "nodes": 3,
        "overrides": [{"gpu": "node*.gpu0", "missing": True}],
    },
    "missing node": {"name": "dgx_a100", "nodes": 3, "overrides": [{"gpu": "node1.gpu*", "missing": True}]},
    "missing card": {"name": "dgx_a100", "nodes": 2, "overrides": [{"nic": "node0.nic3", "missing": True}]},
    "slow cards": {"name": "dgx_a100", "nodes": 2, "overrides": [{"link": "node1.nic*", "bandwidth_scale": 0.5}]},
    "all at once": mixed(
        overrides=[
            {"gpu": "node0.gpu1", "missing": True},
            {"nic": "node1.nic7", "missing": True},
            {"gpu": "node1.gpu2", "speed_scale": 0.7},
            {"link": "node0.nic5:tx", "bandwidth_scale": 0.1},
        ]
    ),
}


def test_sizes_of_a_mixed_cluster_follow_from_its_groups() -> None:
    """3 x 8 and 2 x 8 GPUs less the ones named; nodes and GPUs keep their numbers, ranks do not."""
    spec = load_cluster(
        mixed(3, 2, overrides=[{"gpu": "node*.gpu0", "missing": True}, {"gpu": "node4.gpu*", "missing": True}])
    )
    assert (spec.nodes, spec.n_gpus, spec.gpu_types) == (5, 4 * 7, (H100, A100))
    built = build_cluster(spec)
    assert [gpu.name for gpu in built.gpus[:8]] == [f"node0.gpu{i}" for i in range(1, 8)] + ["node1.gpu1"]
    assert {gpu.type for gpu in built.gpus[:21]} == {H100}
    assert {gpu.type for gpu in built.gpus[21:]} == {A100}
    assert [len(built.gpus_of(node)) for node in range(5)] == [7, 7, 7, 7, 0]


@pytest.mark.parametrize("name", ODD)
def test_counting_gpus_is_counting_places(name: str) -> None:
    """`gpus_on` and `nodes_for` against going through all GPUs one by one."""
    spec = load_cluster(ODD[name])
    places = list(spec.places())
    assert len(places) == spec.n_gpus == len(build_cluster(spec).gpus)
    for nodes in range(spec.nodes + 1):
        assert spec.gpus_on(nodes) == sum(node < nodes for node, _ in places)
    for gpus in range(1, len(places) + 1):
        assert spec.nodes_for(gpus) == places[gpus - 1][0] + 1


@pytest.mark.parametrize("name", ODD)
def test_end_points_and_routes_of_odd_nodes(name: str) -> None:
    built = build_cluster(load_cluster(ODD[name]))
    ends = [*range(len(built.gpus)), *(built.host(node) for node in range(built.n_nodes))]
    assert [built.end(*built.locate(end)) for end in ends] == ends
    gone = [
        f"node{node}.{kind}{i}"
        for node, kind, i in ((1, "gpu", 4), (0, "nic", 3))
        if name == f"missing {'GPU' if kind == 'gpu' else 'card'}"
    ]
    assert not any(end in (link.src, link.dst) for link in built.links for end in gone)
    for a, b in islice(permutations(range(0, len(built.gpus), 3), 2), 60):
        check_route(built, a, b)


def test_without_a_card_its_gpu_uses_the_nearest_and_the_rail_has_none() -> None:
    """Without NIC 3 GPU 3 takes NIC 2 beside it; under one leaf per rail, a message for a GPU on rail 3 of the other
    node has to arrive on a rail that both nodes have."""
    built = build_cluster(load_cluster(ODD["missing card"]))
    assert [built.own_nics(gpu)[0] for gpu in range(8)] == [0, 1, 2, 2, 4, 5, 6, 7]
    names = [built.links[i].name for i in built.route(0, 8 + 3)]
    assert [name for name in names if ".nic" in name and "pcie" not in name] == ["node0.nic0:tx", "node1.nic0:rx"]
    assert "node1.gpu3.nvlink:rx" in names


def test_a_ring_through_a_node_with_a_missing_card_runs_on_the_rails_that_are_left() -> None:
    """Seven of eight rails carry the ring of 2 x 8 GPUs, each 2 (n-1)/n / 7 of the message instead of / 8."""
    nbytes, seconds, costs = 2.0**34, {}, Costs.from_profile(load_profile(A100))
    for name in ("missing card", "whole"):
        built = build_cluster(load_cluster(ODD.get(name, {"name": "dgx_a100", "nodes": 2})))
        chosen = plan("all_reduce", nbytes, range(16), built, costs, "ring")
        sent = {built.links[i].name: load * chosen.phases[0].nbytes for i, load in chosen.phases[0].loads}
        rails = 7 if name == "missing card" else 8
        tx = [sent[f"node0.nic{k}:tx"] for k in range(8) if f"node0.nic{k}:tx" in sent]
        assert tx == pytest.approx([2 * 15 / 16 * nbytes / rails] * rails)
        seconds[name] = idle_seconds(chosen, built, costs)
    assert seconds["missing card"] == pytest.approx(seconds["whole"] * 8 / 7, rel=0.02)


def test_gpus_of_two_vendors_do_not_work_together() -> None:
    """NCCL and RCCL do not talk: a job, or a collective, across both is refused; on the nodes of one, or as two jobs
    that share the fabric, they run."""
    groups = [{"count": 1, "node": "dgx_h100"}, {"count": 1, "node": "mi300x"}]
    node = {"name": "both", "groups": groups, "fabric": {"kind": "fat_tree"}}
    one = job(parallelism__tp=8) | {"cluster": node}
    with pytest.raises(InputError, match="NCCL and RCCL") as caught:
        load_workload(one | {"parallelism": {"tp": 8, "dp": 2}})
    assert "amd: mi300x-192gb" in str(caught.value)
    alone = [one | {"name": name, "parallelism": {"tp": 8, "dp": 1}, "placement": [at]} for at, name in enumerate("ab")]
    results = [run(workload) for workload in alone]
    assert [set(result.gpus) for result in results] == [{H100}, {"mi300x-192gb"}]
    assert [set(result.gpus) for result in share(alone).results] == [{H100}, {"mi300x-192gb"}]


def test_a_collective_of_two_vendors_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "both.yaml"
    path.write_text("groups: [{count: 1, node: dgx_h100}, {count: 1, node: mi300x}]\nfabric: {kind: fat_tree}\n")
    for ranks, status in (("0-7", 0), ("8-15", 0), ("0,8", 2)):
        with pytest.raises(SystemExit) as caught:
            main(["collective", "--cluster", str(path), "--op", "all_gather", "--sizes", "1M", "--ranks", ranks])
        assert caught.value.code == status
    assert "NCCL and RCCL" in capsys.readouterr().err


SECTIONS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "dp": 7, "zero": 1},
    {"dp": 14},
    {"tp": 2, "pp": 2, "dp": 3},
    {"dp": 7, "pp": 2, "zero": 2},
)


@pytest.mark.parametrize(("name", "section"), list(zip(ODD, SECTIONS * 2, strict=False)), ids=str)
def test_folding_is_exact_on_odd_clusters(name: str, section: dict[str, Any]) -> None:
    work = job(model__layers=2, training__global_batch=2 * section["dp"]) | {
        "parallelism": section,
        "cluster": ODD[name],
    }
    short = play(work)
    plain = play(work, fold=False, coalesce=False)
    assert_same(short, plain)
    for result in (short, plain):
        check(result.program, result.spans)


def test_what_breaks_a_symmetry_unfolds_what_it_touches() -> None:
    """16 equal replicas are one; H100 and A100 nodes are two; and of 14 replicas with a GPU missing in one of two nodes
    those on its rail, and the GPUs of its node, differ from the others, not all from all."""
    folded = {}
    for name, cluster, dp in (
        ("whole", {"name": "dgx_a100", "nodes": 2}, 16),
        ("mixed", mixed(), 16),
        ("missing GPU", ODD["missing GPU of every node"], 21),
    ):
        work = job(training__global_batch=dp) | {"parallelism": {"dp": dp}, "cluster": cluster}
        folded[name] = len(run(work).spans.ranks)
    assert folded == {"whole": 1, "mixed": 2, "missing GPU": 1}


def test_in_a_mixed_job_every_gpu_has_its_own_speed_and_the_slower_decides() -> None:
    """Forward passes last as on nodes of one type. With their gradients the H100s wait for the A100s', so that the step
    is no shorter than either type's, and hardly longer than A100s'."""
    work = {
        "model": {"layers": 4, "hidden": 2048, "heads": 16, "vocab": 32000},
        "training": {"seq": 1024, "global_batch": 16},
        "parallelism": {"dp": 16},
    }
    both = run(work | {"cluster": mixed()})
    alone = {
        gpu: run(work | {"cluster": {"name": name, "nodes": 2}})
        for gpu, name in ((H100, "dgx_h100"), (A100, "dgx_a100"))
    }

    def forward(result: Any, rank: int) -> float:
        """Nothing is communicated meanwhile, so that kernels are alone."""
        rows = result.timeline
        mine = rows[(rows["rank"] == rank) & (rows["phase"] == "F")]
        return float((mine["end_s"] - mine["start_s"]).sum())

    assert both.gpus == (H100,) * 8 + (A100,) * 8
    assert forward(both, 8) == pytest.approx(forward(alone[A100], 0), rel=1e-9)
    # Who waits for others draws less, and may run at a higher clock.
    assert 0.9 * forward(alone[H100], 0) <= forward(both, 0) <= forward(alone[H100], 0) * (1 + 1e-9)
    steps = {gpu: result.spans.step_time_s for gpu, result in alone.items()}
    assert steps[H100] < steps[A100] <= both.spans.step_time_s * (1 + 1e-9)
    assert both.spans.step_time_s < 1.1 * steps[A100]
    answer = both.to_dict()
    peaks = [load_profile(gpu).gpu_spec.peak_flops_per_s["bf16"].value for gpu in (H100, A100)]
    assert answer["peak_flops_per_s_per_gpu"] == pytest.approx(sum(peaks) / 2)
    assert answer["calibration"]["gpu"] == f"{H100}, {A100}"


def test_of_transports_the_slower_constants_hold_between_types() -> None:
    costs = Costs.from_profiles({gpu: load_profile(gpu) for gpu in (H100, A100)})
    ours = [costs.for_gpu(gpu) for gpu in (H100, A100)]
    assert costs.among([A100]) is ours[1]
    # A node of which only the host takes part may have GPUs without a profile.
    fresh = Costs.from_profiles({gpu: load_profile(gpu) for gpu in (H100, A100)})
    assert fresh.among([A100, "h200-sxm-141gb"]).transport("nvlink") == ours[1].transport("nvlink")
    for kind in costs.transports:
        both, each = costs.transport(kind), [one.transport(kind) for one in ours]
        assert both.efficiency == min(one.efficiency for one in each)
        for name, protocol in both.protocols.items():
            of_each = [one.protocols[name] for one in each]
            assert protocol.hop_latency_s == max(one.hop_latency_s for one in of_each)
            assert protocol.bandwidth_fraction == min(one.bandwidth_fraction for one in of_each)


def test_filling_of_each_head_is_the_longer_one_between_types() -> None:
    """Of an H100's and a GB200's in the switch, whichever comes first."""
    of_each = [load_profile(gpu).transports["nvlink"].ways("in_switch")["simple"] for gpu in (H100, "gb200-186gb")]
    assert of_each[0].head_bytes is None
    assert slowest(of_each).head_bytes == slowest(of_each[::-1]).head_bytes == of_each[1].head_bytes is not None


@pytest.mark.parametrize(("one", "other", "expected"), [(1e6, 4e6, 4e6), (4e6, None, None), (None, None, None)])
def test_filling_ends_between_types_where_it_ends_last(one: float | None, other: float | None, expected: float) -> None:
    """Filling that goes on for longer, or for ever (None), is the slower one at every size."""
    protocols = [
        Protocol(base_latency_s=0.0, hop_latency_s=0.0, bandwidth_fraction=1.0, half_bytes=1e6, full_bytes=full)
        for full in (one, other)
    ]
    assert [slowest(pair).full_bytes for pair in (protocols, protocols[::-1])] == [expected] * 2


def test_costs_of_a_type_without_a_profile_are_refused() -> None:
    costs = Costs.from_profiles({gpu: load_profile(gpu) for gpu in (H100, A100)})
    with pytest.raises(InputError, match="another GPU"):
        costs.for_gpu("v100-sxm-32gb")


def test_a_mixed_cluster_takes_a_profile_per_type() -> None:
    work = job() | {"parallelism": {"dp": 16}, "cluster": mixed()}
    assert load_workload(work).calibration == {H100: H100, A100: A100}
    given = load_workload(work | {"calibration": {A100: A100}})
    assert given.calibration == {H100: H100, A100: A100}
    for calibration, key in (
        (H100, "calibration"),
        ({A100: H100}, f"calibration.{A100}"),
        ({"b200": A100}, "calibration.b200"),
    ):
        with pytest.raises(InputError) as caught:
            load_workload(work | {"calibration": calibration})
        assert f"{key}: " in str(caught.value)


def test_a_job_is_described_by_the_gpus_that_it_is_on() -> None:
    """On the A100s of a cluster whose other GPUs have no profile, lack its precision, and are not those of its stack:
    all as on A100s alone. Jobs beside each other need profiles of theirs, too."""
    unknown = {**as_data(load_cluster("dgx_a100").node), "gpus": {"type": "tpu", "count": 8}}  # type: ignore[union-attr]
    cluster = mixed() | {"groups": [{"count": 1, "node": node} for node in (unknown, "dgx_a100", "dgx_h100")]}
    work = job(parallelism__tp=8, training__global_batch=16) | {"parallelism": {"tp": 8, "dp": 1}, "stack": "a100-efa"}
    alone, beside = run(work | {"cluster": "dgx_a100"}), run(work | {"cluster": cluster, "placement": [1]})
    assert beside.workload.calibrations == {A100: A100}
    assert beside.spans.step_time_s == pytest.approx(alone.spans.step_time_s, rel=1e-9)
    for part in ("calibration", "accuracy"):
        assert beside.to_dict()[part] == alone.to_dict()[part]
    mine = load_workload(work | {"cluster": cluster, "placement": [1], "calibration": A100, "stack": ""})
    assert mine.calibrations == {A100: A100}
    other = work | {"cluster": cluster, "placement": [2], "stack": "", "name": "other"}
    assert [set(result.gpus) for result in share([mine, other]).results] == [{A100}, {H100}]
    for placement, key in (([0], "cluster.groups"), ([2], "stack")):
        with pytest.raises(InputError) as caught:
            load_workload(work | {"cluster": cluster, "placement": placement})
        assert f"{key}: " in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"node": as_data(load_cluster("dgx_a100").node)}, "node", "either node or groups"),  # type: ignore[union-attr]
        ({"nodes": 3}, "nodes", "groups make 2 nodes"),
        ({"groups": [{"count": 0, "node": "dgx_a100"}]}, "groups[0].count", ">= 1"),
        ({"groups": [{"count": 2, "node": "dgx_a10"}]}, "groups[0].node", "dgx_a100"),
        ({"groups": [{"node": "dgx_a100"}]}, "groups[0].count", "required"),
        ({"groups": {"count": 1}}, "groups", "a list"),
        ({"groups": [{"count": 10**6, "node": "dgx_a100"}]}, "nodes", "at most 1,000,000 GPUs"),
        ({"overrides": [{"gpu": "node1.gpu8", "missing": True}]}, "overrides[0].gpu", "gpu0 to gpu7"),
        ({"overrides": [{"gpu": "node2.gpu*", "missing": True}]}, "overrides[0].gpu", "node0 to node1"),
        ({"overrides": [{"gpu": "node*.gpu*", "missing": True}]}, "overrides", "leave no GPU"),
        ({"overrides": [{"gpu": "node0.gpu1"}]}, "overrides[0].speed_scale", "missing: true"),
        (
            {"overrides": [{"gpu": "node0.gpu1", "missing": True, "speed_scale": 1}]},
            "overrides[0].speed_scale",
            "one of the two",
        ),
        ({"overrides": [{"nic": "node0.nic1", "missing": False}]}, "overrides[0].missing", "true"),
        ({"overrides": [{"nic": "node0.gpu1", "missing": True}]}, "overrides[0].nic", "node<i>.nic<j>"),
        ({"overrides": [{"nic": "node0.nic*", "missing": True}]}, "overrides", "no network card"),
        ({"overrides": [{"link": "node0.nc*", "bandwidth_scale": 0.5}]}, "overrides[0].link", "no link"),
        ({"overrides": [{"gpu": "node0.gpu1", "missing": True}] * 2}, "overrides[1].gpu", "overrides[0] is of it too"),
    ],
)
def test_a_bad_group_or_override_names_the_key(changes: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        build_cluster(load_cluster({**mixed(), **changes}))
    assert f"{key}: " in str(caught.value)
    assert words in str(caught.value)


def test_too_many_ranks_for_groups_ask_for_larger_ones() -> None:
    with pytest.raises(InputError) as caught:
        load_workload(job(training__global_batch=32) | {"parallelism": {"dp": 32}, "cluster": mixed()})
    assert "16" in str(caught.value)
    assert "larger counts in cluster.groups" in str(caught.value)


def test_a_cluster_that_lacks_every_gpu_is_not_asked_for_more_nodes() -> None:
    gone = {"cluster": {"name": "dgx_a100", "overrides": [{"gpu": "node*.gpu*", "missing": True}]}}
    with pytest.raises(InputError, match="leave no GPU") as caught:
        load_workload(job(training__global_batch=8) | {"parallelism": {"dp": 8}} | gone)
    assert "cluster.nodes" not in str(caught.value)


def test_a_mixed_cluster_in_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    path = tmp_path / "mixed.json.yaml"
    path.write_text(json.dumps(ODD["all at once"]))
    for command in (["topology", str(path)], ["topology", str(path), "--plot", str(tmp_path / "m.svg")]):
        with pytest.raises(SystemExit) as caught:
            main(command)
        assert caught.value.code == 0
        assert f"1 node x 8 {H100} + 1 node x 8 {A100} = 15 GPUs" in capsys.readouterr().out
    for output in ([], ["--json", "-"]):
        with pytest.raises(SystemExit) as caught:
            main(["collective", "--cluster", str(path), "--op", "all_reduce", "--sizes", "1M", *output])
        assert caught.value.code == 0
    table, _, answer = capsys.readouterr().out.partition("{")
    answer = json.loads("{" + answer)
    assert (answer["n_ranks"], answer["calibration"]) == (15, f"{H100}, {A100}")
    told = [line.partition(":")[0] for line in table.splitlines() if line.startswith("Constants")]
    assert told == [f"Constants of links on {gpu}" for gpu in (H100, A100)]
    assert list(dict.fromkeys(link["gpu"] for link in answer["links"])) == [H100, A100]


def test_nodes_of_one_layout_share_it() -> None:
    built: Cluster = build_cluster(load_cluster({**ODD["missing GPU"], "nodes": 64}))
    assert len({id(layout) for layout in built.layouts}) == 2
