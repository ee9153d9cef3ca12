"""A trace is played as it was recorded, and under changes whose effect is worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulator.cluster.ideal import ideal_cluster
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.errors import InputError
from simulator.program import from_text, to_text
from simulator.traces.files import open_trace
from simulator.traces.hardware import exchange_factor, gpu_factors, unknown_exchanges
from simulator.traces.kineto import read_trace
from simulator.traces.order import order_of
from simulator.traces.program import ordered, replay_program
from simulator.traces.replay import replay
from simulator.traces.trace import RunTrace
from simulator.traces.what_if import AS_RECORDED, WhatIf
from simulator.traces.windows import one_step, steps_of
from tests.support.kineto import COMMUNICATION, COMPUTE, KinetoWriter, data_parallel_step, save_step

SHARED = Path(__file__).resolve().parents[3] / "shared/reference/files"
us = 1e-6


@pytest.fixture
def step(tmp_path: Path) -> RunTrace:
    """The hand-made step of two ranks, of which rank 1 is 1.2 times as slow. It takes 8920 us."""
    return one_step(open_trace([str(path) for path in save_step(tmp_path)]), None)


def test_a_step_is_played_as_it_was_recorded(step: RunTrace) -> None:
    played = replay(step)
    assert played.changed is None
    assert played.recorded.step_s == pytest.approx(8920 * us)
    assert played.played.step_s == pytest.approx(8920 * us)
    assert played.played.overlap == pytest.approx(played.recorded.overlap)
    assert played.played.class_s == pytest.approx(played.recorded.class_s)
    assert played.unexplained_s == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # Rank 1 as fast as rank 0: both come to the all-reduce at 6115, which ends at 7115; 5 us, the optimizer's 500,
        # and 100 of the host.
        (WhatIf(ranks={1: 1 / 1.2}), 7720),
        # Communication takes nothing. Rank 1's kernel beside it ends at 7710, before the optimizer: 5 + 500 + 100 more.
        (WhatIf(classes={"communication": 0.0}), 8315),
        # Twice its 1000 us.
        (WhatIf(classes={"communication": 2.0}), 9920),
        # The network alone, by a function of the collective.
        (WhatIf(exchange=lambda collective: collective.nbytes / 4e6), 9920),
        # Of rank 1, which decides, attention takes 600 us less.
        (WhatIf(classes={"attention": 0.5}), 8320),
        # In one stream the kernel that ran beside the all-reduce comes behind it: 400 us more, on either rank.
        (WhatIf(overlap="none"), 9320),
        # Nothing waits for the all-reduce, which ends at 8315 as before; the rest of rank 1 at 7715 + 500 + 100.
        (WhatIf(overlap="full"), 8315),
        # All launches come at twice the time, the first one 100 us later; so does the end, 100 us more.
        (WhatIf(host=2.0), 9120),
    ],
)
def test_changes_have_the_effect_worked_out_by_hand(step: RunTrace, change: WhatIf, expected: float) -> None:
    played = replay(step, change)
    assert played.changed is not None
    assert played.changed.step_s == pytest.approx(expected * us)


def test_without_records_of_waits_the_order_is_inferred(tmp_path: Path) -> None:
    """Calls of cudaStreamWaitEvent alone do not say who waits for whom. The op that is launched right behind one waits
    for what ended last before it, so that the optimizer still waits for the all-reduce when that takes longer."""
    traces = [data_parallel_step(rank) for rank in range(2)]
    for trace in traces:
        trace.events = [event for event in trace.events if event["cat"] != "cuda_sync"]
    step = one_step(read_trace([one.save(tmp_path / f"{rank}.json") for rank, one in enumerate(traces)]), None)
    for rank in step.ranks:
        assert [op.after for op in order_of(rank).ops] == [(), (), (), (), (2,), (4,)]
    played = replay(step, WhatIf(classes={"communication": 2.0}))
    assert played.played.step_s == pytest.approx(8920 * us)
    assert played.changed is not None
    assert played.changed.step_s == pytest.approx(9920 * us)


def test_clocks_that_differ_do_not_matter(tmp_path: Path) -> None:
    """Rank 1's clock is 5 ms ahead. Ranks see the all-reduce end at one time, by which clocks are set."""
    traces = [data_parallel_step(rank) for rank in range(2)]
    for event in traces[1].events:
        event["ts"] += 5000
    step = one_step(read_trace([one.save(tmp_path / f"{rank}.json") for rank, one in enumerate(traces)]), None)
    assert replay(step).played.step_s == pytest.approx(8920 * us)


def test_a_rank_alone_keeps_its_communication(tmp_path: Path) -> None:
    """Rank 0's kernel waits 1200 us for a rank that is not in the trace: its 2200 us are kept, and scaled
    as a whole."""
    step = one_step(read_trace([data_parallel_step(0).save(tmp_path / "a.json")]), None)
    assert replay(step).played.step_s == pytest.approx(8920 * us)
    played = replay(step, WhatIf(classes={"communication": 0.5}))
    assert played.changed is not None
    assert played.changed.step_s == pytest.approx((8920 - 1100) * us)


def test_a_copy_that_blocks_holds_the_host_up(tmp_path: Path) -> None:
    """A kernel of 100 us, a copy that the host waits for, and 20 us later the next launch.

    Kernels twice as long delay that launch by 100 us, and the last kernel ends 10 us later after it.
    """
    trace = KinetoWriter()
    trace.kernel("k", COMPUTE, 10, 100, trace.call("cudaLaunchKernel", 0))
    call = trace.call("cudaMemcpyAsync", 20, 95)
    trace.event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 110, 4, 7, stream=7, device=0, correlation=call)
    trace.kernel("last", COMPUTE, 140, 10, trace.call("cudaLaunchKernel", 134))
    step = one_step(read_trace([trace.save(tmp_path / "trace.json")]), None)
    played = replay(step, WhatIf(classes={"memory": 2.0}))
    assert played.recorded.step_s == pytest.approx(150 * us) == played.played.step_s
    assert played.changed is not None
    assert played.changed.step_s == pytest.approx(260 * us)


def test_the_program_has_a_text_form_and_both_engines_play_it_alike(step: RunTrace) -> None:
    program = replay_program(ordered(step), AS_RECORDED)
    assert from_text(to_text(program)) == program
    lengths = [
        simulate(program, ideal_cluster(2), Costs.ideal(), engine=engine).length_s for engine in ("python", "compiled")
    ]
    assert lengths[0] == lengths[1] == pytest.approx(8920 * us)


def test_another_gpu_scales_by_data_sheets(step: RunTrace) -> None:
    """An H100's profile against an H200's: the same matrix units, 3.35 and 4.8 TB/s of memory."""
    factors = gpu_factors(step, "h200-sxm-141gb", None)
    assert factors["matmul"] == factors["attention"] == pytest.approx(1.0)
    assert factors["memory"] == factors["optimizer"] == pytest.approx(3.35 / 4.8, rel=0.01)
    with pytest.raises(InputError, match="does not say which profile"):
        gpu_factors(RunTrace((replace(step.ranks[0], gpu="Some GPU"),)), "h200-sxm-141gb", None)


def test_errors_name_the_parameter(step: RunTrace) -> None:
    """Options are the command's: a caller in Python is told which parameter is wrong."""
    for key, call in (
        ("name", lambda: one_step(step, "9")),
        ("ranks", lambda: replay(step, WhatIf(ranks={7: 2.0}))),
        ("target", lambda: gpu_factors(step, "h9", None)),
        ("recorded", lambda: gpu_factors(step, "h200-sxm-141gb", "h9")),
        ("recorded", lambda: exchange_factor(step, "dgx_h9", "dgx_h100")),
        ("target.name", lambda: exchange_factor(step, "dgx_h100", {"name": "dgx_h9"})),
    ):
        with pytest.raises(InputError) as problem:
            call()
        assert (problem.value.file, problem.value.key) == (None, key)


def test_another_cluster_scales_transfers(step: RunTrace) -> None:
    """8 MB between two GPUs: over PCIe much slower than over an H100's NVLink, and on the same cluster as before."""
    (collective,) = {one for one in step.ranks[0].collectives if one.nbytes}
    assert unknown_exchanges(step) == 0
    assert exchange_factor(step, "dgx_h100", "dgx_h100")(collective) == 1
    factor = exchange_factor(step, "dgx_h100", "dgx_a100")(collective)
    assert 1.2 < factor < 2.5  # 450 against 300 GB/s of NVLink, and latencies
    played = replay(step, WhatIf(exchange=exchange_factor(step, "dgx_h100", "dgx_a100")))
    assert played.changed is not None
    assert played.changed.step_s == pytest.approx((8920 + 1000 * (factor - 1)) * us)


@pytest.mark.parametrize(
    "names",
    [
        ["traces/deepseek_train_h800_kineto.json.gz"],
        ["kineto/hta_resnet_ddp_2gpu_rank0_onestep.json.gz"],
        ["kineto/hta_alexnet_1gpu.json.gz"],
        ["traces/hta_mi250_kineto.json.gz"],
        ["traces/hta_sampled_rank-0.json.gz", "traces/hta_sampled_rank-1.json.gz"],
    ],
)
def test_real_steps_are_played_as_they_were_recorded(names: list[str]) -> None:
    """Within 2 % of the recorded step, and 2 points of its overlap."""
    paths = [SHARED / name for name in names]
    if not all(path.exists() for path in paths):
        pytest.skip("the files of another project are not here")
    trace = read_trace(paths)
    for step in steps_of(trace.ranks[0]):
        played = replay(one_step(trace, step.name))
        assert abs(played.error) < 0.02
        assert played.played.overlap == pytest.approx(played.recorded.overlap, abs=0.02)


def test_an_op_that_was_launched_later_holds_no_call_up(tmp_path: Path) -> None:
    """A kernel ends while the host synchronizes, on the stream of one that starts before it and is launched later.

    No stream does so. The host cannot have waited for that kernel, and the step is played all the same.
    """
    trace = KinetoWriter()
    early = trace.call("cudaLaunchKernel", 0)
    trace.call("cudaStreamSynchronize", 10, 50)
    trace.kernel("late", COMPUTE, 5, 10, trace.call("cudaLaunchKernel", 70))
    trace.kernel("early", COMPUTE, 20, 35, early)
    step = one_step(read_trace([trace.save(tmp_path / "trace.json")]), None)
    assert [moment.awaited for moment in order_of(step.ranks[0]).host] == [-1, -1, -1]
    assert replay(step).played.step_s > 70 * us


def test_ranks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """Rank 0 reduces in group a and then in group b, on one stream; rank 1 the other way round. NCCL would hang."""
    paths = []
    for rank, groups in enumerate(("ab", "ba")):
        trace = KinetoWriter(rank, 2)
        for number, group in enumerate(groups):
            details = {"Collective name": "allreduce", "Process Group Name": group, "Group size": 2}
            call = trace.call("cudaLaunchKernel", 10 * number)
            trace.kernel("ncclKernel_AllReduce", COMMUNICATION, 20 + 50 * number, 40, call, **details)
        paths.append(trace.save(tmp_path / f"{rank}.json"))
    with pytest.raises(InputError, match="do not fit together"):
        replay(one_step(read_trace(paths), None))


def test_three_streams_joined_by_an_event_are_told_apart() -> None:
    """Stream 24 of a real trace waits for the product of stream 20, and stream 28 for nobody."""
    path = SHARED / "kineto/hta_cuda_event_sync_multi_stream.json.gz"
    if not path.exists():
        pytest.skip("the file of another project is not here")
    rank = one_step(read_trace([path]), None).ranks[0]
    streams = [rank.streams[code] for code in rank.ops.stream]
    assert streams == [f"stream {number}" for number in (20, 20, 28, 28, 24, 24)]
    assert [op.after for op in order_of(rank).ops] == [(), (), (), (), (1,), ()]
