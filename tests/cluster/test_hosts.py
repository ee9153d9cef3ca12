"""Hosts as end points: copies over shared PCIe, drives, the CPU's work, parameter servers, on the engine itself."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.cluster import Cluster, build_cluster
from simulator.cluster.device_routes import CPU, HOST_ENDS, NVME
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.costs.hosts import HOST_TRANSPORTS
from simulator.engine import simulate
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.network.collectives import plan
from simulator.program import Collective, Comm, HostOperation, Program, Role, Step
from simulator.timeline import Timeline
from tests.support.programs import comm_called

PCIE_Bps = 16 * 16e9 / 8 * 128 / 130
NIC_Bps = 10e9


def cluster(nodes: int = 1, gpus: int = 4, **node: Any) -> Cluster:
    """Nodes with two GPUs per PCIe switch, one NIC and two drives."""
    spec = {
        "name": "hosts",
        "nodes": nodes,
        "node": {
            "gpus": {"type": "ideal", "count": gpus},
            "pcie": {"generation": 4, "gpus_per_switch": 2},
            "nics": {"count": 1, "bandwidth_bps": 8 * NIC_Bps},
            "host_memory_bandwidth_Bps": 400e9,
            "nvme": {"count": 2, "read_Bps": 5e9, "write_Bps": 2e9},
            **node,
        },
    }
    return build_cluster(validated(ClusterSpec, spec))


def alone(n: int, *comms: Comm, servers: tuple[int, ...] = (), **groups: Any) -> Program:
    """``n`` ranks that make the same calls one after another."""
    lanes: dict[str, list[Step]] = {}
    before: tuple[str, ...] = ()
    for comm in comms:
        lanes.setdefault(comm.lane, []).append(Step(comm.name, comm, before))
        before = (comm.name,)
    role = Role("rank", {lane: tuple(steps) for lane, steps in lanes.items()})
    every = {"rank": tuple((rank,) for rank in range(n)), **groups}
    return Program((role,), (0,) * n, every, servers=servers)


def play(program: Program, built: Cluster) -> Timeline:
    """Folded, and the same unfolded."""
    folded, plain = (simulate(program, built, Costs.ideal(), fold=fold) for fold in (True, False))
    for timeline in (folded, plain):
        check(program, timeline)
    assert folded.step_time_s == pytest.approx(plain.step_time_s, rel=1e-9)
    for span in range(len(plain.rank)):
        twin = folded.simulated_as[int(plain.rank[span])]
        ends = folded.end_s[(folded.rank == twin) & [label == plain.labels[span] for label in folded.labels]]
        assert ends == pytest.approx([plain.end_s[span]], rel=1e-9)
    return folded


def test_end_points_are_the_gpus_and_then_the_hosts_of_all_nodes() -> None:
    built = cluster(nodes=3)
    ends = [built.end(node, slot) for node in range(3) for slot in range(4)]
    ends += [built.host(node, which) for node in range(3) for which in HOST_ENDS]
    assert ends == list(range(3 * 4 + 3 * len(HOST_ENDS)))
    assert [built.end(*built.locate(end)) for end in ends] == ends


@pytest.mark.parametrize(("op", "slots"), [("to_host", "tx"), ("from_host", "rx")])
def test_two_gpus_behind_one_pcie_switch_take_twice_as_long_as_one(op: str, slots: str) -> None:
    """A copy crosses the GPU's own PCIe link, which nobody shares, and the switch's uplink, which two GPUs do. GPUs 2
    and 3 are behind another switch, those of node 1 in another machine: they change nothing."""
    comm = comm_called(op, op, 1e9, "rank", "offload")
    times = {n: play(alone(n, comm), cluster(nodes=2)).step_time_s for n in (1, 2, 4, 8)}
    assert times[1] == pytest.approx(1e9 / PCIE_Bps, rel=1e-4)
    assert times[2] == pytest.approx(2 * times[1], rel=1e-4)
    assert times[4] == times[8] == pytest.approx(times[2], rel=1e-9)


def test_copies_share_the_uplink_with_other_traffic_and_not_with_what_goes_the_other_way() -> None:
    """PCIe is full duplex: out and in together last as long as the longer one. A ring over two switches without NVLink
    sends over the same uplinks, so that a copy beside it takes longer."""
    out, back = (
        HostOperation("out", "to_host", 1e9, "rank", "offload"),
        HostOperation("back", "from_host", 1e9, "rank", "offload"),
    )
    both = alone(1, out, back)
    together = Role("rank", {lane: (Step(s[0].label, s[0].op),) for lane, s in both.roles[0].lanes.items()})
    assert play(Program((together,), (0,), both.groups), cluster()).step_time_s == pytest.approx(
        1e9 / PCIE_Bps, rel=1e-4
    )
    ring = Collective("ring", "all_gather", 4e9, "dp", "dp")
    role = Role("rank", {"d2h": (Step("out", out),), "dp": (Step("ring", ring),)})
    groups = {"rank": tuple((rank,) for rank in range(4)), "dp": ((0, 1, 2, 3),)}
    beside = play(Program((role,), (0,) * 4, groups), cluster())
    copy_alone = play(alone(4, out), cluster()).step_time_s
    # Of a ring 0-1-2-3 each uplink carries one hop up, (n-1)/n of 4 GB; with two copies of 1 GB that is 5 GB.
    assert beside.step_time_s == pytest.approx(5e9 / PCIE_Bps, rel=1e-3)
    assert beside.end_s[[label == "out" for label in beside.labels]][0] > 1.4 * copy_alone


@pytest.mark.parametrize("n", [1, 2, 4])
def test_drives_and_the_cpu_are_shared_by_the_ranks_of_a_node(n: int) -> None:
    """Two drives write 4 GB/s together and read 10, whoever asks; an update moves bytes of the one memory."""
    for op, rate in (("to_nvme", 2 * 2e9), ("from_nvme", 2 * 5e9), ("host_update", 400e9)):
        comm = comm_called(op, op, 1e9, "rank", "offload")
        assert play(alone(n, comm), cluster(nodes=2)).step_time_s == pytest.approx(n * 1e9 / rate, rel=2e-3)


def test_cpu_adam_is_as_fast_as_published() -> None:
    """ZeRO-Offload's table 4: 10 billion parameters in 2.57 s on a DGX-2, whose 12 channels of DDR4-2666 give 256 GB/s;
    30 bytes per parameter (weights, two states, read and written, gradients read, fp16 weights written)."""
    rate = 12 * 2666e6 * 8 * HOST_TRANSPORTS["memory"].efficiency
    assert 10e9 * 30 / rate == pytest.approx(2.57, rel=0.01)


@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_push_and_pull_last_2_n_bytes_over_s_nics(n: int, servers: int) -> None:
    """n workers of one NIC each send their bytes to s servers, 1/s to each, into one NIC of each: n bytes / (s NIC)
    where that is more than what a worker's own NIC takes; then the same back."""
    nbytes = 1e9
    push, pull = (
        HostOperation("push", "push", nbytes, "rank", "dp"),
        HostOperation("pull", "pull", nbytes, "rank", "dp"),
    )
    built = cluster(nodes=n + servers, gpus=1)
    program = alone(n, push, pull, servers=tuple(range(n, n + servers)))
    assert play(program, built).step_time_s == pytest.approx(2 * nbytes / NIC_Bps * max(n / servers, 1), rel=0.01)


def test_servers_use_the_nic_of_the_workers_rail() -> None:
    """Eight GPUs of a node with eight NICs push at the speed of eight NICs to one server with eight."""
    node = {"nics": {"count": 4, "bandwidth_bps": 8 * NIC_Bps}, "host_memory_bandwidth_Bps": 4e12}
    push = HostOperation("push", "push", 1e9, "rank", "dp")
    one, four = (play(alone(n, push, servers=(1,)), cluster(nodes=2, **node)).step_time_s for n in (1, 4))
    assert one == pytest.approx(0.1, rel=0.01)
    assert four == pytest.approx(one, rel=1e-6)


def test_an_update_waits_for_all_of_its_group() -> None:
    """Two workers, one twice as far: both see the update begin when the second has pushed."""
    push = HostOperation("push", "push", 1e9, "rank", "dp")
    far = HostOperation("push", "push", 3e9, "rank", "dp")
    update = HostOperation("update", "server_update", 4e9, "dp", "optimizer")
    roles = tuple(
        Role(name, {"push": (Step("push", comm),), "server": (Step("update", update, ("push",)),)})
        for name, comm in (("near", push), ("far", far))
    )
    groups = {"rank": ((0,), (1,)), "dp": ((0, 1),)}
    timeline = play(Program(roles, (0, 1), groups, servers=(2,)), cluster(nodes=3, gpus=1))
    # 4 GB into one NIC of 10 GB/s, then 4 GB of the server's memory.
    updates = [label == "update" for label in timeline.labels]
    assert timeline.start_s[updates] == pytest.approx(0.4, rel=0.01)
    assert timeline.end_s[updates] == pytest.approx(0.4 + 4e9 / 400e9, rel=0.01)


def test_nodes_without_known_memory_have_no_host_to_go_to() -> None:
    built = cluster(host_memory_bandwidth_Bps=None, nvme={"count": 0})
    with pytest.raises(KeyError):
        built.route(0, built.host(0))
    known = cluster()
    assert [known.links[link].name for link in known.route(0, known.host(0))] == [
        "node0.gpu0.pcie:tx",
        "node0.pcie0.host:tx",
        "node0.memory",
    ]
    assert known.links[known.route(known.host(0), known.host(0, NVME))[-1]].name == "node0.nvme:tx"
    assert [known.links[link].name for link in known.route(known.host(0), known.host(0, CPU))] == ["node0.memory"]


def test_what_hosts_do_is_no_collective() -> None:
    with pytest.raises(InputError, match="unknown operation"):
        plan("to_host", 1e6, [0], cluster(), Costs.ideal())
