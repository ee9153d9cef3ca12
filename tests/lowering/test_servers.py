"""Data parallelism through parameter servers, synchronous and asynchronous."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.api import run
from simulator.config import load_workload
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.lowering.servers import exchange
from simulator.program import HostOperation
from simulator.step_result import StepResult
from tests.support.exact import assert_same
from tests.support.grids import grid

NIC_Bps = 10e9


def job(nic_Bps: float = NIC_Bps, slow: float | None = None, gpus: int = 1, **parallelism: Any) -> dict[str, Any]:
    """A model of 204 million parameters on nodes of one GPU and one NIC; ``slow``: the speed of the first GPU."""
    cluster: dict[str, Any] = {
        "name": "one",
        "node": {
            "gpus": {"type": "a100-sxm-80gb", "count": gpus},
            "pcie": {"generation": 6},
            "nics": {"count": 1, "bandwidth_bps": 8 * nic_Bps, "latency_s": 2e-6},
            "host_memory_bandwidth_Bps": 40e12,
        },
    }
    if slow is not None:
        cluster["overrides"] = [{"gpu": "node0.gpu0", "speed_scale": slow}]
    return {
        "name": "servers",
        "model": {"layers": 4, "hidden": 2048, "heads": 16, "vocab": 1024},
        "training": {"seq": 512, "global_batch": 32, "grad_dtype": "bf16"},
        "parallelism": {"data_parallel": "parameter_server", **parallelism},
        "cluster": cluster,
    }


def heavy(job: dict[str, Any]) -> dict[str, Any]:
    """Micro-batches so large that the host's launches do not matter."""
    job["training"] |= {"seq": 2048, "micro_batch": 4, "global_batch": 64}
    return job


def play(job: dict[str, Any], **simulation: bool) -> StepResult:
    result = run({**job, "simulation": simulation})
    check(result.program, result.spans)
    return result


def lasted(result: StepResult, lane: str) -> float:
    rows = result.timeline[result.timeline["lane"] == lane]
    return float(rows["end_s"].max() - rows["start_s"].min())


@pytest.mark.parametrize(("n", "servers"), [(1, 1), (2, 1), (4, 1), (4, 2), (8, 2)])
def test_push_and_pull_of_a_step(n: int, servers: int) -> None:
    """All at once after the backward pass: n workers push P gradients of 2 bytes and pull P weights of 2 bytes through
    the s NICs of the servers, or each through its own where that takes longer: 2 n 2P / (s NIC)."""
    result = play(job(dp=n, servers=servers, overlap={"grad_reduce": False}))
    nbytes = 2 * result.to_dict()["params_total"]
    together = lasted(result, "push") + lasted(result, "pull")
    reachable_Bps = result.costs.reachable_Bps("infiniband", NIC_Bps)
    assert together == pytest.approx(2 * nbytes / reachable_Bps * max(n / servers, 1), rel=0.01)
    assert result.to_dict()["communication"]["dp"]["bytes_per_gpu"] == pytest.approx(2 * nbytes, rel=1e-9)
    assert result.workload.cluster.nodes == n + servers


@pytest.mark.parametrize(("kind", "together"), [("parameter_server", 4), ("async", 1)])
def test_bytes_of_an_exchange_with_servers(kind: str, together: int) -> None:
    """1,000 parameters of 4 replicas: gradients of 2 bytes go, weights of 2 bytes come. Between, 12 bytes of master
    weights and moments are read and written, 2 for each gradient that has come are read, and 2 are written. Synchronous
    servers take the gradients of all replicas at once."""
    work = load_workload(job(dp=4, data_parallel=kind))
    steps = exchange(work, "grads", "dp", 1000, ("0B0",))
    assert [(step.label, step.after) for step in steps] == [
        ("grads push", ("0B0",)),
        ("grads update", ("grads push",)),
        ("grads", ("grads update",)),
    ]
    nbytes = [step.op.nbytes for step in steps if isinstance(step.op, HostOperation)]
    assert nbytes == [2000, 1000 * (2 * 12 + 2 * together + 2), 2000]


def test_overlap_hides_what_the_backward_pass_covers() -> None:
    after = play(job(dp=4, overlap={"grad_reduce": False}))
    beside = play(job(dp=4))
    assert beside.spans.step_time_s < after.spans.step_time_s
    # Pushes of later buckets go on while earlier ones come back: a NIC carries both ways at once.
    push, pull = (beside.timeline[beside.timeline["lane"] == lane] for lane in ("push", "pull"))
    assert pull["start_s"].min() < push["end_s"].max()


@pytest.mark.parametrize("n", [2, 4])
def test_one_slow_worker_halves_synchronous_throughput_and_not_asynchronous(n: int) -> None:
    """With NICs too fast to matter: synchronously all wait for the slow one. Asynchronously n - 1 workers do as many
    steps as before and one does half: n - 1/2 of n. The servers' update, which is not slower, shifts both a little."""
    fast = {"nic_Bps": 1e15, "dp": n, "bucket_bytes": 10**9}
    rates: dict[tuple[str, bool], float] = {}
    for mode in ("parameter_server", "async"):
        for slow in (False, True):
            result = run(heavy(job(**fast, slow=0.5 if slow else None, data_parallel=mode)))
            rates[mode, slow] = result.to_dict()["tokens_per_s"]
    assert rates["parameter_server", True] / rates["parameter_server", False] == pytest.approx(0.5, abs=0.06)
    assert rates["async", True] / rates["async", False] == pytest.approx((n - 0.5) / n, abs=0.06)


def test_throughput_of_workers_of_different_speed_is_the_sum_of_theirs() -> None:
    result = run(job(nic_Bps=1e15, slow=0.5, dp=2, data_parallel="async"))
    own = result.spans.own_period_s
    assert len(set(own.values())) == 2
    tokens = 32 * 512 / 2
    assert result.to_dict()["tokens_per_s"] == pytest.approx(sum(tokens / seconds for seconds in own.values()))
    breakdown = result.to_dict()["time_breakdown_s"]
    leaves = [value for key, value in breakdown.items() if key != "exposed"] + list(breakdown["exposed"].values())
    assert sum(leaves) == pytest.approx(result.spans.step_time_s, rel=1e-6)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_staleness_of_equal_workers(n: int) -> None:
    """Equal workers update once each per step: between a worker's pull and its update lie those of all n - 1 others,
    each half before and half after where they come together. One alone is never stale."""
    result = run(job(dp=n, data_parallel="async", overlap={"grad_reduce": False}))
    assert result.to_dict()["staleness"] == pytest.approx(n - 1)
    assert "staleness" not in run(job(dp=n)).to_dict()


def test_a_slow_worker_is_staler() -> None:
    """The fast one of two workers does two steps while the slow one does one. Between a pull and a push of the slow one
    lie the 2 updates of these. Between those of the fast one lies an update of the slow one in every other step. So the
    three steps of a period are stale by 2, 1 and 0 updates, 1 on average."""
    result = run(job(nic_Bps=1e15, slow=0.5, dp=2, data_parallel="async", overlap={"grad_reduce": False}))
    assert result.to_dict()["staleness"] == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("mode", ["parameter_server", "async"])
def test_a_stage_that_trains_nothing_has_no_step_of_the_optimizer(mode: str) -> None:
    """The first stage has the embedding and all layers, which are frozen; the second trains its head alone."""
    workload = job(gpus=2, data_parallel=mode, dp=2, pp=2, layers_per_stage=[4, 0])
    workload["training"] |= {"freeze": ["layers", "embedding"]}
    workload["model"] |= {"tied_embeddings": False}
    result = run(workload)
    labels = ["+".join(step.label for step in role.lanes["compute"]) for role in result.played_program.roles]
    assert {("optimizer" in lane) for lane in labels} == {True, False}


@pytest.mark.parametrize(
    ("mode", "layout"),
    grid(
        ["parameter_server", "async"],
        [{"dp": 4, "tp": 2}, {"dp": 2, "tp": 2, "pp": 2}, {"dp": 2, "pp": 2, "servers": 3}],
        every=2,
    ),
)
def test_folding_changes_nothing(mode: str, layout: dict[str, Any]) -> None:
    workload = job(gpus=2, data_parallel=mode, bucket_bytes=200_000_000, **layout)
    workload["training"] |= {"global_batch": 8}
    workload["model"] |= {"layers": 2}
    coalesce = mode == "async"  # many steps are played
    short, plain = (run({**workload, "simulation": {"fold": on, "coalesce": on or coalesce}}) for on in (True, False))
    assert_same(short, plain)
    assert len(short.spans.ranks) < len(plain.spans.ranks) or layout["dp"] == layout.get("pp")
    for result in (short, plain):
        if result.steady is None:
            check(result.program, result.spans)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero": 1}, ("parallelism.zero", "servers hold the optimizer state")),
        ({"offload": {"optimizer": "cpu"}}, ("parallelism.offload.optimizer",)),
        ({"grad_compression": "int8"}, ("parallelism.grad_compression",)),
        ({"data_parallel": "allreduce", "servers": 2}, ("parallelism.servers", "no meaning")),
        ({"data_parallel": "async", "pp": 2, "schedule": "zb_h2"}, ("parallelism.schedule",)),
        ({"pp": 2, "schedule": "dualpipe"}, ("parallelism.schedule", "two ranks")),
    ],
)
def test_what_servers_do_not_go_with(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as refusal:
        load_workload(job(**{"dp": 2, **changes}))
    assert all(word in str(refusal.value) for word in words)


def test_clipping_and_unknown_hosts_are_refused() -> None:
    clipped = job(dp=2)
    clipped["training"]["grad_clip"] = 1.0
    with pytest.raises(InputError, match="norm"):
        load_workload(clipped)
    unknown = job(dp=2)
    del unknown["cluster"]["node"]["host_memory_bandwidth_Bps"]
    with pytest.raises(InputError, match="host_memory_bandwidth_Bps"):
        load_workload(unknown)


def test_given_nodes_hold_workers_and_servers() -> None:
    """Of 6 nodes 2 are servers', so that dp is 4; 3 nodes hold no worker beside 3 servers."""
    workload = job(servers=2)
    workload["cluster"]["nodes"] = 6
    loaded = load_workload(workload)
    assert loaded.parallelism.dp == 4
    assert loaded.server_nodes == (4, 5)
    workload["parallelism"]["servers"] = 6
    with pytest.raises(InputError, match="6 nodes for parameter servers"):
        load_workload(workload)
    workload["parallelism"]["servers"] = workload["cluster"]["nodes"] = 1
    with pytest.raises(InputError, match=r"1 node for parameter servers, 1 node of \S+ has "):
        load_workload(workload)


def test_memory_of_workers_and_servers() -> None:
    """A worker keeps weights and gradients, 2 bytes each; a server, of n = 4 workers, half of the parameters: 12 bytes
    of states, 2 of weights, and 2 of gradients of each worker."""
    result = run(job(dp=4, servers=2)).to_dict()
    params, stage = result["params_total"], result["memory"]["per_stage"][0]
    assert (stage["weights"], stage["gradients"], stage["optimizer"]) == (2 * params, 2 * params, 0)
    assert result["memory"]["host"]["peak_bytes"] == pytest.approx(params / 2 * (12 + 2 + 4 * 2))


@pytest.mark.parametrize(("servers", "gpus"), [(1, 1), (3, 1), (2, 4)])
def test_nodes_of_servers_are_paid_for(servers: int, gpus: int) -> None:
    """A server takes a node, whose GPUs are rented with it: (workers + servers x GPUs per node) x hours."""
    work = job(dp=4, servers=servers, gpus=gpus)
    work["training"]["total_tokens"] = 1e9
    work["cluster"]["price_per_gpu_hour"] = 2.0
    run_of = play(work).to_dict()["run"]
    assert run_of["server_gpus"] == servers * gpus
    assert run_of["gpu_hours"] == pytest.approx(24 * run_of["days"] * (4 + servers * gpus))
    assert run_of["cost"] == pytest.approx(2 * run_of["gpu_hours"])
