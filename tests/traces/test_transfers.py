"""Sends and receives in a trace: they are nobody's meeting, a pipeline's are hand-overs, and a link carries them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator.traces.classes import CLASSES, TRANSFER, kernel_class
from simulator.traces.hardware import ExchangeTimes, unknown_exchanges
from simulator.traces.kineto import read_trace
from simulator.traces.meetings import meetings
from simulator.traces.replay import replay
from simulator.traces.trace import RunTrace, TracedCollective
from simulator.traces.windows import one_step
from tests.support.kineto import COMMUNICATION, KinetoWriter

us = 1e-6
SEND_KERNEL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def trace_with(folder: Path, details: dict[str, Any]) -> RunTrace:
    """Return the trace of a rank with one kernel of NCCL, which says ``details``."""
    trace = KinetoWriter()
    trace.kernel(SEND_KERNEL, COMMUNICATION, 0, 10, trace.call("cudaLaunchKernel", -5), **details)
    return read_trace([trace.save(folder / "trace.json")])


def test_kernels_that_do_not_name_the_other_end_are_not_matched(tmp_path: Path) -> None:
    """Four ranks have a kernel of sends each, of 10, 20, 30 and 40 us. Which of them meet is not told: all keep their
    times, and nobody waits."""
    paths = []
    for rank in range(4):
        trace = KinetoWriter(rank, 4)
        trace.kernel(SEND_KERNEL, COMMUNICATION, 10, 10 * (rank + 1), trace.call("cudaLaunchKernel", 0))
        paths.append(trace.save(tmp_path / f"{rank}.json"))
    step = one_step(read_trace(paths), None)
    assert meetings(step) == []
    assert replay(step).played.step_s == pytest.approx(50 * us)
    assert replay(step).played.class_s["communication"] == pytest.approx(25 * us)


@pytest.mark.parametrize(
    ("collective", "group", "expected"),
    [
        ("send", "pipeline", "hand-over"),  # this project's trainer
        ("recv", "PIPELINE_MODEL_PARALLEL_GROUP", "hand-over"),  # Megatron-Core
        ("send", "mesh_pp", "hand-over"),  # torchtitan
        ("send", "undefined", "hand-over"),  # a group without a description, as DeepSpeed's
        ("nccl:coalesced", "mesh_pp", "hand-over"),
        ("send", "mesh_cp", "communication"),  # attention in a ring
        ("recv", "CONTEXT_PARALLEL_GROUP", "communication"),
        ("all_to_allv", "undefined", "communication"),  # which NCCL runs in the same kernel
        ("", "", "communication"),
    ],
)
def test_sends_and_receives_of_pipelines_are_hand_overs(
    collective: str, group: str, expected: str, tmp_path: Path
) -> None:
    details = {"Collective name": collective, "Process Group Description": group} if collective else {}
    (rank,) = trace_with(tmp_path, details).ranks
    assert CLASSES[rank.ops.code[0]] == expected
    operation = "all_to_all" if collective == "all_to_allv" else TRANSFER
    assert rank.collectives[rank.ops.collective[0]].operation == operation


def test_the_call_around_a_launch_tells_a_hand_over_too(tmp_path: Path) -> None:
    """The kernel says nothing, as in older files; ``record_param_comms`` around its launch says that it sends."""
    trace = KinetoWriter()
    call = trace.call("cudaLaunchKernel", 50)
    trace.kernel(SEND_KERNEL, COMMUNICATION, 60, 100, call)
    details: dict[str, Any] = {"Collective name": "send", "Group size": 4}
    trace.event("cpu_op", "record_param_comms", 40, 30, **details)
    rank = read_trace([trace.save(tmp_path / "trace.json")]).ranks[0]
    assert CLASSES[rank.ops.code[0]] == "hand-over"


@pytest.mark.parametrize(
    ("collective", "kernel", "operation"),
    [
        ("gather", SEND_KERNEL, "gather"),  # made of sends
        ("barrier", "ncclDevKernel_AllReduce_Sum_i8_RING_LL(ncclArgs)", "barrier"),  # made of an all-reduce
        ("nccl:coalesced", "ncclDevKernel_AllGather_RING_LL(ncclArgs)", "all_gather"),  # the kernel alone tells it
    ],
)
def test_what_was_called_counts_before_the_kernel_that_does_it(collective: str, kernel: str, operation: str) -> None:
    assert kernel_class(kernel, collective=collective).operation == operation


def test_a_transfer_is_timed_on_one_link(tmp_path: Path) -> None:
    """Of a pipeline's four ranks the first two are taken.

    450 MB take 1 ms at least at the 450 GB/s of an H100's NVLink. Both ways would take twice as long.
    """
    times = ExchangeTimes.on("dgx_h100", 4, "recorded")
    seconds = times.seconds(TracedCollective(TRANSFER, 450e6, "pipeline", 4, (0, 1, 2, 3)))
    assert seconds is not None
    assert 1e-3 < seconds < 2e-3
    details: dict[str, Any] = {"Collective name": "send", "In msg nelems": 100, "dtype": "Float", "Group size": 4}
    assert unknown_exchanges(trace_with(tmp_path, details)) == 0
    del details["In msg nelems"]
    assert unknown_exchanges(trace_with(tmp_path, details)) == 1
