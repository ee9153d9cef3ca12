"""Advice on how to make a job fit, against simulating the job with that change."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from simulator import api, step_result
from simulator.analysis.training.advice import CANDIDATES, Trials, advice, few_rounds
from simulator.analysis.training.memory import RankMemory
from simulator.api import cluster_of, run
from simulator.cluster import Cluster
from simulator.config import Workload, altered, load_workload, parse_changes
from simulator.schedules import SCHEDULES
from simulator.units import GiB
from tests.support.clusters import with_unknown_hosts
from tests.support.grids import grid, one_in

JOBS: dict[str, dict[str, Any]] = {
    # Unfused attention with dropout: selective recompute and flash attention save much.
    "pipeline": {"parallelism.pp": 2, "parallelism.dp": 2},
    "gpipe": {"parallelism.pp": 2, "parallelism.dp": 2, "parallelism.schedule": "gpipe"},
    # Chunks of a rank keep different amounts: the last one has the logits of a large vocabulary.
    "chunks": {
        "parallelism.pp": 2,
        "parallelism.dp": 2,
        "parallelism.vpp": 2,
        "parallelism.schedule": "interleaved",
        "model.kv_heads": 4,
        "model.vocab": 128_000,
        "model.activation": "swiglu",
    },
    "fp32 without sequence parallelism": {
        "parallelism.tp": 2,
        "parallelism.dp": 2,
        "parallelism.sequence_parallel": False,
        "parallelism.scatter_gather_p2p": True,
        "training.precision": "fp32",
    },
    # One replica: more tensor or pipeline parallelism needs more GPUs, and there is nobody to share the optimizer with.
    "one replica": {"parallelism.tp": 2, "parallelism.pp": 4, "model.dropout": 0.0},
}


def on(memories: Iterable[RankMemory], capacity: float) -> list[RankMemory]:
    """The same on GPUs of so many bytes."""
    return [replace(memory, capacity=capacity) for memory in memories]


def job(changes: dict[str, Any]) -> Workload:
    base: dict[str, Any] = {
        "name": "tiny",
        "model": {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 50_000, "attention": "unfused", "dropout": 0.1},
        "training": {"seq": 1024, "micro_batch": 2, "global_batch": 16},
        "cluster": "dgx_a100",
    }
    return load_workload(base, changes)


def roomy(capacity_bytes: float) -> Trials:
    """Return trials of jobs on GPUs of so many bytes."""
    return Trials(peak, capacity_bytes)


_PEAKS: dict[str, float] = {}


def peak(workload: Workload) -> float:
    """Return the bytes of the fullest rank, of a step whose kernels are not slowed by communication."""
    key = workload.model_dump_json()
    if key not in _PEAKS:
        _PEAKS[key] = max(memory.total for memory in api.run_step(workload, interference=False).memories)
    return _PEAKS[key]


@pytest.mark.parametrize("name", one_in(3, JOBS))
def test_what_a_change_is_said_to_need_is_what_the_changed_job_needs(name: str) -> None:
    """Tried with few micro-batches, and here with all."""
    workload = job(JOBS[name] | ({"training.global_batch": 64} if name == "pipeline" else {}))
    now = peak(workload)
    found = roomy(0.3 * now).alone(workload, now)
    assert len(found) >= 4
    for change in found:
        assert change.needed == pytest.approx(peak(change.workload), rel=0.01), change.setting
        assert change.needed < now


#: Schedules that hold all micro-batches of a step, or what is known only once they are tuned.
HOLD_ALL = ("gpipe", "looped_bfs", "zb_auto")


@pytest.mark.parametrize("schedule", one_in(2, SCHEDULES))
def test_few_rounds_hold_what_all_micro_batches_do(schedule: str) -> None:
    """A schedule that holds every micro-batch of a step (GPipe) needs all of them.

    Others need those in flight at once, twice over for the allocator to settle, and some to drain.
    """
    layout = {"parallelism.pp": 2, "parallelism.schedule": schedule, "parallelism.vpp": SCHEDULES[schedule].chunks or 2}
    workload = job(layout | {"training.global_batch": 80, "model.dropout": 0.0, "parallelism.zero": 0})
    few = few_rounds(workload)
    assert (few is workload) == (schedule in HOLD_ALL)
    if few is not workload:
        assert few.microbatches < workload.microbatches
        assert peak(few) == pytest.approx(peak(workload), rel=1e-9)


@pytest.mark.parametrize(
    ("layout", "zero"), grid([{"dp": 4}, {"pp": 2, "dp": 2}, {"tp": 2, "pp": 2}], [0, 1, 3], every=3)
)
def test_what_slows_kernels_hardly_changes_who_holds_what(layout: dict[str, int], zero: int) -> None:
    """Passes come in the order of the schedule, however long their kernels take; only what transfers of ZeRO-3 hold
    beside passes depends on when they end. H100s: communication takes SMs, and power limits clocks."""
    keys = {f"parallelism.{axis}": size for axis, size in layout.items()}
    workload = job(keys | {"parallelism.zero": zero, "cluster": "dgx_h100", "model.dropout": 0.0})
    slowed = max(memory.total for memory in run(workload).memories)
    assert peak(workload) == pytest.approx(slowed, rel=1e-9 if zero < 3 else step_result.NEAR)


def test_changes_are_tried_with_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events do not depend on the machine. Communication that slows kernels costs some whenever it starts and ends, and
    a power limit is settled by two or three plays at least: neither is needed for memory."""
    tried: list[tuple[Workload, int]] = []
    built: list[Workload] = []
    plain = api.run_step

    def counted(workload: Workload, *, interference: bool = True, built: Cluster | None = None) -> api.StepResult:
        result = plain(workload, interference=interference, built=built)
        if not interference:
            tried.append((workload, result.played.events))
        return result

    def counted_cluster(workload: Workload) -> Cluster:
        built.append(workload)
        return cluster_of(workload)

    monkeypatch.setattr(api, "run_step", counted)
    monkeypatch.setattr(api, "cluster_of", counted_cluster)
    result = run("llama3_8b_dgx_h100", set={"training.micro_batch": 4, "training.global_batch": 288})
    advised = result.to_dict()["memory"]["advice"]
    assert len(tried) >= len(advised) - 1 >= 5
    assert built[0] == result.workload
    assert all(job.cluster != result.workload.cluster for job in built[1:])  # on more nodes
    assert all(job.microbatches < result.workload.microbatches for job, _ in tried if job.training.micro_batch == 4)
    whole = [run(job).played.events for job, _ in tried]
    assert sum(events for _, events in tried) <= sum(whole) / 3


@cache
def settings(name: str) -> list[dict[str, Any]]:
    workload = job(JOBS[name])
    now = peak(workload)
    return [change.setting for change in roomy(0.3 * now).alone(workload, now)]


def test_only_what_is_legal_and_helps_is_proposed() -> None:
    # Both replicas give their GPUs to a wider layout; with one replica the cluster grows instead.
    assert {"parallelism.tp": 2, "parallelism.dp": 1} in settings("pipeline")
    assert {"parallelism.zero": 1} in settings("pipeline")
    assert {"parallelism.tp": 4, "cluster.nodes": 2} in settings("one replica")
    assert {"parallelism.zero": 1} not in settings("one replica")
    # 1F1B has GPipe's bubble and holds less; from 1F1B nothing has less of both.
    assert {"parallelism.schedule": "1f1b"} in settings("gpipe")
    assert not any("parallelism.schedule" in setting for setting in settings("pipeline"))
    # What a legal change needs beside it is part of it.
    both = {"parallelism.sequence_parallel": True, "parallelism.scatter_gather_p2p": False}
    assert both in settings("fp32 without sequence parallelism")


def test_advice_says_what_lacks_what_is_enough_and_what_is_together() -> None:
    workload = job(JOBS["pipeline"])
    memories = run(workload).memories
    needs = peak(workload)
    assert advice(on(memories, needs), workload, peak) == []
    zero = next(change for change in roomy(0.3 * needs).alone(workload, needs) if "parallelism.zero" in change.setting)
    lines = advice(on(memories, zero.needed), workload, peak)
    assert lines[0].startswith(f"stage 0 needs {needs / GiB:.1f} GiB, ")
    freed = f"parallelism.zero: 1 would free {(needs - zero.needed) / GiB:.1f} GiB"
    assert f"{freed}: barely enough" in lines
    assert f"{freed}: enough" in advice(on(memories, zero.needed / 0.97), workload, peak)  # 3 % of it are left then
    assert not lines[-1].startswith("together")


def test_where_no_change_is_enough_the_first_two_or_more_are_told() -> None:
    """Two heads end tp at 2. Together they carry their caveats; and with next to no memory nothing helps."""
    workload = job(JOBS["pipeline"] | {"model.heads": 2})
    memories, needs = run(workload).memories, peak(workload)
    lines = advice(on(memories, 0.65 * needs), workload, peak)
    assert lines[-1] == "together: --set training.micro_batch=1 --set parallelism.tp=2 --set parallelism.dp=1"
    assert all("not enough alone" in line for line in lines[1:-1])
    more = advice(on(memories, 0.5 * needs), workload, peak)[-1]
    assert more.startswith("together: --set model.attention=flash ")
    assert more.endswith(" (slower: CPUs update the weights)")
    assert advice(on(memories, 0.1 * GiB), workload, peak)[-1].startswith("all of these together are not enough: ")


def test_zero_without_replicas_saves_nothing_and_the_verdict_says_why() -> None:
    """dp x cp is 1: nobody shares a shard."""
    one_replica = {"parallelism.tp": 2, "model.dropout": 0.0}
    sharded = job(one_replica | {"parallelism.zero": 1})
    assert peak(sharded) == peak(job(one_replica))
    lines = advice(on(run(sharded).memories, 0.95 * peak(sharded)), sharded, peak)
    assert any("zero: 1 saves nothing: dp x cp is 1" in line for line in lines)


def test_where_nothing_helps_a_line_says_how_little_counts_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that frees less than 1 % of the GPU's memory is no help; without candidates none frees that much."""
    monkeypatch.setattr("simulator.analysis.training.advice.CANDIDATES", ())
    workload = job(JOBS["pipeline"])
    lines = advice(on(run(workload).memories, 0.9 * peak(workload)), workload, peak)
    assert lines[1:] == ["no other setting that was tried frees 1% of the GPU's memory"]


def test_what_is_together_has_no_shards_that_nobody_shares() -> None:
    """ZeRO is tried before more tensor and pipeline parallelism, which leave one replica of two."""
    workload = job(JOBS["pipeline"] | {"model.heads": 2})
    line = advice(on(run(workload).memories, 0.5 * peak(workload)), workload, peak)[-1]
    assert "parallelism.dp=1" in line
    assert "parallelism.zero" not in line
    trials = roomy(0.5 * peak(workload))
    everything = trials.together(trials.alone(workload, peak(workload))[0])
    assert {"parallelism.zero", "parallelism.dp"} <= everything.setting.keys()


def test_a_job_that_does_not_fit_does_with_what_is_enough() -> None:
    """A user has a few wide layers on two A100s. Each change that is called enough makes the job fit, and none that is
    called not enough does."""
    wide = {
        "model.layers": 10,
        "model.hidden": 8192,
        "model.heads": 64,
        "model.dropout": 0.0,
        "model.attention": "flash",
        "training.seq": 4096,
        "training.micro_batch": 2,
        "training.global_batch": 8,
        "parallelism.pp": 2,
    }
    result = run(job(wide))
    report = result.to_dict()["memory"]
    assert not report["fits"]
    said = set()
    trials = roomy(report["capacity_bytes"])
    for change in trials.alone(result.workload, report["peak_bytes"]):
        sign = "=" if len(change.setting) > 1 else ": "
        words = next(line for line in report["advice"] if all(f"{key}{sign}" in line for key in change.setting))
        verdict = words.partition(" GiB: ")[2].partition(" (")[0]
        assert run(change.workload).key_figures()["fits"] == (verdict == "enough"), words
        said.add(verdict)
    assert said == {"enough", "not enough alone"}


SEVEN = {"layers": 4, "hidden": 4096, "heads": 32, "ffn_hidden": 11008, "vocab": 32000, "activation": "swiglu"}
#: Large models' shapes with a few of their layers: state, activations or both are too much.
LARGE: dict[str, dict[str, Any]] = {
    "state": {"model": SEVEN | {"layers": 16, "hidden": 8192, "heads": 64}, "parallelism": {"tp": 2, "dp": 2}},
    "a pipeline": {"model": SEVEN | {"layers": 24, "hidden": 8192, "heads": 64}, "parallelism": {"pp": 2}},
    "a long sequence": {"model": SEVEN, "seq": 131072, "parallelism": {"dp": 4}},
    "both": {"model": SEVEN | {"layers": 16}, "seq": 32768, "parallelism": {"dp": 2}},
}


@pytest.mark.parametrize("name", one_in(2, LARGE))
def test_every_advice_that_is_called_enough_fits_when_it_is_applied(name: str) -> None:
    """A user would apply it so: the keys and values that are printed, laid over the workload."""
    shape = LARGE[name]
    base = {
        "model": shape["model"],
        "training": {"seq": shape.get("seq", 4096), "global_batch": 16},
        "parallelism": shape["parallelism"],
        "cluster": "dgx_h100",
    }
    memory = run(base).to_dict()["memory"]
    assert not memory["fits"]
    lines = [line.partition(" (")[0] for line in memory["advice"]]
    enough = [line.removeprefix("together: ") for line in lines if line.startswith("together: ")]
    enough += [line.split(" would free ")[0] for line in lines if line.endswith((": enough", ": barely enough"))]
    assert enough
    for words in enough:
        applied = (
            [one for one in shlex.split(words) if one != "--set"] if "--set" in words else [words.replace(": ", "=")]
        )
        done = run(base, set=parse_changes(applied)).key_figures()
        assert done["fits"], words
        assert done["peak_bytes"] <= done["capacity_bytes"]


def test_advice_for_a_placed_job_is_simulated_where_it_runs() -> None:
    """The nodes are its own, whatever the cluster's others are."""

    def said(other: str) -> list[str]:
        groups = [{"count": 1, "node": other}, {"count": 1, "node": "dgx_a100"}]
        base = {
            "model": SEVEN | {"layers": 16},
            "training": {"seq": 16384, "global_batch": 8},
            "parallelism": {"dp": 8, "zero": 0},
            "cluster": {
                "name": "mixed",
                "groups": groups,
                "fabric": {"kind": "rail_fat_tree", "tiers": 3, "radix": 40},
            },
            "placement": [1],
        }
        return list(run(base).to_dict()["memory"]["advice"])

    assert said("dgx_h200") == said("dgx_a100") != []


#: Llama 3 70B with FSDP2 on 16 H100s: sharded states of fp32 are most of it, and fullest in the optimizer.
FSDP = {
    "model": {"preset": "llama3-70b"},
    "training": {"seq": 4096, "global_batch": 16, "recompute": "full"},
    "framework": "pytorch",
    "parallelism": {"dp": 16, "zero": 3},
    "cluster": {"name": "dgx_h100", "nodes": 2},
}


def test_states_that_do_not_fit_are_shared_among_more_or_sent_to_the_host() -> None:
    """A change that frees next to nothing (a wider tp, 0.5 GiB) has no line; one that costs speed or numerics says so.
    The state is 16 bytes a parameter and 4 of the optimizer's root, 82 GiB of 16 ranks and 41 of 32. Without
    activations on the GPU states leave larger pieces of PyTorch's cache."""
    lines = run(FSDP).to_dict()["memory"]["advice"]
    assert [line.partition(" would free ")[0] for line in lines[1:]] == [
        "--set parallelism.dp=32 --set training.global_batch=32 --set cluster.nodes=4",
        "parallelism.offload.activations: cpu",
        "parallelism.offload.optimizer: cpu",
    ]
    assert lines[1].endswith(": enough (a larger batch)")
    assert lines[2].endswith(": not enough alone (slower: they cross PCIe in every pass)")
    assert lines[3].endswith(": enough (slower: CPUs update the weights)")


def tried_on(cluster: dict[str, Any]) -> list[str]:
    """Return advice for the same job on a cluster, as if each change freed a twentieth; hosts may have no room."""
    workload = load_workload(FSDP | {"cluster": cluster})
    step = api.run_step(workload, interference=False)
    needs = max(memory.total for memory in step.memories)

    def needed_bytes(changed: Workload) -> float:
        on_hosts = changed.parallelism.offload.optimizer != "none"
        return step.needed_bytes(changed) if on_hosts else 0.95 * needs

    return advice(step.memories, workload, needed_bytes)


def test_what_a_cluster_does_not_say_is_named() -> None:
    """No offload can be simulated where nothing is known of the hosts; narrower states can."""
    lines = tried_on(with_unknown_hosts("hgx_h100_8gpu") | {"nodes": 2})
    assert not any(line.startswith("parallelism.offload") for line in lines)
    narrower = next(line for line in lines if line.startswith("training.optimizer.state_dtype: bf16 would free "))
    assert narrower.endswith(" (changes the numerics)")
    waiting = next(line for line in lines if line.startswith("not tried for want of "))
    assert "cluster.node.host_memory_bandwidth_Bps: parallelism.offload.activations: cpu; " in waiting
    assert "parallelism.offload.optimizer: cpu" in waiting


def test_offload_is_not_proposed_where_the_host_has_no_room() -> None:
    """12 bytes a parameter of states and 4 of gradients are 526 GiB on each of two nodes."""
    room, none = (tried_on({**FSDP["cluster"], "node": {"host_memory_bytes": nbytes}}) for nbytes in (2000e9, 400e9))
    assert any(line.startswith("parallelism.offload.optimizer: cpu would free ") for line in room)
    assert not any("offload.optimizer" in line for line in none)


def test_a_change_is_taken_as_often_as_it_takes() -> None:
    """Micro-batches of 4 become 1 where 2 do not fit, and nothing is tried that could not be enough."""
    workload = job(JOBS["pipeline"] | {"training.micro_batch": 4, "training.global_batch": 32})
    needs = {size: peak(altered(workload, {"training.micro_batch": size})) for size in (4, 1)}
    halved = next(one for one in CANDIDATES if list(one(workload)) == [{"training.micro_batch": 2}])
    fits = roomy(1.001 * needs[1]).change(workload, needs[4], halved)
    assert fits is not None
    assert fits.setting == {"training.micro_batch": 1}
    never = roomy(0.1 * needs[1]).change(workload, needs[4], halved)
    assert never is not None
    assert never.setting == {"training.micro_batch": 2}


def test_all_together_need_what_the_job_with_all_of_them_needs() -> None:
    workload = job(JOBS["pipeline"])
    now = peak(workload)
    trials = roomy(0.1 * GiB)
    everything = trials.together(trials.alone(workload, now)[0])
    assert everything.needed == pytest.approx(peak(everything.workload), rel=0.01)
    assert everything.workload == altered(workload, everything.setting)
    assert everything.needed < min(change.needed for change in trials.alone(workload, now))
