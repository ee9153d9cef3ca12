"""Traces of PyTorch's profiler (Kineto), read by the fields that are there, whatever version wrote them.

Categories and arguments are those of libkineto (pytorch/kineto, ``output_json.cpp``); older files spell categories
with capitals. CUPTI and roctracer alike give kernels a ``correlation`` with the call that launched them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from simulator.errors import InputError
from simulator.input_files import brief
from simulator.timeline import CATEGORIES
from simulator.traces.calls import CALL_KINDS, call_kind
from simulator.traces.classes import CLASSES, kernel_class, operation_of, simulated_class, with_hand_over
from simulator.traces.columns import RankColumns, rank_trace
from simulator.traces.comm_facts import collective_of
from simulator.traces.event_file import Event, EventFile
from simulator.traces.trace import EXCHANGE_CODES, STEP_MARK, RankTrace, RunTrace, TracedCollective
from simulator.units import counted

T = TypeVar("T", bound=Hashable)

#: What traces of simulated steps have under ``otherData`` as their producer (`simulator.output.trace`).
PRODUCER = "simulator"
#: Name of kernels that have none.
NAMELESS = "(no name)"

_KERNELS = ("kernel", "concurrent_kernel")
_COPIES = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")
_CALLS = ("cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime")
_MARKS = ("user_annotation", "gpu_user_annotation")
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,6})", re.IGNORECASE)
#: Ranges of the optimizer: those that PyTorch marks, and those that trainers mark by hand.
OPTIMIZER_MARKS = ("Optimizer.step", "optimizer")
_COMM_CALL = "record_param_comms"
#: Times in microseconds beyond which no clock of a profiler is: 3,000 years.
_LATEST_US = 1e17


class Numbering(Generic[T]):
    """Numbers for values, from 0 on in the order in which they come."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._number: dict[T, int] = {}

    def __call__(self, value: T) -> int:
        number = self._number.get(value)
        if number is None:
            number = self._number[value] = len(self.values)
            self.values.append(value)
        return number


@dataclass
class KinetoReader:
    """The events of one rank's file, gathered one by one. Times are microseconds of its clock."""

    path: Path
    names: Numbering[str] = field(default_factory=Numbering)
    streams: Numbering[tuple[int, int]] = field(default_factory=Numbering)
    threads: Numbering[tuple[str, str]] = field(default_factory=Numbering)
    collectives: Numbering[TracedCollective] = field(default_factory=Numbering)
    columns: RankColumns = field(default_factory=RankColumns)
    nameless: int = 0
    lengthless: int = 0
    _classes: dict[tuple[int, str, str], tuple[int, str]] = field(default_factory=dict)

    def read(self, file: EventFile) -> None:
        """Read all events of the file."""
        for event in file.events():
            if event.get("ph") != "X":
                continue
            category = str(event.get("cat", "")).lower()
            details = event.get("args")
            details = details if isinstance(details, dict) else {}
            if category in _KERNELS or category in _COPIES:
                self._gpu_op(event, details, is_copy=category in _COPIES)
            elif category in _CALLS:
                self._call(event, details)
            elif category == "cuda_sync":
                self._synchronization(details)
            elif category in _MARKS:
                self._mark(event, details, on_gpu=category != "user_annotation")
            elif event.get("name") == _COMM_CALL:
                self._comm_call(event, details)

    def _times(self, event: Event) -> tuple[float, float]:
        """Return start and end of an event in microseconds. Raises `InputError` where they are none."""
        start, length = event.get("ts"), event.get("dur", 0)
        try:
            start_us, length_us = float(start), float(length)  # type: ignore[arg-type]
            usable = abs(start_us) < _LATEST_US and length_us < _LATEST_US
        except (TypeError, ValueError, OverflowError):
            usable, start_us, length_us = False, math.nan, math.nan
        if not usable:
            name = brief(str(event.get("name")))
            raise InputError(f"has no usable time at event {name}", file=self.path, found=brief([start, length]))
        if length_us < 0:
            name = brief(str(event.get("name")))
            raise InputError(f"has an event that ends before it starts: {name}", file=self.path, found=brief(length))
        return start_us, start_us + length_us

    def _gpu_op(self, event: Event, details: Mapping[str, Any], *, is_copy: bool) -> None:
        start, end = self._times(event)
        self.nameless += not event.get("name")
        self.lengthless += "dur" not in event
        name, collective = self.names(str(event.get("name") or NAMELESS)), -1
        operation_text = str(details.get("Collective name", ""))
        code, operation = self._class(name, operation_text, str(details.get("Process Group Description", "")))
        if details.get("category") in CATEGORIES and "phase" in details:  # a simulated step's
            code = CLASSES.index(simulated_class(str(details.get("kind", "")), details["category"]))
        if code in EXCHANGE_CODES:
            collective = self.collectives(collective_of(details, operation))
        device = _whole(details.get("device", event.get("pid")))
        stream = self.streams((device, _whole(details.get("stream", event.get("tid")))))
        correlation = _whole(details.get("correlation"))
        self.columns.add_op(start, end, (name, code, stream, correlation, collective, int(is_copy)))

    def _class(self, name: int, collective: str, group: str) -> tuple[int, str]:
        key = name, collective, group
        if key not in self._classes:
            kernel = kernel_class(self.names.values[name], collective=collective, group=group)
            self._classes[key] = CLASSES.index(with_hand_over(kernel.name, kernel.kind)), kernel.operation
        return self._classes[key]

    def _call(self, event: Event, details: Mapping[str, Any]) -> None:
        name = str(event.get("name", ""))
        kind = call_kind(name)
        if kind is None:
            return
        start, end = self._times(event)
        thread = self.threads((str(event.get("pid")), str(event.get("tid"))))
        facts = self.names(name), CALL_KINDS.index(kind), thread, _whole(details.get("correlation"))
        self.columns.add_call(start, end, facts)

    def _synchronization(self, details: Mapping[str, Any]) -> None:
        if details.get("cuda_sync_kind") != "Stream Wait Event" or _whole(details.get("wait_on_stream")) < 0:
            return
        device = _whole(details.get("device"))
        stream, awaited = (self.streams((device, _whole(details.get(key)))) for key in ("stream", "wait_on_stream"))
        recorded = _whole(details.get("wait_on_cuda_event_record_corr_id"))
        self.columns.waits.append((_whole(details.get("correlation")), stream, recorded, awaited))

    def _mark(self, event: Event, details: Mapping[str, Any], *, on_gpu: bool) -> None:
        name = str(event.get("name", ""))
        if name.startswith(STEP_MARK) and not on_gpu:
            self.columns.steps.append((name, *self._times(event)))
        elif name.startswith(OPTIMIZER_MARKS):
            device = _whole(details.get("device", event.get("pid")))
            stream = self.streams((device, _whole(details.get("stream", event.get("tid"))))) if on_gpu else -1
            self.columns.optimizer_marks.append((stream, *self._times(event)))

    def _comm_call(self, event: Event, details: Mapping[str, Any]) -> None:
        if "Collective name" in details:
            collective = self.collectives(collective_of(details, operation_of(str(details["Collective name"]))))
            start, end = self._times(event)
            self.columns.comm_calls.append((start, end, collective))


def _whole(value: object) -> int:
    """Return a whole number, which may be written as text; -1 where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | str | float):
        return -1
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return -1
    return number if abs(number) < 2**62 else -1


def read_trace(paths: Sequence[Path]) -> RunTrace:
    """Return the trace of a run, of which ``paths`` hold a rank each. Raises `InputError`."""
    readers, headers = [], []
    for path in paths:
        reader, events = KinetoReader(path), EventFile(path)
        reader.read(events)
        if not len(reader.columns.op_start):
            raise InputError(
                "has no kernels of a GPU", file=path, fix="record with ProfilerActivity.CUDA, while the GPU works"
            )
        check_readable(reader, events.header)
        readers.append(reader)
        headers.append(events.header)
    ranks = [_rank(path, header, number) for number, (path, header) in enumerate(zip(paths, headers, strict=True))]
    for rank, times in Counter(ranks).items():
        if times > 1:
            raise InputError(
                f"{times} files are of rank {rank}", file=paths[ranks.index(rank)], fix="one file per rank"
            )
    clocks = [_nanoseconds(header) for header in headers]
    first = min(clocks)
    begins = [(clock - first) * 1e-3 + reader.columns.first_us for clock, reader in zip(clocks, readers, strict=True)]
    traces = [
        _trace(reader, header, rank, (begin - min(begins)) * 1e-6)
        for reader, header, rank, begin in zip(readers, headers, ranks, begins, strict=True)
    ]
    return RunTrace(tuple(sorted(traces, key=lambda trace: trace.rank)))


def check_readable(reader: KinetoReader, header: Mapping[str, Any]) -> None:
    """Raise `InputError` where kernels have no lengths, or are of several ranks of a simulated step."""
    if reader.lengthless == len(reader.columns.op_start):
        raise InputError("does not say how long kernels ran", file=reader.path, fix="events with the field dur")
    other, devices = header.get("otherData"), {device for device, _ in reader.streams.values}
    if isinstance(other, dict) and other.get("producer") == PRODUCER and len(devices) > 1:
        ranks = ", ".join(map(str, sorted(devices)))
        raise InputError(
            "holds several ranks", file=reader.path, found=f"ranks {ranks}", fix="llmsim run WORKLOAD --trace-dir DIR"
        )


def _omissions(reader: KinetoReader) -> Iterator[str]:
    """Yield sentences on kernels that lack their name or length."""
    if reader.nameless:
        yield f"{counted(reader.nameless, 'kernel')} without a name, counted as memory unless arguments say more"
    if reader.lengthless:
        yield f"{counted(reader.lengthless, 'kernel')} without a length (dur), counted as 0 s"
    devices = {device for device, _ in reader.streams.values}
    if len(devices) > 1:
        yield f"kernels of {len(devices)} GPUs in one file are read as streams of one rank, so that shares exceed 100 %"


def _trace(reader: KinetoReader, header: Mapping[str, Any], rank: int, begin_s: float) -> RankTrace:
    properties, distributed = header.get("deviceProperties"), header.get("distributedInfo")
    first = properties[0] if isinstance(properties, list) and properties else {}
    gpu = str(first.get("name", "")) if isinstance(first, dict) else ""
    world = _whole(distributed.get("world_size")) if isinstance(distributed, dict) else -1
    devices = {device for device, _ in reader.streams.values}
    streams = tuple(
        f"stream {stream}" if len(devices) == 1 else f"GPU {device} stream {stream}"
        for device, stream in reader.streams.values
    )
    trace = rank_trace(
        reader.columns,
        rank=rank,
        file=str(reader.path),
        gpu=gpu,
        world_size=max(world, 0),
        names=tuple(reader.names.values),
        streams=streams,
        collectives=tuple(reader.collectives.values),
        begin_s=begin_s,
    )
    return replace(trace, missing=(*trace.missing, *_omissions(reader)))


def _rank(path: Path, header: Mapping[str, Any], number: int) -> int:
    """Return the rank that a file says it is of, else the one in its name, else its position."""
    info = header.get("distributedInfo")
    rank = _whole(info.get("rank")) if isinstance(info, dict) else -1
    match = _RANK_IN_NAME.search(path.name)
    return rank if rank >= 0 else int(match[1]) if match else number


def _nanoseconds(header: Mapping[str, Any]) -> int:
    """Return the time that a file's times count from; 0 where they are absolute."""
    return max(_whole(header.get("baseTimeNanoseconds")), 0)
