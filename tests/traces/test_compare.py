"""Two traces, or a trace and a simulated step, class by class."""

from __future__ import annotations

from pathlib import Path

import pytest

import simulator
from simulator.errors import InputError
from simulator.traces.columns import NO_LAUNCHES
from simulator.traces.compare import compare, missing_classes, short_name, simulated_side, traced_side, unlike_jobs
from simulator.traces.files import open_trace
from simulator.traces.kineto import read_trace
from simulator.traces.replay import replay
from simulator.traces.what_if import WhatIf
from simulator.traces.windows import one_step
from tests.support.kineto import COMPUTE, KinetoWriter, data_parallel_step, save_step

us = 1e-6
WORKLOAD = {
    "model": {"layers": 2, "hidden": 1024, "heads": 8, "vocab": 32000, "norm": "rmsnorm"},
    "training": {"seq": 1024, "micro_batch": 1, "global_batch": 2},
    "parallelism": {"dp": 2},
    "framework": "pytorch",
    "cluster": {"name": "dgx_h100", "nodes": 1},
}


def test_two_traces_differ_by_what_was_changed(tmp_path: Path) -> None:
    """Rank 1's slowness of 1.2 became 1.0: its matmuls take 5000 in place of 6000 us, its attention 1000 for 1200. Rank
    0's all-reduce waits 1200 us less. Communication is 2200 and 1000 us before, 1000 and 1000 after."""
    folders = [tmp_path / name for name in ("before", "after")]
    for folder, slowness in zip(folders, ((1.0, 1.2), (1.0, 1.0)), strict=True):
        folder.mkdir()
        save_step(folder, slowness)
    first, second = (traced_side(open_trace([str(folder)]), folder.name) for folder in folders)
    result = compare(first, second)
    rows = {row.name: row for row in result.rows}
    assert rows["matmul"].seconds == pytest.approx((5500 * us, 5000 * us))
    assert rows["attention"].ratio == pytest.approx(1 / 1.1)
    assert rows["communication"].seconds == pytest.approx((1600 * us, 1000 * us))
    assert rows["matmul"].launches == (2, 2)
    assert (first.step_s, second.step_s) == pytest.approx((8920 * us, 7720 * us))
    assert missing_classes(result) == []
    assert result.alone == ((), ())


def test_jobs_of_far_different_depth_are_told_apart(tmp_path: Path) -> None:
    """Two layers have a few products, and four times as many layers more than twice as many. Recorded kernels of the
    same job are as many on both sides, and nothing is said."""
    few, many = (
        simulated_side(simulator.run(WORKLOAD, set={"model.layers": layers}).spans, f"{layers} layers")
        for layers in (2, 8)
    )
    (sentence,) = unlike_jobs(compare(few, many))
    assert f"2 layers launches {few.launches['matmul']:,.6g} kernels of class matmul" in sentence
    assert f"8 layers {many.launches['matmul']:,.6g}" in sentence
    assert unlike_jobs(compare(few, few)) == []


def test_ops_outside_of_the_marked_steps_do_not_count(tmp_path: Path) -> None:
    """A product of 8 ms runs 20 ms before the one marked step, and a send behind it. Only the step's own
    ops count: two products of 5 ms in all, and an all-reduce of 1 ms. Of the all-reduce 395 us are beside a kernel."""
    trace = data_parallel_step(0, (1.0,))
    trace.kernel("sm90_xmma_gemm_bf16", COMPUTE, -20_000, 8000, trace.call("cudaLaunchKernel", -20_010))
    trace.kernel("ncclDevKernel_SendRecv()", COMPUTE, 50_000, 700, trace.call("cudaLaunchKernel", 49_000))
    side = traced_side(read_trace([trace.save(tmp_path / "trace.json")]), "a")
    assert side.class_s["matmul"] == pytest.approx(5000 * us)
    assert side.launches["matmul"] == 2
    assert side.kernels is not None
    assert side.kernels["sm90_xmma_gemm_bf16"] == pytest.approx(2000 * us)
    assert side.class_s["communication"] == pytest.approx(1000 * us)
    assert side.overlap == pytest.approx(395 / 1000)
    assert side.exposed_s == pytest.approx(605 * us)


def test_each_rank_counts_by_its_own_steps(tmp_path: Path) -> None:
    """Rank 0 marks one step with a kernel of 10 us, rank 1 two steps with one of 30 us each: 20 us in the mean."""
    paths = []
    for rank, length in enumerate((10, 30)):
        trace = KinetoWriter(rank, 2)
        for number in range(rank + 1):
            trace.event("user_annotation", f"ProfilerStep#{number}", 100 * number, 100)
            trace.kernel("k", COMPUTE, 100 * number + 20, length, trace.call("cudaLaunchKernel", 100 * number))
        paths.append(trace.save(tmp_path / f"{rank}.json"))
    side = traced_side(read_trace(paths), "a")
    assert side.class_s == pytest.approx({"memory": 20 * us})
    assert side.launches == {"memory": 1}


def test_what_one_side_lacks_is_named(tmp_path: Path) -> None:
    """A kernel that is not known as communication counts as memory-bound; what only one side calls so is listed."""
    pair = traced_side(open_trace([str(path) for path in save_step(tmp_path)]), "pair")
    alone = tmp_path / "alone.json"
    text = (save_step(tmp_path, (1.0,), ".json")[0]).read_text()
    alone.write_text(text.replace("ncclDev", "someDev").replace("Collective name", "Some name"))
    result = compare(pair, traced_side(open_trace([str(alone)]), "alone"))
    assert missing_classes(result) == ["alone has no kernels of class communication"]
    assert [[name for name, _ in kernels] for kernels in result.alone] == [
        ["ncclDevKernel_AllReduce_Sum_f32_RING_LL"],
        ["someDevKernel_AllReduce_Sum_f32_RING_LL"],
    ]


def test_a_simulated_step_stands_beside_a_trace() -> None:
    """The seconds by class of a mean rank are those of the step's timeline, all of which the classes hold."""
    result = simulator.run(WORKLOAD)
    side = simulated_side(result.spans, "simulated")
    rows = result.spans.frame()
    kernels = rows[rows["category"].isin(["compute", "recompute", "optimizer"])]
    weight = kernels["rank"].map(result.spans.ranks_like).astype(float)
    expected = float(((kernels["end_s"] - kernels["start_s"]) * weight).sum()) / result.spans.n_ranks
    mine = sum(side.class_s[name] for name in ("matmul", "attention", "memory", "optimizer"))
    assert mine == pytest.approx(expected)
    assert side.step_s == result.to_dict()["step_time_s"]
    assert side.launches["communication"] > 0
    assert side.overlap is not None
    assert 0 < side.overlap < 1


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("nvjet_hsh_128x256_64x4_TNT", "nvjet_hsh_128x256_64x4_TNT"),
        ("void (anonymous namespace)::softmax<float, 4>(float*)", "{anonymous}::softmax"),
        ("Memcpy DtoH (Device -> Pageable)", "Memcpy DtoH "),
        ("(odd)", "(odd)"),
    ],
)
def test_names_are_shortened(name: str, short: str) -> None:
    assert short_name(name) == short


@pytest.mark.parametrize(
    ("layout", "classes"),
    [({"tp": 2, "dp": 1}, {"communication"}), ({"dp": 2}, {"communication"}), ({"pp": 2, "dp": 1}, {"hand-over"})],
)
def test_a_job_is_like_its_own_traces(layout: dict[str, int], classes: set[str], tmp_path: Path) -> None:
    """A simulated step, written as a folder of traces and read back, is the step, in each class and in all times."""
    result = simulator.run({**WORKLOAD, "parallelism": layout})
    result.save_traces(tmp_path, range(2))
    trace = open_trace([str(tmp_path)])
    comparison = compare(simulated_side(result.spans, "simulated"), traced_side(trace, "own"))
    first, second = comparison.sides
    assert {row.name for row in comparison.rows} == {"matmul", "attention", "memory", "optimizer"} | classes
    for row in comparison.rows:
        assert row.ratio == pytest.approx(1, rel=1e-4), row.name
        assert row.launches[0] == row.launches[1]
    assert second.step_s == pytest.approx(first.step_s)
    assert second.exposed_s == pytest.approx(first.exposed_s, rel=1e-3)
    assert second.overlap == pytest.approx(first.overlap, abs=1e-3)
    assert trace.ranks[0].gpu == "h100-sxm-80gb"
    assert trace.missing == [NO_LAUNCHES]


def test_a_simulated_hand_over_does_not_count_its_wait() -> None:
    """Receives are posted long before their sends. Yet each takes as long as its send, and the class has their sum,
    with the reduction of the embedding's gradients that both ends of the pipeline share."""
    spans = simulator.run({**WORKLOAD, "parallelism": {"pp": 2, "dp": 1}}).spans
    rows = spans.frame()
    rows = rows[rows["category"] == "pp"]
    seconds = (rows["end_s"] - rows["start_s"]).groupby(rows["kind"]).sum()
    assert seconds["recv"] == pytest.approx(seconds["send"])
    waited = rows[rows["kind"] == "recv"]
    assert (waited["start_s"] - waited["posted_s"]).sum() > 10 * seconds["recv"]
    side = simulated_side(spans, "simulated")
    assert side.class_s["hand-over"] == pytest.approx(seconds.sum() / 2)  # a mean of two ranks


def test_a_replay_of_a_simulated_step_follows_its_kernels(tmp_path: Path) -> None:
    """Tensor parallelism hides nothing: twice as fast products save half of their time."""
    simulator.run({**WORKLOAD, "parallelism": {"tp": 2, "dp": 1}}).save_traces(tmp_path, range(2))
    played = replay(one_step(open_trace([str(tmp_path)]), None), WhatIf(classes={"matmul": 0.5}))
    assert played.changed is not None
    saved_s = played.played.step_s - played.changed.step_s
    assert played.error == pytest.approx(0, abs=1e-4)
    assert saved_s == pytest.approx(played.played.class_s["matmul"] / 2, rel=0.02)


def test_a_file_of_several_ranks_is_refused(tmp_path: Path) -> None:
    """One file with a rank per pipeline stage is for the eye: its ranks are not streams of one GPU."""
    simulator.run({**WORKLOAD, "parallelism": {"pp": 2, "dp": 1}}).save_trace(tmp_path / "both.json.gz")
    with pytest.raises(InputError, match="holds several ranks") as refused:
        open_trace([str(tmp_path / "both.json.gz")])
    assert refused.value.fix == "llmsim run WORKLOAD --trace-dir DIR"
