"""Chrome traces of Timelines, for Perfetto, chrome://tracing and HolisticTraceAnalysis.

Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Kineto's
conventions hold: a process per rank, a thread per stream, category ``kernel``, and the stream repeated in ``args``.
Communication is named ``ncclKernel_...``, by which HolisticTraceAnalysis (facebookresearch, ``hta/utils/utils.py``)
recognises it. That tool reads a file per rank, with its rank under ``distributedInfo``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simulator.analysis.time.activity import compute_lane_spans
from simulator.analysis.time.memory_curve import memory_curve
from simulator.analysis.time.pipeline_ranks import one_rank_per_stage, pipeline_ranks
from simulator.arrays import Floats, Ints
from simulator.output.comm_arguments import CommArguments
from simulator.output.files import writing
from simulator.program import COMPUTE_LANE
from simulator.timeline import CATEGORIES, FIRST_COMMUNICATION, Template, Timeline
from simulator.units import GiB

TRACE_VERSION = 1
_NS = 1e9
_MICROBATCH = "\x00"  # stands for the micro-batch's number in a format


def write_trace(
    timeline: Timeline,
    path: str | Path,
    *,
    ranks: Sequence[int] | None = None,
    name: str = "",
    gpu: str | None = None,
    communication: CommArguments | None = None,
) -> None:
    """Write the rows of ``ranks`` (simulated ones; default: one per pipeline stage) as trace events.

    Times are microseconds with three decimals. Every kernel and collective is a complete event (``X``) on the track of
    its lane. It is named with its phase. Its micro-batch is an argument, so that tables by name sum over micro-batches.
    Sends point to their receives by flow events (``s``, ``f``). Memory that the step takes and frees (activations,
    workspace and more) is a counter (``C``). Equal Timelines give equal bytes. ``.gz`` compresses.
    ``gpu``: type of the ranks' GPU. With it the file is as PyTorch's profiler writes it: it names the GPU and marks the
    step. ``communication``: bytes and groups, which are written where they are known.
    Raises ValueError for a rank that is not simulated, `InputError` where the file cannot be written.
    """
    chosen = drawn_ranks(timeline, ranks)
    head: dict[str, Any] = {
        "schemaVersion": TRACE_VERSION,
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": "nccl", "rank": chosen[0] if chosen else 0, "world_size": timeline.n_ranks},
        "otherData": {
            "name": name,
            "version": TRACE_VERSION,
            "producer": "simulator",
            "time_unit": "us",
            "bytes_unit": "B",
            "step_time_s": timeline.step_time_s,
            "ranks": {str(rank): timeline.ranks_like[rank] for rank in chosen},
        },
    }
    if gpu is not None:
        head["deviceProperties"] = [{"id": rank, "name": gpu} for rank in chosen]
    with writing(path) as file:
        file.write((json.dumps(head, ensure_ascii=False, indent=1)[:-2] + ',\n "traceEvents": [\n').encode())
        lines = _events(timeline, chosen, communication, marked=gpu is not None)
        file.write(next(lines, "").encode())
        for text in lines:
            file.write(b",\n")
            file.write(text.encode())
        file.write(b"\n]}\n")


def drawn_ranks(timeline: Timeline, ranks: Sequence[int] | None) -> list[int]:
    """Return ``ranks``, or one per pipeline stage. Raises ValueError for a rank that is not simulated."""
    chosen = one_rank_per_stage(timeline) if ranks is None else list(ranks)
    unknown = [rank for rank in chosen if rank not in timeline.ranks_like]
    if unknown:
        raise ValueError(f"ranks {unknown} are not simulated")
    return chosen


def _events(
    timeline: Timeline, ranks: Sequence[int], communication: CommArguments | None, *, marked: bool
) -> Iterator[str]:
    """Yield pieces of one or more events, comma-separated."""
    stages = pipeline_ranks(timeline)
    tracks = TraceTracks(timeline, ranks)
    for rank in ranks:
        yield from _names(rank, stages[rank], timeline, tracks)
        if marked:
            yield from _step_mark(timeline, rank)
    writer = _SpanWriter(timeline, tracks, communication)
    for rank in ranks:
        for span in timeline.spans_of(rank).tolist():
            yield writer.text(span)
        yield from _memory_counter(timeline, rank)
    yield from _flows(timeline, ranks, tracks)


def _step_mark(timeline: Timeline, rank: int) -> Iterator[str]:
    """Yield the annotation that PyTorch's profiler sets around a step, on a track of its own."""
    yield _dump({"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "ts": 0, "args": {"name": "steps"}})
    length_us = timeline.own_period_s.get(rank, timeline.step_time_s) * 1e6
    mark = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#0", "pid": rank, "tid": 0}
    yield _dump({**mark, "ts": 0, "dur": round(length_us, 3), "args": {}})


def _dump(event: dict[str, Any]) -> str:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":"))


class TraceTracks:
    """Threads of rows: one per lane of a rank, and more where operations of a lane overlap.

    ``threads[rank]``: names in order, thread ids from 1. ``span_thread``: thread of each span of another lane than the
    compute lane.
    """

    def __init__(self, timeline: Timeline, ranks: Sequence[int]) -> None:
        self.threads: dict[int, list[str]] = {}
        self.span_thread: dict[int, int] = {}
        compute = compute_lane_spans(timeline)
        inside = [set(template.lanes) - {COMPUTE_LANE} for template in timeline.templates]
        for rank in ranks:
            spans = timeline.spans_of(rank)
            inline: dict[str, list[int]] = defaultdict(list)
            for code in np.unique(timeline.template[spans[compute[spans]]]).tolist():
                for lane in sorted(inside[code]):
                    inline[lane] += spans[compute[spans] & (timeline.template[spans] == code)].tolist()
            by_lane: dict[str, list[int]] = defaultdict(list)
            for span in spans[~compute[spans]].tolist():
                by_lane[timeline.lane_names[timeline.lane[span]]].append(span)
            names = self.threads[rank] = [COMPUTE_LANE]
            for lane in sorted({*inline, *by_lane}):
                self._place(timeline, names, lane, by_lane[lane], inline[lane])

    def _place(self, timeline: Timeline, names: list[str], lane: str, spans: list[int], inline: list[int]) -> None:
        """Give each span of a lane the first thread that is free by then.

        ``inline``: compute spans with rows on this lane; their rows have the lane's first thread.
        """
        free_at: list[float] = []
        base = len(names)
        if inline:
            names.append(lane)
            free_at.append(np.inf if _overlap(timeline, spans, inline) else 0.0)
        for span in sorted(spans, key=lambda s: (timeline.start_s[s], timeline.end_s[s], s)):
            start = float(timeline.start_s[span])
            slot = next((i for i, free in enumerate(free_at) if free <= start), len(free_at))
            if slot == len(free_at):
                free_at.append(0.0)
                names.append(lane if slot == 0 else f"{lane} {slot + 1}")
            free_at[slot] = float(timeline.end_s[span])
            self.span_thread[span] = base + slot + 1

    def inline(self, rank: int, lane: str) -> int:
        """Return the thread of a lane's rows inside compute spans."""
        return self.threads[rank].index(lane) + 1


def _overlap(timeline: Timeline, spans: list[int], inline: list[int]) -> bool:
    """Return True where any of ``spans`` overlaps any of the spans ``inline``."""
    starts, ends = np.sort(timeline.start_s[inline]), np.sort(timeline.end_s[inline])
    begun = np.searchsorted(starts, timeline.end_s[spans], side="left")
    over = np.searchsorted(ends, timeline.start_s[spans], side="right")
    return bool((begun > over).any())


def _names(rank: int, stage: int, timeline: Timeline, tracks: TraceTracks) -> Iterator[str]:
    def metadata(what: str, tid: int, **args: Any) -> str:
        return _dump({"ph": "M", "name": what, "pid": rank, "tid": tid, "ts": 0, "args": args})

    alike = timeline.ranks_like[rank]
    yield metadata("process_name", 0, name=f"rank {rank} · stage {stage}")
    if alike > 1:
        yield metadata("process_labels", 0, labels=f"as {alike} ranks")
    yield metadata("process_sort_index", 0, sort_index=stage)
    for index, lane in enumerate(tracks.threads[rank], start=1):
        yield metadata("thread_name", index, name=lane.replace("_", " "))
        yield metadata("thread_sort_index", index, sort_index=index)


class RowTimes:
    """Row starts and ends of a Timeline's spans, nanoseconds."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._ends_ns: dict[int, tuple[Ints, Ints]] = {}

    def rows(self, span: int) -> tuple[Ints, Ints]:
        """Return row starts and ends in nanoseconds, clipped to the rounded span, so that rows do not overlap."""
        timeline = self._timeline
        first, last = nanoseconds(timeline.start_s[span]), nanoseconds(timeline.end_s[span])
        if span in timeline.stretched:
            start, end = (nanoseconds(column) for column in timeline.stretched[span])
            end = np.clip(np.maximum(start, end), first, last)
            return np.minimum(np.clip(start, first, last), end), end
        code = int(timeline.template[span])
        if code not in self._ends_ns:
            template = timeline.templates[code]
            self._ends_ns[code] = nanoseconds(template.start_s), nanoseconds(template.end_s)
        start, end = (np.minimum(first + column, last) for column in self._ends_ns[code])
        if len(end) == 1:
            end[0] = last  # a communication's length is its span's
        return start, end


class _SpanWriter:
    """Writer of spans as text.

    Events of a template differ between spans in times and micro-batch alone. They are formatted once, with placeholders
    for these.
    """

    def __init__(self, timeline: Timeline, tracks: TraceTracks, communication: CommArguments | None) -> None:
        self.timeline = timeline
        self.tracks = tracks
        self.communication = communication
        self.formats: dict[tuple[int | str, ...], str] = {}
        self.times = RowTimes(timeline)

    def text(self, span: int) -> str:
        timeline = self.timeline
        start, end = self.times.rows(span)
        start_us, start_ns = np.divmod(start, 1000)
        length_us, length_ns = np.divmod(end - start, 1000)
        columns = [start_us, start_ns, length_us, length_ns]
        if (microbatch := int(timeline.microbatch[span])) >= 0:
            columns.append(np.full(len(start), microbatch))
        values = np.stack(columns, axis=1).ravel().tolist()
        return self._format(span) % tuple(values)

    def _format(self, span: int) -> str:
        timeline = self.timeline
        code, rank, stage, chunk = (
            int(column[span]) for column in (timeline.template, timeline.rank, timeline.stage, timeline.chunk)
        )
        thread = self.tracks.span_thread.get(span, 0)  # 0 on the compute lane
        phase, has_microbatch = str(timeline.phase[span]), int(timeline.microbatch[span] >= 0)
        communicates = timeline.templates[code].category.max(initial=0) >= FIRST_COMMUNICATION
        label = timeline.labels[span] if self.communication is not None and communicates else ""
        key = (code, rank, stage, chunk, thread, ord(phase), has_microbatch, label)
        if key not in self.formats:
            self.formats[key] = self._new_format(span, thread)
        return self.formats[key]

    def _new_format(self, span: int, span_thread: int) -> str:
        timeline = self.timeline
        template, phase = timeline.templates[timeline.template[span]], str(timeline.phase[span])
        rank, stage, chunk = (int(column[span]) for column in (timeline.rank, timeline.stage, timeline.chunk))
        has_microbatch = bool(timeline.microbatch[span] >= 0)
        lines = []
        for op in range(len(template)):
            thread = span_thread or self.tracks.inline(rank, template.lanes[op])
            title = row_title(template, op, phase if has_microbatch else "")
            args: dict[str, Any] = {
                "stream": thread,
                "phase": row_phase(template, op, phase),
                "kind": template.kinds[op],
                "category": CATEGORIES[int(template.category[op])],
            }
            if stage >= 0:
                args |= {"stage": stage, "chunk": chunk}
            if has_microbatch:
                args["microbatch"] = _MICROBATCH
            if template.flops[op]:
                args["flops"] = float(template.flops[op])
            if template.nbytes[op]:
                args["bytes"] = float(template.nbytes[op])
            if self.communication is not None and template.category[op] >= FIRST_COMMUNICATION:
                args |= self.communication.arguments(
                    rank, timeline.labels[span], template.names[op], template.kinds[op]
                )
            event = {"ph": "X", "cat": "kernel", "name": title, "pid": rank, "tid": thread}
            head, tail = (_dump(part).replace("%", "%%") for part in (event, args))
            lines.append(f'{head[:-1]},"ts":%d.%03d,"dur":%d.%03d,"args":{tail}}}')
        # json escapes the placeholder; as a number it loses its quotes.
        return ",\n".join(lines).replace(_dump({"": _MICROBATCH})[4:-1], "%d")


def nanoseconds(seconds: Any) -> Any:
    """Return seconds as whole nanoseconds."""
    return np.rint(np.asarray(seconds) * _NS).astype(np.int64)


def row_phase(template: Template, op: int, span_phase: str) -> str:
    """Return the phase of an op (R inside a backward pass); an in-line collective has the phase of its span."""
    return template.phases[op] if template.phases[op] != "C" else span_phase


def row_title(template: Template, op: int, phase: str) -> str:
    """Write the phase of a pass before an op's name, as ``F attn.qkv``: recompute is told from the forward pass.

    ``phase``: that of the span; empty outside of passes.
    """
    words = [] if phase in ("", "C") else [row_phase(template, op, phase)]
    if template.category[op] >= FIRST_COMMUNICATION:
        operation = "".join(word.capitalize() for word in template.kinds[op].split("_"))
        words.insert(0, f"ncclKernel_{operation}")
    return " ".join([*words, template.names[op]])


def memory_changes(timeline: Timeline, rank: int) -> Iterator[tuple[int, float]]:
    """Yield the memory that a rank's step takes and frees whenever it changes: nanoseconds, and GiB from then on.

    Static memory is left out.
    """
    curve = memory_curve(timeline, rank)
    total = curve.held_bytes + curve.workspace_bytes
    if not np.any(total):
        return
    at = nanoseconds(curve.times)
    settled = np.append(at[1:] != at[:-1], True)
    at, total = at[settled], total[settled]
    changed = np.concatenate(([True], total[1:] != total[:-1]))
    yield from zip(at[changed].tolist(), _gib(total[changed]).tolist(), strict=True)


def _memory_counter(timeline: Timeline, rank: int) -> Iterator[str]:
    for moment, value in memory_changes(timeline, rank):
        yield (
            f'{{"ph":"C","name":"memory of the step (GiB)","pid":{rank},"tid":0,'
            f'"ts":{moment // 1000}.{moment % 1000:03d},"args":{{"GiB":{value}}}}}'
        )


def _gib(nbytes: Floats) -> Floats:
    return np.round(np.maximum(nbytes, 0.0) / GiB, 6)


def arrows(timeline: Timeline, ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each send with its receive, by span, where both ranks are drawn.

    Both ends of a transfer have the same micro-batch, start and end, and the same direction through the pipeline.
    """
    kinds = [template.kinds[0] if len(template) == 1 else "" for template in timeline.templates]
    ends: dict[tuple[int, float, float, bool], dict[str, list[int]]] = {}
    for span in np.flatnonzero(np.isin(timeline.rank, np.asarray(ranks, dtype=np.int64))).tolist():
        kind = kinds[timeline.template[span]]
        if kind in ("send", "recv"):
            backward = timeline.lane_names[timeline.lane[span]].startswith(("pp_send_bwd", "pp_recv_bwd"))
            moments = float(timeline.start_s[span]), float(timeline.end_s[span])
            key = (int(timeline.microbatch[span]), *moments, backward)
            ends.setdefault(key, {"send": [], "recv": []})[kind].append(span)
    pipeline_rank = pipeline_ranks(timeline)
    for key, both in ends.items():
        yield from _transfers(timeline, pipeline_rank, both["send"], both["recv"], backward=key[-1])


def _flows(timeline: Timeline, ranks: Sequence[int], tracks: TraceTracks) -> Iterator[str]:
    """Yield an arrow from each send to its receive."""
    for number, (send, recv) in enumerate(arrows(timeline, ranks), start=1):
        for ph, span, at in (
            ("s", send, nanoseconds(timeline.start_s[send])),
            ("f", recv, nanoseconds(timeline.start_s[recv])),
        ):
            moment = int(at)
            extra = ',"bp":"e"' if ph == "f" else ""
            yield (
                f'{{"ph":"{ph}","id":{number},"cat":"pp","name":"hand-over","pid":{int(timeline.rank[span])},'
                f'"tid":{tracks.span_thread[span]},"ts":{moment // 1000}.{moment % 1000:03d}{extra}}}'
            )


def _transfers(
    timeline: Timeline, pipeline_rank: Mapping[int, int], sends: list[int], recvs: list[int], *, backward: bool
) -> Iterator[tuple[int, int]]:
    """Yield the sends of an instant with their receives.

    Both ends are of the stage that sends. Spans of batches are of no stage. Theirs lead to the next pipeline rank,
    backward to the one before. Those of a model's second copy go the other way. What is alike in all that
    belongs to pipelines side by side, whose ranks are in the same order at both ends.
    """
    step, n_ranks = -1 if backward else 1, max(pipeline_rank.values()) + 1
    sends, recvs = list(sends), list(recvs)
    for way in (step, -step):
        for send in list(sends):
            stage, here = int(timeline.stage[send]), pipeline_rank[int(timeline.rank[send])]
            for recv in recvs:
                there = pipeline_rank[int(timeline.rank[recv])]
                if timeline.stage[recv] == stage if stage >= 0 else there == (here + way) % n_ranks:
                    sends.remove(send)
                    recvs.remove(recv)
                    yield send, recv
                    break
