"""A Timeline as a Chrome trace: what Perfetto, chrome://tracing and HolisticTraceAnalysis read.

Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. As Kineto writes
it: a process per rank, a thread per stream, category ``kernel``, the stream repeated in ``args``, and communication
named ``ncclKernel_...``, by which HolisticTraceAnalysis (facebookresearch, ``hta/utils/utils.py``) tells it from
computation. That tool wants a file per rank, which says its rank under ``distributedInfo``.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from simulator.analysis.time.activity import compute_lane_spans
from simulator.analysis.time.memory_curve import memory_curve
from simulator.analysis.time.pipeline_ranks import one_rank_per_stage, pipeline_ranks
from simulator.output.files import writing
from simulator.program import COMPUTE_LANE
from simulator.timeline import FIRST_COMMUNICATION, Floats, Ints, Template, Timeline
from simulator.units import GiB

TRACE_VERSION = 1
_NS = 1e9
_MICROBATCH = "\x00"  # stands for the micro-batch's number in a format


def write_trace(timeline: Timeline, path: str | Path, *, ranks: Sequence[int] | None = None, name: str = "") -> None:
    """Write the rows of ``ranks`` (simulated ones; default: one per pipeline stage) as trace events.

    Times are microseconds with three decimals. Every kernel and collective is a complete event (``X``) on the track of
    its lane, named with its phase and micro-batch; sends point to their receives by flow events (``s``, ``f``); the
    memory of the step (activations, workspace and what else it takes and gives back) is a counter (``C``). The same
    Timeline gives the same bytes. ``.gz`` compresses.
    Raises ValueError for a rank that is not simulated, `InputError` where the file cannot be written.
    """
    chosen = one_rank_per_stage(timeline) if ranks is None else list(ranks)
    unknown = [rank for rank in chosen if rank not in timeline.ranks_like]
    if unknown:
        raise ValueError(f"ranks {unknown} are not simulated")
    head = {
        "schemaVersion": TRACE_VERSION,
        "displayTimeUnit": "ms",
        "distributedInfo": {"rank": chosen[0] if chosen else 0, "world_size": timeline.n_ranks},
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
    with writing(path) as file:
        file.write((json.dumps(head, ensure_ascii=False, indent=1)[:-2] + ',\n "traceEvents": [\n').encode())
        lines = _events(timeline, chosen)
        file.write(next(lines, "").encode())
        for text in lines:
            file.write((",\n" + text).encode())
        file.write(b"\n]}\n")


def _events(timeline: Timeline, ranks: Sequence[int]) -> Iterator[str]:
    """Chunks of one or more events, comma-separated."""
    places = pipeline_ranks(timeline)
    tracks = _Tracks(timeline, ranks)
    for rank in ranks:
        yield from _names(rank, places[rank], timeline, tracks)
    writer = _SpanWriter(timeline, tracks)
    for rank in ranks:
        for span in np.flatnonzero(timeline.rank == rank).tolist():
            yield writer.text(span)
        yield from _memory_counter(timeline, rank)
    yield from _flows(timeline, ranks, tracks)


def _dump(event: dict[str, Any]) -> str:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":"))


class _Tracks:
    """Which thread of its rank a row is drawn on: one per lane, and more where operations of a lane overlap.

    ``threads[rank]``: names in order, thread ids from 1. ``of_span``: the thread of a span's own lane.
    """

    def __init__(self, timeline: Timeline, ranks: Sequence[int]) -> None:
        self.threads: dict[int, list[str]] = {}
        self.of_span: dict[int, int] = {}
        compute = compute_lane_spans(timeline)
        inside = [set(template.lanes) - {COMPUTE_LANE} for template in timeline.templates]
        for rank in ranks:
            spans = np.flatnonzero(timeline.rank == rank)
            inline: dict[str, list[int]] = defaultdict(list)
            for code in np.unique(timeline.template[spans[compute[spans]]]).tolist():
                for lane in sorted(inside[code]):
                    inline[lane] += spans[compute[spans] & (timeline.template[spans] == code)].tolist()
            own: dict[str, list[int]] = defaultdict(list)
            for span in spans[~compute[spans]].tolist():
                own[timeline.lane_names[timeline.lane[span]]].append(span)
            names = self.threads[rank] = [COMPUTE_LANE]
            for lane in sorted({*inline, *own}):
                self._place(timeline, names, lane, own[lane], inline[lane])

    def _place(self, timeline: Timeline, names: list[str], lane: str, own: list[int], inline: list[int]) -> None:
        """Give each of a lane's spans the first thread that is free by then, apart from rows inside compute spans."""
        free_at: list[float] = []
        base = len(names)
        if inline:
            names.append(lane)
            free_at.append(np.inf if _meet(timeline, own, inline) else 0.0)
        for span in sorted(own, key=lambda s: (timeline.start_s[s], timeline.end_s[s], s)):
            start = float(timeline.start_s[span])
            slot = next((i for i, free in enumerate(free_at) if free <= start), len(free_at))
            if slot == len(free_at):
                free_at.append(0.0)
                names.append(lane if slot == 0 else f"{lane} {slot + 1}")
            free_at[slot] = float(timeline.end_s[span])
            self.of_span[span] = base + slot + 1

    def inline(self, rank: int, lane: str) -> int:
        """The thread of a lane's rows inside compute spans."""
        return self.threads[rank].index(lane) + 1


def _meet(timeline: Timeline, own: list[int], inline: list[int]) -> bool:
    """Whether any span of one list overlaps any of the other."""
    starts, ends = np.sort(timeline.start_s[inline]), np.sort(timeline.end_s[inline])
    begun = np.searchsorted(starts, timeline.end_s[own], side="left")
    over = np.searchsorted(ends, timeline.start_s[own], side="right")
    return bool((begun > over).any())


def _names(rank: int, place: int, timeline: Timeline, tracks: _Tracks) -> Iterator[str]:
    def metadata(what: str, tid: int, **args: Any) -> str:
        return _dump({"ph": "M", "name": what, "pid": rank, "tid": tid, "ts": 0, "args": args})

    alike = timeline.ranks_like[rank]
    yield metadata("process_name", 0, name=f"rank {rank} · stage {place}")
    if alike > 1:
        yield metadata("process_labels", 0, labels=f"as {alike} ranks")
    yield metadata("process_sort_index", 0, sort_index=place)
    for index, lane in enumerate(tracks.threads[rank], start=1):
        yield metadata("thread_name", index, name=lane.replace("_", " "))
        yield metadata("thread_sort_index", index, sort_index=index)


class _SpanWriter:
    """Spans to text. A template's events differ between spans in times and micro-batch only, so they are formatted
    once, with places for these."""

    def __init__(self, timeline: Timeline, tracks: _Tracks) -> None:
        self.timeline = timeline
        self.tracks = tracks
        self.several_chunks = bool((timeline.chunk > 0).any())
        self.formats: dict[tuple[int, ...], str] = {}
        self.ends_ns: dict[int, tuple[Ints, Ints]] = {}

    def text(self, span: int) -> str:
        timeline = self.timeline
        start, end = self._times(span)
        start_us, start_ns = np.divmod(start, 1000)
        length_us, length_ns = np.divmod(end - start, 1000)
        values = np.stack((start_us, start_ns, length_us, length_ns), axis=1).ravel().tolist()
        return (self._format(span) % tuple(values)).replace(_MICROBATCH, str(int(timeline.microbatch[span])))

    def _times(self, span: int) -> tuple[Ints, Ints]:
        """Row starts and ends in nanoseconds. All are kept inside the rounded span, so that tracks do not overlap."""
        timeline = self.timeline
        first, last = _ns(timeline.start_s[span]), _ns(timeline.end_s[span])
        if span in timeline.stretched:
            start, end = (_ns(column) for column in timeline.stretched[span])
            end = np.clip(np.maximum(start, end), first, last)
            return np.minimum(np.clip(start, first, last), end), end
        code = int(timeline.template[span])
        if code not in self.ends_ns:
            template = timeline.templates[code]
            self.ends_ns[code] = _ns(template.start_s), _ns(template.end_s)
        start, end = (np.minimum(first + column, last) for column in self.ends_ns[code])
        if len(end) == 1:
            end[0] = last  # a communication's length is its span's
        return start, end

    def _format(self, span: int) -> str:
        timeline = self.timeline
        code, rank, stage, chunk = (
            int(column[span]) for column in (timeline.template, timeline.rank, timeline.stage, timeline.chunk)
        )
        own_thread = self.tracks.of_span.get(span, 0)
        phase, has_microbatch = str(timeline.phase[span]), int(timeline.microbatch[span] >= 0)
        key = (code, rank, stage, chunk, own_thread, ord(phase), has_microbatch)
        if key not in self.formats:
            template = timeline.templates[code]
            lines = []
            for op in range(len(template)):
                thread = own_thread or self.tracks.inline(rank, template.lanes[op])
                title = _title(template, op, phase, bool(has_microbatch), chunk if self.several_chunks else None)
                args: dict[str, Any] = {
                    "stream": thread,
                    "phase": _phase(template, op, phase),
                    "kind": template.kinds[op],
                }
                if stage >= 0:
                    args |= {"stage": stage, "chunk": chunk}
                if has_microbatch:
                    args["microbatch"] = _MICROBATCH
                if template.flops[op]:
                    args["flops"] = float(template.flops[op])
                if template.nbytes[op]:
                    args["bytes"] = float(template.nbytes[op])
                event = {"ph": "X", "cat": "kernel", "name": title, "pid": rank, "tid": thread}
                head, tail = (_dump(part).replace("%", "%%") for part in (event, args))
                lines.append(f'{head[:-1]},"ts":%d.%03d,"dur":%d.%03d,"args":{tail}}}')
            # json escapes the placeholder; as a number it loses its quotes.
            text = ",\n".join(lines)
            escaped = _dump({"": _MICROBATCH})[4:-1]
            self.formats[key] = text.replace(escaped, _MICROBATCH).replace(escaped[1:-1], _MICROBATCH)
        return self.formats[key]


def _ns(seconds: Any) -> Any:
    return np.rint(np.asarray(seconds) * _NS).astype(np.int64)


def _phase(template: Template, op: int, of_span: str) -> str:
    """An op's own phase (R inside a backward), or that of the step which an in-line collective belongs to."""
    return template.phases[op] if template.phases[op] != "C" else of_span


def _title(template: Template, op: int, phase: str, has_microbatch: bool, chunk: int | None) -> str:
    """``F3 attn.qkv``: phase and micro-batch before the op's name; ``F3.1`` names the chunk where there are several."""
    name, kind = template.names[op], template.kinds[op]
    row_phase = _phase(template, op, phase)
    unit = "" if chunk is None else f".{chunk}"
    if template.category[op] >= FIRST_COMMUNICATION:
        operation = "".join(word.capitalize() for word in kind.split("_"))
        which = f" {'' if phase == 'C' else row_phase}{_MICROBATCH}{unit}" if has_microbatch else ""
        return f"ncclKernel_{operation}{which} {name}"
    return f"{row_phase}{_MICROBATCH}{unit} {name}" if has_microbatch else name


def _memory_counter(timeline: Timeline, rank: int) -> Iterator[str]:
    """What a rank's step takes and gives back, in GiB, whenever it changes; without what is always there."""
    curve = memory_curve(timeline, rank)
    total = curve.held + curve.workspace
    if not np.any(total):
        return
    at = _ns(curve.times)
    settled = np.append(at[1:] != at[:-1], True)
    at, total = at[settled], total[settled]
    changed = np.concatenate(([True], total[1:] != total[:-1]))
    for moment, value in zip(at[changed].tolist(), _gib(total[changed]).tolist(), strict=True):
        yield (
            f'{{"ph":"C","name":"memory of the step (GiB)","pid":{rank},"tid":0,'
            f'"ts":{moment // 1000}.{moment % 1000:03d},"args":{{"GiB":{value}}}}}'
        )


def _gib(nbytes: Floats) -> Floats:
    return np.round(np.maximum(nbytes, 0.0) / GiB, 6)


def _flows(timeline: Timeline, ranks: Sequence[int], tracks: _Tracks) -> Iterator[str]:
    """An arrow from each send to its receive where both ranks are drawn.

    Both ends of a transfer carry one micro-batch and begin at one time. Transfers that share both belong to pipelines
    side by side, whose ranks are in one order at either end.
    """
    kinds = [template.kinds[0] if len(template) == 1 else "" for template in timeline.templates]
    ends: dict[tuple[int, float], dict[str, list[int]]] = {}
    for span in np.flatnonzero(np.isin(timeline.rank, np.asarray(ranks, dtype=np.int64))).tolist():
        kind = kinds[timeline.template[span]]
        if kind in ("send", "recv"):
            key = (int(timeline.microbatch[span]), float(timeline.start_s[span]))
            ends.setdefault(key, {"send": [], "recv": []})[kind].append(span)
    number = 0
    for both in ends.values():
        if len(both["send"]) != len(both["recv"]):
            continue
        for send, recv in zip(both["send"], both["recv"], strict=True):
            number += 1
            for ph, span, at in (("s", send, _ns(timeline.start_s[send])), ("f", recv, _ns(timeline.start_s[recv]))):
                moment = int(at)
                extra = ',"bp":"e"' if ph == "f" else ""
                yield (
                    f'{{"ph":"{ph}","id":{number},"cat":"pp","name":"hand-over","pid":{int(timeline.rank[span])},'
                    f'"tid":{tracks.of_span[span]},"ts":{moment // 1000}.{moment % 1000:03d}{extra}}}'
                )


def validate_trace(path: str | Path) -> list[str]:
    """What is wrong with a trace file: the checks of the format that readers rely on. Empty where nothing is.

    Fields and their types; named processes and threads; no overlapping slices on a track; each flow has one start and
    one end, not before it, and each of them lies on a slice of its track.
    """
    source = Path(path)
    content = gzip.decompress(source.read_bytes()) if source.suffix == ".gz" else source.read_bytes()
    document = json.loads(content)
    problems: list[str] = []
    slices: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    flows: dict[int, dict[str, tuple[tuple[int, int], int]]] = defaultdict(dict)
    named: set[tuple[str, int, int]] = set()
    for index, event in enumerate(document["traceEvents"]):
        where = f"event {index}"
        wanted: dict[str, Any] = {"ph": str, "name": str, "pid": int, "tid": int, "ts": (int, float)}
        if event.get("ph") == "X":
            wanted |= {"dur": (int, float), "cat": str, "args": dict}
        wrong = [key for key, kind in wanted.items() if not isinstance(event.get(key), kind)]
        if wrong:
            problems.append(f"{where}: {', '.join(wrong)} missing or of the wrong type")
            continue
        track, start = (event["pid"], event["tid"]), round(event["ts"] * 1000)
        match event["ph"]:
            case "X":
                if event["dur"] < 0 or event["ts"] < 0:
                    problems.append(f"{where}: negative time")
                if event["args"].get("stream") != event["tid"]:
                    problems.append(f"{where}: args.stream is not the thread")
                slices[track].append((start, start + round(event["dur"] * 1000), event["name"]))
            case "s" | "f":
                if event["ph"] in flows[event["id"]]:
                    problems.append(f"{where}: flow {event['id']} has two {event['ph']!r}")
                flows[event["id"]][event["ph"]] = (track, start)
            case "M":
                named.add((event["name"], *track))
            case "C":
                pass
            case other:
                problems.append(f"{where}: phase {other!r} is none of X, s, f, M, C")
    for (pid, tid), found in slices.items():
        if ("thread_name", pid, tid) not in named or ("process_name", pid, 0) not in named:
            problems.append(f"track {pid}/{tid} has no name")
        found.sort()
        for before, after in pairwise(found):
            if after[0] < before[1]:
                problems.append(f"track {pid}/{tid}: {after[2]!r} starts before {before[2]!r} has ended")
    for number, both in flows.items():
        if set(both) != {"s", "f"}:
            problems.append(f"flow {number} lacks an end")
            continue
        if both["f"][1] < both["s"][1]:
            problems.append(f"flow {number} ends before it starts")
        for track, at in both.values():
            # Slices are sorted and do not overlap: the last that starts by then is the one.
            last = bisect_right(slices[track], at, key=lambda found: found[0]) - 1
            if last < 0 or at > slices[track][last][1]:
                problems.append(f"flow {number} touches no slice of track {track[0]}/{track[1]}")
    return problems
