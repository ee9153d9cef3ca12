"""Several jobs on one cluster at once, and traffic of others beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import simulator
from simulator.cli.app import main
from simulator.cluster import build_cluster
from simulator.config import load_workload
from simulator.config.catalog import find
from simulator.config.section import as_data
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.engine import Placed, simulate, simulate_together
from simulator.errors import InputError
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.network.collectives import idle_seconds, plan
from simulator.program import Collective, Program, Role, Step
from tests.support.clusters import CLUSTERS, HOP_s, NIC_Bps, nic_cluster
from tests.support.grids import every_pair, one_in
from tests.support.jobs import FAST_HOSTS, job
from tests.support.transfers import at_once, ends

IDEAL = Costs.ideal()
#: Leaves of four nodes of one GPU, whose 40 GB/s meet in an uplink of 10.
SPEC = CLUSTERS["oversubscribed"]
CLUSTER = {key: value for key, value in SPEC.items() if key != "nodes"} | {
    "node": {**SPEC["node"], "gpus": {"type": "a100-sxm-80gb", "count": 1}, **FAST_HOSTS}
}


def small(name: str = "a", **changes: Any) -> dict[str, Any]:
    """Four replicas that reduce 80 MB of gradients, most of their step."""
    changes = {"model__layers": 2, "model__hidden": 2048, "parallelism__dp": 4, "training__global_batch": 32, **changes}
    return job(**changes) | {"name": name, "cluster": CLUSTER}


def shared(*jobs: dict[str, Any], **set_: Any) -> dict[str, Any]:
    return simulator.share(jobs, set=set_).to_dict()


# Several jobs


def test_jobs_under_leaves_of_their_own_lose_nothing() -> None:
    """Packed, each has the four nodes of one leaf: no link in common."""
    result = shared(small(), small())
    assert [run["name"] for run in result["runs"]] == ["a", "a (2)"]
    assert [run["sharing"]["nodes"] for run in result["runs"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for run in result["runs"]:
        assert run["step_time_s"] == pytest.approx(run["sharing"]["alone_step_time_s"], rel=1e-9)
        assert run["sharing"]["lost_s"] == pytest.approx(0.0, abs=1e-9)
        assert run["contention"] == []


def test_a_job_on_nodes_behind_those_that_it_needs_is_advised_and_has_no_other_split() -> None:
    """26 billion parameters on 2 GPUs, the last stage with the more layers: settings that fit are played on the nodes
    that the job has. Splits would be compared with steps that others lengthen."""
    layout = {"pp": 2, "layers_per_stage": [2, 6]}
    large = small(model__layers=8, model__hidden=16384, model__heads=64, training__global_batch=2) | {
        "parallelism": layout
    }
    for run in shared(large, large)["runs"]:
        assert not run["memory"]["fits"]
        assert run["memory"]["advice"]
        assert run["stages"]["layers_per_stage"] is None


IDLE: dict[str, Any] = {
    "name": "idle",
    "model": {"layers": 1, "hidden": 256, "heads": 8, "vocab": 1000},
    "training": {"seq": 128, "global_batch": 1},
}
SLOW_TO_SETTLE: dict[str, dict[str, Any]] = {
    "servers": {"tp": 2, "pp": 2, "schedule": "zb_h1", "data_parallel": "parameter_server", "bucket_bytes": 1_000_000},
    "asynchronous": {"dp": 4, "data_parallel": "async"},
    "next step begun early": {"dp": 2, "pp": 2, "schedule": "async_1f1b"},
    "pulls that meet": {"dp": 4, "data_parallel": "parameter_server", "servers": 2},
}


@pytest.mark.parametrize("name", one_in(2, SLOW_TO_SETTLE))
def test_beside_an_idle_job_nothing_is_lost_however_long_a_period_takes_to_settle(name: str) -> None:
    """The idle job has one GPU on a node of its own, and sends nothing. Alone as beside it a job is measured over the
    same steps, at the clocks that its power limit leaves it alone."""
    cluster = {"name": "dgx_h100", "fabric": {"kind": "rail_only"}}
    one = job(model__layers=2, model__hidden=1024, training__global_batch=8)
    result = shared(one | {"parallelism": SLOW_TO_SETTLE[name], "cluster": cluster}, IDLE | {"cluster": cluster})
    for run in result["runs"]:
        assert run["sharing"]["slowdown"] == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("shortcuts", [True, False])
def test_equal_jobs_that_interleave_meet_in_every_step(shortcuts: bool) -> None:
    """Two jobs with every other node: each ring crosses each leaf's uplink once, at a NIC's speed alone, at half of it
    while both reduce. Equal jobs stay in step, so that what a step loses is what its reductions lose on the uplink,
    which the report names."""
    changes = {"simulation.fold": shortcuts, "simulation.coalesce": shortcuts}
    result = shared(small(), small(), placement="interleaved", **changes)
    assert [run["sharing"]["nodes"] for run in result["runs"]] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    for run in result["runs"]:
        assert 1.5 < run["sharing"]["slowdown"] < 2
        (row,) = run["contention"]
        assert ".up" in row["link"]
        assert row["count"] == 4
        assert [(flow["job"], flow["axis"], flow["op"]) for flow in row["flows"]] == [
            ("a", "dp", "all_reduce"),
            ("a (2)", "dp", "all_reduce"),
        ]
        for flow in row["flows"]:
            assert flow["lost_s"] == pytest.approx(run["sharing"]["lost_s"], rel=1e-6)


def test_jobs_of_unlike_steps_repeat_them_until_each_has_found_its_period() -> None:
    """One job's step is half as long again as the other's: neither is ever without the other, and each loses as much as
    it reduces beside it, less than if they were in step. What a job's step consists of adds up to its period."""
    a, b = small("a"), small("b", training__global_batch=96)
    result = shared(a, b, placement="interleaved")
    fast, slow = result["runs"]
    assert fast["sharing"]["steps_played"] > slow["sharing"]["steps_played"]
    in_step = shared(a, a, placement="interleaved")["runs"][0]["sharing"]["lost_s"]
    for run in result["runs"]:
        assert run["steady_period"]
        assert 0 < run["sharing"]["lost_s"] <= in_step * (1 + 1e-9)
        parts = run["time_breakdown_s"]
        total = sum(value for key, value in parts.items() if key != "exposed") + sum(parts["exposed"].values())
        assert total == pytest.approx(run["step_time_s"], rel=1e-9)
    assert json.dumps(shared(a, b, placement="interleaved")["runs"][1]["contention"]) == json.dumps(slow["contention"])


def test_three_jobs_and_more_share_too() -> None:
    two = shared(small(), small(), placement="interleaved")["runs"][0]["sharing"]
    three = shared(small(), small(), small(), placement="interleaved")["runs"]
    assert [run["name"] for run in three] == ["a", "a (2)", "a (3)"]
    assert three[0]["sharing"]["nodes"] == [0, 3, 6, 9]
    assert all(run["sharing"]["slowdown"] > two["slowdown"] for run in three)


def test_jobs_take_the_nodes_that_they_list() -> None:
    listed = small("listed") | {"placement": [1, 6, 2, 9]}
    result = shared(small("packed"), listed, small("mixed") | {"placement": "interleaved"})
    assert [run["sharing"]["nodes"] for run in result["runs"]] == [[0, 3, 4, 5], [1, 6, 2, 9], [7, 8, 10, 11]]
    assert result["share_fabric"] == {"cluster": "oversubscribed", "nodes": 12}


def test_a_job_alone_runs_on_the_nodes_that_it_lists() -> None:
    """Nodes 0 to 3 have a leaf of their own; 0, 1, 4 and 5 lie under two, and the ring crosses their uplinks."""
    packed, spread = (simulator.run(small() | {"placement": nodes}) for nodes in ([0, 1, 2, 3], [0, 1, 4, 5]))
    assert packed.spans.step_time_s == pytest.approx(simulator.run(small()).spans.step_time_s, rel=1e-12)
    crossed = [
        {row["links"] for row in result.to_dict()["communication"]["dp"]["links"]} for result in (packed, spread)
    ]
    assert crossed[1] - crossed[0] == {"rail*.leaf*.up"}
    assert spread.workload.cluster.nodes == 6


ODD_CLUSTERS: dict[str, dict[str, Any]] = {
    "node1 lacks all": {"overrides": [{"gpu": "node1.gpu*", "missing": True}]},
    "nodes 2 and 3 lack one": {"overrides": [{"gpu": f"node{node}.gpu1", "missing": True} for node in (2, 3)]},
    "first lacks one": {"overrides": [{"gpu": "node0.gpu0", "missing": True}]},
}


@every_pair({"placement": ["packed", "interleaved"], "servers": [0, 1], "name": ODD_CLUSTERS})
def test_jobs_on_nodes_with_missing_gpus_have_a_gpu_for_every_rank(name: str, servers: int, placement: str) -> None:
    """Two jobs of four ranks on nodes of two GPUs, some of which are missing: no node is of both, workers' nodes hold
    the ranks and would not without the last one, a server has a node without ranks, and no node is left over that a
    job could have had."""
    node = {**CLUSTERS["one_leaf"]["node"], "host_memory_bandwidth_Bps": 1e11}
    node["gpus"] = {"type": "a100-sxm-80gb", "count": 2}
    cluster = {"name": name, "nodes": 4, "node": node, "fabric": {"radix": 32}, **ODD_CLUSTERS[name]}
    one = small(**({"parallelism__data_parallel": "parameter_server"} if servers else {})) | {"cluster": cluster}
    both = simulator.share([one, one], set={"placement": placement})
    taken = [node for result in both.results for node in result.workload.own_nodes]
    assert len(set(taken)) == len(taken)
    assert sorted(taken) == list(range(len(taken)))
    for result, run in zip(both.results, both.to_dict()["runs"], strict=True):
        nodes = run["sharing"]["nodes"]
        workers = nodes[: len(nodes) - servers]
        held = [len(both.cluster.gpus_of(node)) for node in workers]
        assert sum(held) >= 4 > sum(held[:-1])
        assert len(set(result.placed.gpus)) == 4
        assert {both.cluster.node_of(gpu) for gpu in result.placed.gpus} <= set(workers)
        assert list(result.placed.servers) == nodes[len(nodes) - servers :] if servers else not result.placed.servers


def test_as_many_nodes_as_a_list_needs_where_gpus_are_missing() -> None:
    """Nodes 2 and 3 lack one of two GPUs: four ranks need three of the nodes 1 to 3, where 0 and 1 would do."""
    node = {**CLUSTERS["one_leaf"]["node"], "gpus": {"type": "a100-sxm-80gb", "count": 2}}
    cluster = {"name": "odd", "node": node, **ODD_CLUSTERS["nodes 2 and 3 lack one"]}
    spread = load_workload(small() | {"cluster": cluster, "placement": [3, 2, 1]})
    assert (spread.cluster.nodes, spread.n_ranks, spread.own_nodes) == (4, 4, (3, 2, 1))
    with pytest.raises(InputError, match="have 3"):
        load_workload(small() | {"cluster": cluster, "placement": [1, 2]})
    counted = small() | {"cluster": {**cluster, "nodes": 4}, "placement": [1, 2, 3]}
    del counted["parallelism"]["dp"]
    assert load_workload(counted).parallelism.dp == 4


@pytest.mark.parametrize("method", ["parameter_server", "async"])
def test_servers_are_the_jobs_own(method: str) -> None:
    """Workers first, then servers, on whatever nodes the job has."""
    node = {**CLUSTER["node"], "host_memory_bandwidth_Bps": 1e11}
    one = small("ps", parallelism__data_parallel=method) | {"cluster": {**CLUSTER, "node": node}}
    result = shared(one, one, placement="interleaved")
    assert [run["sharing"]["nodes"] for run in result["runs"]] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert all(run["sharing"]["lost_s"] > -1e-9 for run in result["runs"])


@pytest.mark.parametrize(
    ("jobs", "key", "message"),
    [
        ([small()], "share_fabric", "with nobody"),
        ([small(), job(parallelism__dp=8)], "cluster", "different clusters"),
        ([small() | {"placement": [0, 1, 2, 3]}, small("b") | {"placement": [3, 4, 5, 6]}], "placement", "node 3"),
    ],
)
def test_what_cannot_share_is_refused(jobs: list[dict[str, Any]], key: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        simulator.share(jobs)
    assert caught.value.key == key


def test_jobs_that_share_have_one_calibration_per_type_of_gpu(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(find("profile", "a100-sxm-80gb").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(InputError, match="a and b share links, which have one efficiency") as caught:
        simulator.share([small(), small("b") | {"calibration": str(mine)}])
    assert caught.value.key == "calibration"


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ([0, 1], "needs 4 GPUs, and the workers' nodes have 2"),
        ([0, 1, 2, 3, 4], "without its node 4"),
        ([0, 1, 2, 2], "taken twice"),
        ("scattered", "placement"),
        ([0, 1, 2, -1], "placement"),
    ],
)
def test_a_placement_names_as_many_nodes_as_the_job_needs(placement: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_workload(small() | {"placement": placement})


def test_the_command_shares_two_workloads_or_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = []
    for name in ("one", "two", "three"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(small(name)))
        names.append(str(path))

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as caught:
            main(["run", *arguments])
        assert isinstance(caught.value.code, int)
        return caught.value.code

    mixed = ("--share-fabric", "--set", "placement=interleaved")
    assert run(*names, *mixed) == 0
    out = capsys.readouterr().out
    assert "On 12 nodes of oversubscribed at once" in out
    assert "three: dp all reduce" in out
    assert run(*names[:2], *mixed, "--json", "-") == 0
    result = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in result["runs"]] == ["one", "two"]
    assert run(*names) == 2
    assert "--share-fabric" in capsys.readouterr().err
    assert run(names[0], "--share-fabric") == 2
    assert run(*names[:2], "--json", "-") == 0
    assert "share_fabric" not in json.loads(capsys.readouterr().out)


def test_a_job_among_others_is_the_job_alone_where_they_do_not_meet() -> None:
    """Row by row: ranks, names and times."""
    cluster = nic_cluster(4)
    program = at_once({"dp": [range(2)]}, Collective("s", "send_recv", 1e9, "dp", "dp"))
    placed = [Placed(program, IDEAL, gpus, ()) for gpus in ((0, 1), (2, 3))]
    alone = simulate_together(placed[:1], cluster)[0].frame()
    for timeline in simulate_together(placed, cluster):
        assert timeline.frame().equals(alone)


# Background traffic


def with_background(*flows: dict[str, Any], nodes: int = 2) -> ClusterSpec:
    return validated(ClusterSpec, {**as_data(nic_cluster(nodes).spec, defaults=False), "background": list(flows)})


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("others", [0.1, 0.25, 0.5, 0.75, 1.0])
def test_background_traffic_takes_its_share_and_no_more(others: float, fold: bool) -> None:
    """A flow that would take s C of a NIC of C leaves (1 - s) C, but half at least. A ring of two nodes sends S bytes
    through each NIC; where one way of one NIC is slower, all of it is. Its loss is the seconds added to it; the
    others lose 1 - 1 / (2 s) of every second where s is above a half."""
    shift = Collective("grads", "all_reduce", 1e9, "dp", "dp", algorithm="ring")
    left = max(1 - others, 0.5)
    expected = 2 * HOP_s + 1 / left
    for flow in (
        {"link": "node0.nic0:tx", "share": others},
        {"from": "node0.nic0", "to": "node1.nic0", "bandwidth_Bps": others * NIC_Bps},
        {"from": "node0.gpu0", "to": "node1.gpu0", "bandwidth_Bps": others * NIC_Bps},
    ):
        timeline = simulate(at_once({"dp": [range(2)]}, shift), build_cluster(with_background(flow)), IDEAL, fold=fold)
        assert ends(timeline)["step0"] == pytest.approx(expected, rel=1e-9)
        met = next(met for met in timeline.contention if met.link == "node0.nic0:tx")
        mine, background = ({flow.op: flow for flow in met.flows}[op] for op in ("all_reduce", "background"))
        assert mine.lost_s == pytest.approx(1 / left - 1, rel=1e-9)
        assert background.lost_s == pytest.approx(max(1 - 0.5 / others, 0) / left, rel=1e-9, abs=1e-12)
        assert background.job == ""


def test_background_traffic_by_pattern_is_that_of_every_link_that_it_means() -> None:
    """As with overrides: ``*`` is any characters but . and :, and each link has a flow of its own."""
    every = build_cluster(with_background({"link": "node*.nic0:tx", "share": 0.75}, nodes=4))
    assert [flow.name for flow in every.background] == [f"node{node}.nic0:tx" for node in range(4)]
    both = build_cluster(with_background({"link": "node1.nic*", "share": 0.5}, nodes=4))
    assert [flow.name for flow in both.background] == ["node1.nic0:tx", "node1.nic0:rx"]
    assert {flow.rate_Bps for flow in both.background} == {0.5 * NIC_Bps}
    listed = with_background(*[{"link": f"node{node}.nic0:tx", "share": 0.75} for node in range(4)], nodes=4)
    assert build_cluster(listed).background == every.background
    with pytest.raises(InputError, match="no link has such a name"):
        build_cluster(with_background({"link": "node*.nic7", "share": 0.5}))


@pytest.mark.parametrize("others", [0.25, 0.5, 1.0])
def test_the_table_of_a_collective_sees_background_traffic(others: float) -> None:
    """A ring over two nodes of four GPUs with a NIC each: one slowed NIC slows all of it, as in a step."""
    flow = {"link": "node0.nic2:rx", "share": others}
    spec = as_data(nic_cluster(2, 4).spec, defaults=False) | {"background": [flow]}
    cluster = build_cluster(validated(ClusterSpec, spec))
    seconds = idle_seconds(plan("all_reduce", 1e9, range(8), cluster, IDEAL, "ring"), cluster, IDEAL)
    ring = Collective("grads", "all_reduce", 1e9, "dp", "dp", algorithm="ring")
    timeline = simulate(at_once({"dp": [range(8)]}, ring), cluster, IDEAL)
    assert seconds == pytest.approx(timeline.step_time_s, rel=1e-9)
    # 2 x 7/8 GB over four NICs.
    assert seconds == pytest.approx(1.75 / 4 / max(1 - others, 0.5), rel=0.1)


def test_background_flows_share_with_each_other() -> None:
    """Two that would fill a NIC, and one that would take a tenth: 0.45, 0.45 and 0.1 without us; with us a third of
    what the small one leaves, 0.3."""
    flows = [{"link": "node0.nic0:tx", "share": share} for share in (1.0, 1.0, 0.1)]
    shift = Collective("s", "send_recv", 1e9, "dp", "dp")
    timeline = simulate(at_once({"dp": [range(2)]}, shift), build_cluster(with_background(*flows)), IDEAL)
    assert ends(timeline)["step0"] == pytest.approx(HOP_s + 1 / 0.3, rel=1e-9)


def test_background_traffic_elsewhere_changes_nothing() -> None:
    flow = {"from": "node2.nic0", "to": "node3.nic0", "bandwidth_Bps": NIC_Bps}
    shift = Collective("s", "send_recv", 1e9, "dp", "dp")
    timeline = simulate(at_once({"dp": [range(2)]}, shift), build_cluster(with_background(flow, nodes=4)), IDEAL)
    assert ends(timeline)["step0"] == pytest.approx(HOP_s + 1, rel=1e-12)
    assert all(flow.lost_s == 0 for met in timeline.contention for flow in met.flows if flow.job)


def test_a_step_beside_background_traffic_is_the_same_folded_or_not() -> None:
    workload = small(parallelism__pp=2, parallelism__dp=2)
    workload["cluster"] = {**CLUSTER, "background": [{"link": "node1.nic0", "share": 0.6}]}
    short, plain = (
        simulator.run({**workload, "simulation": {"fold": on, "coalesce": on}}).spans for on in (True, False)
    )
    assert short.step_time_s == pytest.approx(plain.step_time_s, rel=1e-9)
    assert short.step_time_s > simulator.run(workload | {"cluster": CLUSTER}).spans.step_time_s
    job_ = load_workload(workload)
    assert load_workload(job_.model_dump(exclude_unset=True)).cluster.background == job_.cluster.background


@pytest.mark.parametrize(
    ("flow", "key"),
    [
        ({"link": "node9.nic0", "share": 0.5}, "background[0].link"),
        ({"from": "node0.nic7", "to": "node1.nic0", "bandwidth_Bps": 1e9}, "background[0].from"),
        ({"from": "node0.nic0", "to": "node0.nic0", "bandwidth_Bps": 1e9}, "background[0].to"),
        ({"from": "node0.gpu0", "to": "node0.gpu0", "bandwidth_Bps": 1e9}, "background[0].to"),
        ({"from": "node0.gpu0", "to": "node1.nic0", "bandwidth_Bps": 1e9}, "background[0].from"),
    ],
)
def test_background_traffic_names_what_exists(flow: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        build_cluster(with_background(flow))
    assert caught.value.key == key


def test_a_rank_without_work_needs_no_network() -> None:
    """A program of nothing but a lane that sends to nobody ends at once beside traffic that never does."""
    program = Program(
        (Role("idle", {"dp": (Step("s", Collective("s", "send_recv", 0.0, "dp", "dp")),)}),), (0, 0), {"dp": ((0, 1),)}
    )
    flow = {"link": "node0.nic0", "share": 1.0}
    assert simulate(program, build_cluster(with_background(flow)), IDEAL).step_time_s == pytest.approx(HOP_s, rel=1e-9)
