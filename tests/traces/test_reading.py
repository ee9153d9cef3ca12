"""Traces of PyTorch's profiler are read by what is in them; what is broken or missing is said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.errors import InputError
from simulator.traces import event_file
from simulator.traces.calls import call_kind
from simulator.traces.classes import CLASSES, kernel_class
from simulator.traces.columns import NO_BYTES, NO_LAUNCHES, NO_STEPS, NO_WAITS
from simulator.traces.files import open_trace
from simulator.traces.kineto import read_trace
from tests.support.kineto import COMMUNICATION, KinetoWriter, data_parallel_step, save_step


def test_a_step_is_read_whole(tmp_path: Path) -> None:
    """The hand-made step has six kernels with their classes, launches and streams, 8 MB among two ranks, two waits."""
    trace = open_trace([str(path) for path in save_step(tmp_path)])
    first = trace.ranks[0]
    assert [rank.rank for rank in trace.ranks] == [0, 1]
    assert (first.gpu, first.world_size, trace.missing) == ("NVIDIA H100 80GB HBM3", 2, [])
    names = ["matmul", "attention", "matmul", "memory", "communication", "optimizer"]
    assert [CLASSES[code] for code in first.ops.code] == names
    assert first.ops.start_s - first.steps[0].start_s == pytest.approx(
        np.array([110, 2110, 3110, 6110, 6115, 8320]) * 1e-6
    )
    assert first.launch_s - first.steps[0].start_s == pytest.approx(np.array([100, 110, 120, 160, 150, 180]) * 1e-6)
    assert [first.streams[code] for code in first.ops.stream[[0, 4]]] == ["stream 7", "stream 20"]
    collective = first.collectives[first.ops.collective[4]]
    assert (collective.operation, collective.nbytes, collective.ranks) == ("all_reduce", 8e6, (0, 1))
    waits = first.waits
    assert [(first.streams[a], first.streams[b]) for a, b in zip(waits.stream, waits.awaited, strict=True)] == [
        ("stream 20", "stream 7"), ("stream 7", "stream 20"),
    ]  # fmt: skip


def test_ranks_have_one_clock(tmp_path: Path) -> None:
    """Newer files count from a base of their own: rank 1's clock starts 2 ms before rank 0's, and reads 2 ms more."""
    first, second = data_parallel_step(0), data_parallel_step(1)
    first.header["baseTimeNanoseconds"], second.header["baseTimeNanoseconds"] = 10_000_000, 8_000_000
    for event in second.events:
        event["ts"] += 2000
    trace = read_trace([first.save(tmp_path / "a.json"), second.save(tmp_path / "b.json")])
    assert trace.ranks[0].steps[0].start_s == pytest.approx(trace.ranks[1].steps[0].start_s, abs=1e-9)


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
def test_files_are_read_in_pieces_of_any_size(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a piece ends, in a name, a number or a sign of two bytes, the events are the same."""
    monkeypatch.setattr(event_file, "_CHUNK", chunk)
    head = {"schemaVersion": 1, "note": "größer", "list": [1, {"a": []}]}
    events = [{"ph": "X", "name": "é" * n, "ts": 123.5 * n, "args": {"x": [n]}} for n in range(40)]
    text = json.dumps({**head, "traceEvents": events, "last": 12345678}, ensure_ascii=False, indent=1)
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    file = event_file.EventFile(path)
    assert list(file.events()) == events
    assert file.header == {**head, "last": 12345678}
    path.write_text(json.dumps(events), encoding="utf-8")  # without a header: a list alone
    assert list(event_file.EventFile(path).events()) == events


def test_what_is_missing_is_said_and_the_rest_goes_on(tmp_path: Path) -> None:
    """Without calls, marks, bytes, or records of waits there is a sentence each, and the kernels are there."""
    whole = data_parallel_step(0)
    bare = KinetoWriter(0, 2)
    bare.events = [event for event in whole.events if event["cat"] == "kernel"]
    for event in bare.events:
        event["args"] = {"stream": event["args"]["stream"]}
    rank = read_trace([bare.save(tmp_path / "bare.json")]).ranks[0]
    assert rank.missing == (NO_LAUNCHES, NO_STEPS, NO_BYTES)
    assert len(rank.ops) == 6
    without = data_parallel_step(0)
    without.events = [event for event in without.events if event["cat"] != "cuda_sync"]
    assert read_trace([without.save(tmp_path / "waits.json")]).ranks[0].missing == (NO_WAITS,)


def test_bytes_may_stand_at_the_call_of_the_host(tmp_path: Path) -> None:
    """Kernels that say nothing belong to the ``record_param_comms`` around their launch: 1,000 halves to four ranks."""
    trace = KinetoWriter()
    call = trace.call("cudaLaunchKernel", 50)
    trace.kernel("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", COMMUNICATION, 60, 100, call)
    details: dict[str, Any] = {
        "Collective name": "_allgather_base",
        "In msg nelems": 250,
        "Out msg nelems": 1000,
        "dtype": "Half",
    }
    details["Group size"] = 4
    trace.event("cpu_op", "record_param_comms", 40, 30, **details)
    rank = read_trace([trace.save(tmp_path / "trace.json")]).ranks[0]
    collective = rank.collectives[rank.ops.collective[0]]
    assert (collective.operation, collective.nbytes, collective.size) == ("all_gather", 2000.0, 4)


@pytest.mark.parametrize(
    ("name", "kind", "operation"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclArgs)", "communication", "reduce_scatter"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "communication", "send_recv"),
        ("void deep_ep::internode::combine<false, 4>(int4*)", "communication", "all_to_all"),
        ("void dpsk::ep::internode::cached_notify<false>(int)", "communication", "barrier"),
        ("Cijk_Ailk_Bljk_SB_MT64x64x16_MI16x16x4x1", "matmul", ""),
        ("void fbgemm_gpu::permute_2D_lengths_kernel<int>(int)", "memory", ""),
        ("void flash::compute_attn_ws<Flash_fwd_kernel_traits<192>>(cutlass)", "attention", ""),
        ("Memcpy HtoD (Pinned -> Device)", "copy", ""),
        ("Memset (Device)", "memory", ""),
        ("FusedAdamMathFunctor<float, 4>", "optimizer", ""),
    ],
)  # fmt: skip
def test_kernels_have_their_class(name: str, kind: str, operation: str) -> None:
    assert kernel_class(name)[::2] == (kind, operation)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cuLaunchKernelEx", "launch"),
        ("hipGraphLaunch", "launch"),
        ("cudaMemsetAsync", "launch"),  # the host does not wait for it
        ("hipMemcpyWithStream", "copy"),
        ("cuStreamSynchronize", "synchronize"),
        ("cudaEventRecordWithFlags", "record"),
        ("hipStreamWaitEvent", "wait"),
        ("cudaStreamIsCapturing", None),
    ],
)
def test_calls_have_their_kind_under_the_names_of_either_vendor(name: str, kind: str | None) -> None:
    assert call_kind(name) == kind


def _with(kernel: object) -> str:
    return json.dumps({"traceEvents": [kernel]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello", "begins with 'hello'"),
        (b'{"a": 1}', "has no list traceEvents"),
        (b'{"traceEvents": [{"ph": "X", "na', "is cut off: its JSON does not end"),
        (b'{"traceEvents": [{"ph": "M"}]', "is cut off: its JSON does not end"),
        (b'{"traceEvents": [{"ph": "X"; "name": 1}], "a": [1, 2, 3]}', "cannot be read from"),
        (
            gzip.compress(b'{"traceEvents": [' + bytes(range(32, 90)) * 50, mtime=0)[:60],
            "cannot be unpacked to its end",
        ),
        (b'{"traceEvents": []}', "has no kernels of a GPU"),
        (b'{"schema": "1.1.0", "nodes": [{}]}', "is an execution trace of PyTorch"),
        (b'{"workload_graph": [{}], "ngpus": 8}', "is an execution trace of Chakra"),
        (b"name".ljust(257, b"\0") + b"ustar", "is an archive"),
        (b"[" * 100_000, "nested too deeply"),
        (_with({"ph": "X", "cat": "kernel", "name": "k", "ts": 5, "dur": -3}).encode(), "ends before it starts: 'k'"),
        (_with({"ph": "X", "cat": "kernel", "name": "k", "ts": 1e300}).encode(), "no usable time at event 'k'"),
        (_with({"ph": "X", "cat": "kernel", "name": "k", "ts": "now"}).encode(), "no usable time at event 'k'"),
        (_with({"ph": "X", "cat": "kernel", "name": "k", "ts": float("nan")}).encode(), "no usable time at event 'k'"),
    ],
)  # fmt: skip
def test_broken_files_are_named_in_a_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as problem:
        read_trace([path])
    assert message in problem.value.message
    assert problem.value.file == str(path)


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    paths = [data_parallel_step(0).save(tmp_path / f"{name}.json") for name in "ab"]
    with pytest.raises(InputError, match="2 files are of rank 0"):
        read_trace(paths)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no traces"):
        open_trace([str(tmp_path / "empty")])


@pytest.mark.slow
def test_a_run_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "cpu.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.export_chrome_trace(str(path))
    with pytest.raises(InputError, match="has no kernels of a GPU"):
        read_trace([path])


SHARED = Path(__file__).resolve().parents[3] / "shared/reference/files"
#: File -> ranks' ops, marked steps, and the streams of its GPU, counted with ``json`` alone.
KINETO = {
    "kineto/hta_alexnet_1gpu.json.gz": (98, 0, 2),
    "kineto/hta_amd_mi250_minitoy.json.gz": (16, 2, 1),
    "kineto/hta_cuda_event_sync_multi_stream.json.gz": (6, 0, 3),
    "kineto/hta_resnet_ddp_2gpu_rank0_onestep.json.gz": (1258, 1, 2),
    "traces/deepseek_train_h800_kineto.json.gz": (983, 1, 3),
    "traces/hta_alexnet_trace.json.gz": (98, 0, 2),
    "traces/hta_kineto_simple_add.json.gz": (4, 0, 1),
    "traces/hta_sampled_rank-0.json.gz": (1204, 2, 5),
    "traces/hta_sampled_rank-1.json.gz": (1154, 2, 5),
    "traces/hta_triton_example.json.gz": (1, 1, 1),
    "traces/param_linear_kineto.json.gz": (10356, 0, 1),
}


@pytest.mark.parametrize("name", KINETO)
def test_real_files_are_read(name: str) -> None:
    if not (SHARED / name).exists():
        pytest.skip("the file of another project is not here")
    rank = read_trace([SHARED / name]).ranks[0]
    used = np.unique(rank.ops.stream)
    assert (len(rank.ops), len(rank.steps), len(used)) == KINETO[name]
    assert (rank.ops.call >= 0).all()


#: File of another kind -> what is said of it.
OTHERS = {
    "chakra/chakra.0.et.gz": "is an execution trace of Chakra",
    "chakra/small_chakra.0.json": "is an execution trace of Chakra",
    "traces/astra_custom_ring_allreduce.0.et": "is an execution trace of Chakra",
    "traces/chakra_feeder_tests_trace.tar.gz": "is an archive",
    "traces/chakra_1.0.2-chakra.0.0.4.tgz": "is an archive",
    "traces/hta_pytorch_et_simple_add.json.gz": "is an execution trace of PyTorch",
    "traces/param_linear_et.json.gz": "is an execution trace of PyTorch",
    "traces/param_resnet_2gpu_et_1.1.0.json.gz": "is an execution trace of PyTorch",
    "traces/azure_2023_conv.csv": "is a list of requests to a model that serves, not a trace",
    "traces/mooncake_synthetic_trace.jsonl": "is a list of requests to a model that serves, not a trace",
    "traces/bytedance_trace-ST.parquet": "is a Parquet table",
    "hf/Qwen--Qwen3-8B_config.json": "is a model of Hugging Face",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_told_by_their_kind(name: str) -> None:
    if not (SHARED / name).exists():
        pytest.skip("the file of another project is not here")
    with pytest.raises(InputError, match=OTHERS[name]):
        read_trace([SHARED / name])


def test_kernels_without_lengths_or_names_are_told_of(tmp_path: Path) -> None:
    """Kernels that nowhere say how long they ran are refused; single ones, and those without names, are counted."""
    trace = data_parallel_step(0)
    kernels = [event for event in trace.events if event["cat"] == "kernel"]
    del kernels[0]["dur"]
    kernels[1]["name"] = None
    missing = read_trace([trace.save(tmp_path / "some.json")]).missing
    assert missing == [
        "1 kernel without a name, counted as memory unless arguments say more",
        "1 kernel without a length (dur), counted as 0 s",
    ]
    for kernel in kernels[1:]:
        del kernel["dur"]
    with pytest.raises(InputError, match="does not say how long kernels ran"):
        read_trace([trace.save(tmp_path / "none.json")])


@pytest.mark.parametrize("name", ["trace.pftrace", "trace.pftrace.gz"])
def test_perfettos_own_format_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x0a\x10{")
    with pytest.raises(InputError, match="Perfetto's own format, which `trace` does not read"):
        open_trace([str(tmp_path / name)])


def test_kernels_of_several_gpus_in_one_file_are_told_of(tmp_path: Path) -> None:
    trace = KinetoWriter()
    for device in range(2):
        details = {"device": device, "stream": 7, "correlation": trace.call("cudaLaunchKernel", 0)}
        trace.event("kernel", "k", 0, 10, 7, **details)
    (sentence,) = [text for text in read_trace([trace.save(tmp_path / "two.json")]).missing if "GPUs" in text]
    assert sentence.startswith("kernels of 2 GPUs in one file")
