"""One step under PyTorch's profiler: which kernels ran when, of which class, and how much communication was exposed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calibration.exposed import exposed_s
from simulator.timeline import covered_s
from simulator.traces.classes import KernelClass, kernel_class

KEPT = "kept step"
#: Ranges of the optimizer: what `Trainer.step` marks, and inside it what PyTorch's optimizers mark themselves; kernels
#: are told to the innermost.
OPTIMIZER = ("optimizer", "Optimizer.step")
NAME_LENGTH = 80


@dataclass(frozen=True)
class ProfiledKernel:
    """A kernel, or without GPUs an op of the CPU, in seconds of the host's clock."""

    stream: str
    kernel_class: str
    kind: str
    op: str
    name: str
    start_s: float
    end_s: float


def profiled(
    step: Callable[[], object], meet: Callable[[], object], before: int, kinds_by_op: Mapping[str, str], *, cuda: bool
) -> list[ProfiledKernel]:
    """The kernels of one ``step``, in order of start.

    Steps go ``before`` it under the profiler, one at least, and the ranks ``meet`` behind each, else they would wait in
    their collectives for whoever's profiler started last. ``kinds_by_op``: the kind of communication whose group torch
    does not say, by op; that of "" where an op is not listed.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    only_last = torch.profiler.schedule(wait=0, warmup=before, active=1)
    with torch.profiler.profile(activities=activities, schedule=only_last) as profiler:
        for _ in range(before):
            step()
            if cuda:
                torch.cuda.synchronize()
            profiler.step()
            meet()
        with torch.profiler.record_function(KEPT):
            step()
            if cuda:
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    return sorted(_kernels(trace, kinds_by_op, cuda=cuda), key=lambda kernel: kernel.start_s)


def _kernels(trace: dict[str, Any], kinds_by_op: Mapping[str, str], *, cuda: bool) -> Iterable[ProfiledKernel]:
    base = float(trace.get("baseTimeNanoseconds", 0)) * 1e-9
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kept = next(event for event in events if event.get("cat") == "user_annotation" and event["name"] == KEPT)
    began, ended = float(kept["ts"]), float(kept["ts"]) + float(kept["dur"])
    marks = "gpu_user_annotation" if cuda else "user_annotation"
    marked = [
        (event["tid"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") == marks and event["name"].startswith(OPTIMIZER)
    ]
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if cuda else ("cpu_op",)
    chosen = [event for event in events if event.get("cat") in wanted and began <= float(event["ts"]) < ended]
    for event in chosen if cuda else _innermost(chosen):
        start = float(event["ts"])
        updates = any(tid == event["tid"] and first <= start < last for tid, first, last in marked)
        kernel_class, kind, op = _class(event, updates=updates)
        if kernel_class == "communication" and not kind:
            kind = kinds_by_op.get(op, kinds_by_op[""])
        yield ProfiledKernel(
            stream=f"{'comm' if kernel_class == 'communication' else 'compute'} {event['tid']}",
            kernel_class=kernel_class,
            kind=kind,
            op=op,
            name=event["name"][:NAME_LENGTH],
            start_s=base + start * 1e-6,
            end_s=base + (start + float(event["dur"])) * 1e-6,
        )


def _innermost(events: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Ops on the host that call no others; of products, attention and communication the call."""
    by_thread: dict[Any, list[dict[str, Any]]] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        by_thread.setdefault(event["tid"], []).append(event)
    for ops in by_thread.values():
        called_until = 0.0
        for op, after in zip(ops, [*ops[1:], None], strict=True):
            end = op["ts"] + op["dur"]
            if op["ts"] < called_until:
                continue
            if _class(op, updates=False).name != "memory":
                called_until = end
            elif after is not None and after["ts"] < end:
                continue
            yield op


def _class(event: dict[str, Any], *, updates: bool) -> KernelClass:
    details = event.get("args", {})
    return kernel_class(
        event["name"],
        collective=str(details.get("Collective name", "")),
        group=str(details.get("Process Group Description", "")),
        updates=updates,
    )


def table(kernels: Iterable[ProfiledKernel]) -> list[dict[str, object]]:
    """Seconds and launches by class, kind and op."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for kernel in kernels:
        row = sums.setdefault((kernel.kernel_class, kernel.kind, kernel.op), [0.0, 0])
        row[0] += kernel.end_s - kernel.start_s
        row[1] += 1
    return [
        {"class": key[0], "kind": key[1], "op": key[2], "seconds": float(f"{seconds:.6g}"), "launches": launches}
        for key, (seconds, launches) in sorted(sums.items())
    ]


def exposure(kernels: Sequence[ProfiledKernel]) -> dict[str, object]:
    """``span_s``, ``busy_s``, ``exposed_s`` and ``exposed`` by kind: communication while no other kernel runs, what
    kinds have in common counted for the first by name."""
    if not kernels:
        return {"span_s": 0.0, "busy_s": 0.0, "exposed_s": 0.0, "exposed": {}}
    start, end = (np.array([getattr(kernel, name) for kernel in kernels]) for name in ("start_s", "end_s"))
    communicates = np.array([kernel.kernel_class == "communication" for kernel in kernels])
    counted = ~communicates
    kind = np.array([kernel.kind for kernel in kernels])
    busy = covered_s(start[counted], end[counted])
    exposed = {}
    for name in sorted({kernel.kind for kernel in kernels if kernel.kernel_class == "communication"}):
        counted |= kind == name
        both = covered_s(start[counted], end[counted])
        exposed[name] = float(f"{both - busy:.6g}")
        busy = both
    return {
        "span_s": float(f"{end.max() - start[0]:.6g}"),
        "busy_s": float(f"{busy:.6g}"),
        "exposed_s": float(f"{exposed_s(start, end, communicates):.6g}"),
        "exposed": exposed,
    }
