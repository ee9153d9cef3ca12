"""Traces in the form of PyTorch's profiler, small enough to work out by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

COMPUTE, COMMUNICATION = 7, 20


class KinetoWriter:
    """Events of one rank; times in microseconds."""

    def __init__(self, rank: int = 0, world: int = 1, gpu: str = "NVIDIA H100 80GB HBM3") -> None:
        self.header: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": gpu}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world},
        }
        self.events: list[dict[str, Any]] = []
        self._correlations = 0

    def event(self, category: str, name: str, start: float, length: float, thread: int = 1, **args: Any) -> None:
        """Add any complete event."""
        times = {"ph": "X", "ts": start, "dur": length, "pid": 0, "tid": thread}
        self.events.append({**times, "cat": category, "name": name, "args": args})

    def call(self, name: str, start: float, length: float = 5.0) -> int:
        """Add a call of the host; return its correlation."""
        self._correlations += 1
        self.event("cuda_runtime", name, start, length, correlation=self._correlations)
        return self._correlations

    def kernel(self, name: str, stream: int, start: float, length: float, correlation: int, **args: Any) -> None:
        """Add a kernel that call ``correlation`` launched."""
        details = {"device": 0, "stream": stream, "correlation": correlation, **args}
        self.event("kernel", name, start, length, stream, **details)

    def wait(self, stream: int, awaited: int, start: float) -> None:
        """Let ``stream`` wait for all that ``awaited`` has by now, by an event."""
        recorded = self.call("cudaEventRecord", start, 1.0)
        details = {
            "cuda_sync_kind": "Stream Wait Event",
            "stream": stream,
            "wait_on_stream": awaited,
            "wait_on_cuda_event_record_corr_id": recorded,
            "device": 0,
        }
        correlation = self.call("cudaStreamWaitEvent", start + 2.0, 1.0)
        self.event("cuda_sync", "Stream Wait Event", start + 2.0, 1.0, stream, correlation=correlation, **details)

    def save(self, path: Path) -> Path:
        """Write the trace, gzipped where the name ends in .gz."""
        text = json.dumps({**self.header, "traceEvents": self.events}).encode()
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
        return path


def data_parallel_step(rank: int, slowness: tuple[float, ...] = (1.0, 1.2), **header: Any) -> KinetoWriter:
    """A step of data parallelism.

    It has three kernels: 2, 1 and 3 ms on a GPU of slowness 1. An all-reduce of 8 MB follows, which takes 1 ms once all
    ranks have come. Beside that runs a kernel of 0.4 ms, and behind it an optimizer of 0.5 ms.

    The first kernel starts 110 us after the step. The all-reduce starts 5 us after what it waits for, as does the
    optimizer. The host waits for that, and ends the step 100 us later.
    """
    trace = KinetoWriter(rank, len(slowness))
    trace.header.update(header)
    computed = [110 + 6000 * slow for slow in slowness]
    reduced = max(computed) + 5 + 1000
    slow, ready = slowness[rank], computed[rank]
    kernels = [("sm90_xmma_gemm_bf16", 2000), ("flash_fwd_kernel", 1000), ("nvjet_hsh_128x256", 3000)]
    start = 110.0
    for number, (name, length) in enumerate(kernels):
        trace.kernel(name, COMPUTE, start, length * slow, trace.call("cudaLaunchKernel", 100 + 10 * number))
        start += length * slow
    trace.wait(COMMUNICATION, COMPUTE, 140)
    details = {
        "Collective name": "allreduce", "In msg nelems": 2_000_000, "Out msg nelems": 2_000_000, "dtype": "Float",
        "Group size": len(slowness), "Process Group Name": "0", "Process Group Description": "default_pg",
        "Process Group Ranks": str(list(range(len(slowness)))),
    }  # fmt: skip
    name, call = (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        trace.call("cuLaunch", 150),
    )
    trace.kernel(name, COMMUNICATION, ready + 5, reduced - ready - 5, call, **details)
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
    trace.kernel(name, COMPUTE, ready, 400, trace.call("cudaLaunchKernel", 160))
    trace.wait(COMPUTE, COMMUNICATION, 170)
    trace.event("gpu_user_annotation", "Optimizer.step#AdamW.step", reduced + 5, 500, COMPUTE, device=0, stream=COMPUTE)
    name = "void at::native::multi_tensor_apply_kernel<at::native::TensorListMetadata<4>>()"
    trace.kernel(name, COMPUTE, reduced + 5, 500, trace.call("cudaLaunchKernel", 180))
    trace.call("cudaDeviceSynchronize", 200, reduced + 505 - 200)
    trace.event("user_annotation", "ProfilerStep#3", 0, reduced + 605)
    return trace


def save_step(folder: Path, slowness: tuple[float, ...] = (1.0, 1.2), suffix: str = ".json.gz") -> list[Path]:
    """Write the traces of all ranks of `data_parallel_step`."""
    return [data_parallel_step(rank, slowness).save(folder / f"rank{rank}{suffix}") for rank in range(len(slowness))]
