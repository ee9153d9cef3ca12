"""Figures of a trace: the hand-made step, worked out by hand; HolisticTraceAnalysis as a second opinion."""

from __future__ import annotations

import gzip
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from simulator.output.stream_gantt import StreamRow, column_shares, stream_gantt
from simulator.output.trace_tables import shown
from simulator.traces.figures import figures, rank_figures
from simulator.traces.files import open_trace
from simulator.traces.kineto import read_trace
from simulator.traces.windows import one_step, steps_of
from tests.support.kineto import COMPUTE, KinetoWriter, save_step
from tests.support.terminal import printed

SHARED = Path(__file__).resolve().parents[3] / "shared/reference/files"
us = 1e-6


def test_the_figures_of_a_step(tmp_path: Path) -> None:
    """Rank 0 computes from 110 to 6510 us without a gap, and 500 us more from 8320 on. Its all-reduce runs from 6115 to
    8315: 395 of these 2200 us beside the kernel that ends at 6510. It is idle for 5 us, before the optimizer, which was
    launched long before. Rank 1 is 1200 us later in the all-reduce, so that rank 0 waits for it."""
    told = figures(open_trace([str(path) for path in save_step(tmp_path)]))
    rank = told.ranks[0]
    assert rank.step_s == pytest.approx(8920 * us)
    assert rank.gpu_s == pytest.approx((8820 - 110) * us)
    assert rank.compute_s == pytest.approx(6900 * us)
    assert rank.other_busy_s == pytest.approx((8315 - 6510) * us) == rank.exposed_s
    assert rank.idle_s == pytest.approx(5 * us)
    assert rank.launch_bound_s == 0
    assert rank.communication_s == pytest.approx(2200 * us)
    assert rank.overlap == pytest.approx(395 / 2200)
    assert rank.class_s == pytest.approx(
        {
            "matmul": 5000 * us,
            "attention": 1000 * us,
            "memory": 400 * us,
            "optimizer": 500 * us,
            "communication": 2200 * us,
        }
    )
    assert [(row.rank, row.last, row.meetings) for row in told.stragglers] == [(0, 0, 1), (1, 1, 1)]
    assert [row.waits_s for row in told.stragglers] == pytest.approx([1200 * us, 0])
    assert told.kernels[0].name == "nvjet_hsh_128x256"
    assert told.kernels[0].seconds == pytest.approx((3000 + 3600) / 2 * us)


def test_time_between_kernels_has_its_cause(tmp_path: Path) -> None:
    """Three gaps on a stream: launched in time and 2 us long, launched 5 us after the last kernel's end, launched
    in time and 30 us long."""
    trace = KinetoWriter()
    for start, length, launched in ((10, 10, 0), (22, 8, 1), (45, 5, 35), (80, 1, 40)):
        trace.kernel("k", COMPUTE, start, length, trace.call("cudaLaunchKernel", launched))
    rank = read_trace([trace.save(tmp_path / "trace.json")]).ranks[0]
    (stream,) = rank_figures(rank).streams
    assert stream.back_to_back_s == pytest.approx(2 * us)
    assert stream.host_s == pytest.approx(15 * us)
    assert stream.other_s == pytest.approx(30 * us)
    assert rank_figures(rank).launch_bound_s == pytest.approx(15 * us)


def test_waits_for_launches_that_are_not_recorded_are_not_known(tmp_path: Path) -> None:
    """Two kernels without a call of the host, in two steps: the wait is no 0, in the mean neither."""
    trace = KinetoWriter()
    for begin in (0, 100):
        trace.event("user_annotation", f"ProfilerStep#{begin}", begin, 100)
        for start in (10, 60):
            trace.kernel("k", COMPUTE, begin + start, 10, 0)
    told = figures(read_trace([trace.save(tmp_path / "trace.json")]))
    (stream,) = told.ranks[0].streams
    assert (stream.host_s, told.ranks[0].launch_bound_s) == (None, None)
    assert stream.other_s == pytest.approx(40 * us)


def test_shares_are_of_the_step_and_fill_it(tmp_path: Path) -> None:
    """A step of 200 us: a kernel from 20 to 60, a send of 1 us until 101, nothing then. Of the step 20 % compute, 0.5 %
    are the send alone, 20 % are idle between them; 59.5 % lie before and behind all kernels. The send counts as
    communication with hand-overs, while the class communication is not there."""
    trace = KinetoWriter()
    trace.event("user_annotation", "ProfilerStep#1", 0, 200)
    trace.kernel("k", COMPUTE, 20, 40, trace.call("cudaLaunchKernel", 1))
    send = {"Collective name": "send", "Process Group Description": "mesh_pp"}
    trace.kernel("ncclDevKernel_SendRecv()", 20, 100, 1, trace.call("cudaLaunchKernel", 2), **send)
    told = figures(read_trace([trace.save(tmp_path / "trace.json")]))
    report = {**asdict(told), "kernels": [asdict(one) for one in told.kernels]}
    ranks, classes, *_, kernels = (printed(table, 200) for table in shown(report))
    assert "shares of the step" in ranks
    row = next(line for line in ranks.splitlines() if line.split()[:1] == ["0"])
    assert [float(text) for text in re.findall(r"([\d.]+) %", row)][:4] == [20.0, 0.5, 20.0, 59.5]
    assert "communication and hand-overs" in ranks
    assert "1.00 us" in ranks
    assert "hand-over" in classes
    assert "communication" not in classes
    assert "20.0 %" in next(line for line in kernels.splitlines() if line.split()[:1] == ["k"])


def test_the_picture_of_streams_is_filled_by_shares_of_time() -> None:
    """10,000 kernels of 0.1 ms, each behind one of 0.2 ms of another class and 0.2 ms of nothing: 5 s.

    A tenth of columns would hold no whole kernel. Each of 500 columns of 10 ms is a fifth the one class, two fifths the
    other. Kernels that overlap, 1 s of each class in a column of 1 s, fill it by halves.
    """
    begin = np.arange(10_000) * 0.5e-3
    row = StreamRow("stream 7", {"memory": (begin + 0.2e-3, begin + 0.3e-3), "matmul": (begin, begin + 0.2e-3)})
    shares = column_shares(row, np.linspace(0, 5, 501))
    assert list(shares) == ["matmul", "memory"]
    assert shares["matmul"] == pytest.approx(0.4)
    assert shares["memory"] == pytest.approx(0.2)
    whole = np.array([0.0]), np.array([1.0])
    halves = column_shares(StreamRow("", {"matmul": whole, "copy": whole}), np.array([0.0, 1.0, 2.0]))
    assert {kind: list(share) for kind, share in halves.items()} == {"matmul": [0.5, 0], "copy": [0.5, 0]}
    assert stream_gantt([row], "a").axes[0].get_xlabel() == "time, ms (heights: shares of each 1.67 ms)"


def test_a_step_is_what_was_launched_in_it(tmp_path: Path) -> None:
    """The GPU runs behind: the first step's kernel ends after the second one's mark has begun, and is the first's."""
    trace = KinetoWriter()
    for number, begin in enumerate((0, 100)):
        trace.event("user_annotation", f"ProfilerStep#{number}", begin, 100)
        trace.kernel("k", COMPUTE, begin + 20, 100, trace.call("cudaLaunchKernel", begin + 10))
    trace.event("user_annotation", "ProfilerStep#2", 200, 100)  # nothing was launched in it
    whole = read_trace([trace.save(tmp_path / "trace.json")])
    assert [step.name for step in steps_of(whole.ranks[0])] == ["ProfilerStep#0", "ProfilerStep#1"]
    assert rank_figures(whole.ranks[0]).step_s == pytest.approx(120 * us)
    second = one_step(whole, "1").ranks[0]
    assert len(second.ops) == 1
    assert second.ops.start_s[0] == pytest.approx(whole.ranks[0].ops.start_s[1])


def test_figures_are_of_a_mean_step(tmp_path: Path) -> None:
    """Two steps of 100 us have a kernel of 20 and one of 40 us, each behind a reduction of 10 us. What runs between the
    steps does not count. Both ranks come to the reductions at once, so that nobody is the last."""
    paths = []
    for rank in range(2):
        trace = KinetoWriter(rank, 2)
        for number, begin in enumerate((0, 200)):
            trace.event("user_annotation", f"ProfilerStep#{number}", begin, 100)
            trace.kernel("ncclDevKernel_AllReduce", 20, begin, 10, trace.call("cudaLaunchKernel", begin))
            trace.kernel("k", COMPUTE, begin + 10, 20 * (number + 1), trace.call("cudaLaunchKernel", begin + 1))
        trace.kernel("k", COMPUTE, 150, 40, trace.call("cudaLaunchKernel", 150))
        paths.append(trace.save(tmp_path / f"rank{rank}.json"))
    told = figures(read_trace(paths))
    first = told.ranks[0]
    assert told.steps == 2
    assert (first.step_s, first.gpu_s, first.compute_s) == pytest.approx((100 * us, 40 * us, 30 * us))
    assert first.class_s == pytest.approx({"memory": 30 * us, "communication": 10 * us})
    assert [stream.ops for stream in first.streams] == [1, 1]
    assert [stream.busy_s for stream in first.streams] == pytest.approx([30 * us, 10 * us])
    assert (told.kernels[0].name, told.kernels[0].launches) == ("k", 1)
    assert told.kernels[0].seconds == pytest.approx(30 * us)
    assert [(row.last, row.meetings) for row in told.stragglers] == [(0, 1), (0, 1)]
    tables = list(
        shown(
            {
                "ranks": [asdict(one) for one in told.ranks],
                "steps": 2,
                "kernels": [],
                "stragglers": [asdict(row) for row in told.stragglers],
            }
        )
    )
    assert "mean of 2 marked steps" in printed(tables[0])
    assert printed(tables[3]).split()[-1] == "-"


def _in_microseconds(path: Path, folder: Path) -> Path:
    """Write a copy with times in whole microseconds, to which HolisticTraceAnalysis rounds all."""
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    for event in trace["traceEvents"]:
        if "dur" in event:
            end = math.floor(event["ts"] + event["dur"])
            event["ts"] = math.floor(event["ts"])
            event["dur"] = end - event["ts"]
    copy = folder / "trace.json"
    copy.write_text(json.dumps(trace))
    return copy


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "name", ["", "kineto/hta_resnet_ddp_2gpu_rank0_onestep.json.gz", "traces/hta_sampled_rank-1.json.gz"]
)
def test_holistic_trace_analysis_agrees(name: str, tmp_path: Path) -> None:
    """Compute, idle and span of a rank, overlap (to 0.01 points), and causes of idle time of each stream."""
    path = SHARED / name if name else save_step(tmp_path)[0]
    if not path.exists():
        pytest.skip("the file of another project is not here")
    analysis = pytest.importorskip("hta.trace_analysis")
    copy = _in_microseconds(path, tmp_path)
    other = analysis.TraceAnalysis(trace_files={0: str(copy)}, trace_dir="", include_last_profiler_step=True)
    rank = read_trace([copy]).ranks[0]
    told = rank_figures(replace(rank, steps=()))  # that tool counts what runs between steps too
    row = other.get_temporal_breakdown(visualize=False).iloc[0]
    for key, seconds in (
        ("idle_time(us)", told.idle_s), ("compute_time(us)", told.compute_s),
        ("non_compute_time(us)", told.other_busy_s), ("kernel_time(us)", told.gpu_s),
    ):  # fmt: skip
        assert seconds == pytest.approx(row[key] * us, abs=2 * us), key
    overlap = other.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].iloc[0]
    assert told.overlap is not None
    assert 100 * told.overlap == pytest.approx(overlap, abs=0.006)
    idle = other.get_idle_time_breakdown(ranks=[0], visualize=False)[0]
    for stream in told.streams:
        mine = idle[idle["stream"] == int(stream.stream.split()[-1])].set_index("idle_category")["idle_time"]
        for category, seconds in (
            ("host_wait", stream.host_s), ("kernel_wait", stream.back_to_back_s), ("other", stream.other_s),
        ):  # fmt: skip
            assert seconds == pytest.approx(mine.get(category, 0.0) * us, abs=2 * us, rel=1e-3), (stream, category)
