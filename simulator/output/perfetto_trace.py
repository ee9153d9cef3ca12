"""Traces of Timelines in Perfetto's own format: protobuf packets of track events, written one by one.

Format: perfetto.dev/docs/reference/synthetic-track-event. A process per rank, a track per lane, slices not nested,
flows from sends to receives, and a counter of memory. Names are interned: each is written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.analysis.time.pipeline_ranks import pipeline_ranks
from simulator.errors import InputError, install_extra
from simulator.output.files import writing
from simulator.output.trace import (
    RowTimes,
    TraceTracks,
    arrows,
    drawn_ranks,
    memory_changes,
    row_phase,
    row_title,
)
from simulator.timeline import CATEGORIES, Timeline

#: All packets are of one sequence, whose names are interned together.
_SEQUENCE = 1
#: Tracks of a rank: its process, its counter, then its lanes.
_TRACKS_PER_RANK = 1000
#: Table of interned texts that are values.
_TEXTS = "debug_annotation_string_values"


def check_perfetto() -> None:
    """Raise `InputError` where such traces cannot be written."""
    try:
        import perfetto  # noqa: F401
    except ImportError:
        fix = f"{install_extra('perfetto')}; or a name that ends in .json.gz"
        raise InputError("needs perfetto, which is not installed", file="--trace", fix=fix) from None


def write_perfetto_trace(timeline: Timeline, path: str | Path, *, ranks: Sequence[int] | None = None) -> None:
    """Write the rows of ``ranks`` (simulated ones; default: one per pipeline stage) as packets; ``.gz`` compresses.

    Rows have what those of `simulator.output.trace.write_trace` have. Equal Timelines give equal bytes. Raises
    ValueError for a rank that is not simulated, `InputError` where the file cannot be written.
    """
    chosen = drawn_ranks(timeline, ranks)
    with writing(path) as file:
        for part in _PacketWriter(timeline, chosen).parts():
            file.write(part.SerializeToString(deterministic=True))  # traces that follow one another are one trace


@dataclass(frozen=True)
class _SpanPackets:
    """Packets of a span in ``trace``: by row a begin and an end, and the annotation of the micro-batch."""

    trace: Any
    begins: list[Any]
    ends: list[Any]
    microbatches: list[Any]


class _PacketWriter:
    """Writer of a trace in parts. Spans of a template differ in times, micro-batch and flows alone."""

    def __init__(self, timeline: Timeline, ranks: Sequence[int]) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2

        self._messages = perfetto_trace_pb2
        self._timeline, self._ranks = timeline, ranks
        self._tracks, self._times = TraceTracks(timeline, ranks), RowTimes(timeline)
        self._interned: dict[str, dict[str, int]] = {}
        self._packets: dict[tuple[int, ...], _SpanPackets] = {}
        self._defining: set[tuple[int, ...]] = set()
        self._sends: dict[int, int] = {}
        self._receives: dict[int, int] = {}
        for number, (send, receive) in enumerate(arrows(timeline, ranks), start=1):
            self._sends[send] = self._receives[receive] = number

    def parts(self) -> Iterator[Any]:
        """Yield the trace in parts, each of which is valid until the next one."""
        stages = pipeline_ranks(self._timeline)
        yield self._descriptors(stages)
        for rank in self._ranks:
            for span in self._timeline.spans_of(rank).tolist():
                yield self._rows(span)
            yield self._memory(rank)

    def _add(self, trace: Any) -> Any:
        return trace.packet.add(trusted_packet_sequence_id=_SEQUENCE)

    def _descriptors(self, stages: Mapping[int, int]) -> Any:
        """Return what names the processes of ranks, their lanes and their counters."""
        trace = self._messages.Trace()
        for rank in self._ranks:
            process, counter = self._add(trace), self._add(trace)
            process.track_descriptor.uuid = _track(rank, 0)
            process.track_descriptor.process.pid = rank + 1  # 0 is the idle process there
            alike = self._timeline.ranks_like[rank]
            many = f" · as {alike} ranks" if alike > 1 else ""
            process.track_descriptor.process.process_name = f"rank {rank} · stage {stages[rank]}{many}"
            counter.track_descriptor.uuid = _track(rank, 1)
            counter.track_descriptor.parent_uuid = _track(rank, 0)
            counter.track_descriptor.name = "memory of the step"
            counter.track_descriptor.counter.unit_name = "GiB"
            for thread, lane in enumerate(self._tracks.threads[rank], start=1):
                track = self._add(trace).track_descriptor
                track.uuid, track.parent_uuid = _track(rank, thread + 1), _track(rank, 0)
                track.name, track.sibling_order_rank = lane.replace("_", " "), thread
        if trace.packet:
            trace.packet[0].sequence_flags = self._messages.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        return trace

    def _rows(self, span: int) -> Any:
        """Return begin and end of each row of a span."""
        timeline = self._timeline
        thread = self._tracks.span_thread.get(span, 0)  # 0 on the compute lane
        columns = (timeline.template, timeline.rank, timeline.stage, timeline.chunk)
        microbatch = int(timeline.microbatch[span])
        number = self._sends.get(span, 0), self._receives.get(span, 0)
        ends_of = tuple(int(end > 0) for end in number)
        key = (*(int(column[span]) for column in columns), thread, ord(str(timeline.phase[span])))
        key = (*key, int(microbatch >= 0), *ends_of)
        packets = self._packets.get(key)
        if packets is None:
            packets = self._packets[key] = self._new_packets(span, thread)
            self._defining.add(key)
        elif key in self._defining:  # a name is written once
            self._defining.remove(key)
            for begin in packets.begins:
                begin.ClearField("interned_data")
        starts, ends = self._times.rows(span)
        for begin, start in zip(packets.begins, starts.tolist(), strict=True):
            begin.timestamp = start
        for done, end in zip(packets.ends, ends.tolist(), strict=True):
            done.timestamp = end
        for annotation in packets.microbatches:
            annotation.int_value = microbatch
        if number[0]:
            packets.begins[0].track_event.flow_ids[:] = [number[0]]
        if number[1]:
            packets.begins[0].track_event.terminating_flow_ids[:] = [number[1]]
        return packets.trace

    def _new_packets(self, span: int, span_thread: int) -> _SpanPackets:
        """Return the packets of a span without its times and its micro-batch."""
        timeline = self._timeline
        template, phase = timeline.templates[timeline.template[span]], str(timeline.phase[span])
        rank, stage, chunk = (int(column[span]) for column in (timeline.rank, timeline.stage, timeline.chunk))
        in_pass = bool(timeline.microbatch[span] >= 0)
        packets = _SpanPackets(self._messages.Trace(), [], [], [])
        for op in range(len(template)):
            begin, done = self._add(packets.trace), self._add(packets.trace)
            packets.begins.append(begin)
            packets.ends.append(done)
            begin.sequence_flags = self._messages.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
            event = begin.track_event
            event.type, done.track_event.type = event.TYPE_SLICE_BEGIN, event.TYPE_SLICE_END
            track = _track(rank, (span_thread or self._tracks.inline(rank, template.lanes[op])) + 1)
            event.track_uuid = done.track_event.track_uuid = track
            event.name_iid = self._number(begin, "event_names", row_title(template, op, phase if in_pass else ""))
            if in_pass:
                packets.microbatches.append(self._annotation(begin, "microbatch"))
            if stage >= 0:
                self._annotation(begin, "stage").int_value = stage
                self._annotation(begin, "chunk").int_value = chunk
            texts = {
                "phase": row_phase(template, op, phase),
                "kind": template.kinds[op],
                "category": CATEGORIES[int(template.category[op])],
            }
            for name, text in texts.items():
                value = self._number(begin, _TEXTS, text)
                self._annotation(begin, name).string_value_iid = value
            for name, figure in (("flops", template.flops[op]), ("bytes", template.nbytes[op])):
                if figure:
                    self._annotation(begin, name).double_value = float(figure)
        return packets

    def _annotation(self, begin: Any, name: str) -> Any:
        number = self._number(begin, "debug_annotation_names", name)
        return begin.track_event.debug_annotations.add(name_iid=number)

    def _number(self, begin: Any, table: str, text: str) -> int:
        """Return the number of a text in a ``table`` of interned texts; the packet defines it where it is the first."""
        numbers = self._interned.setdefault(table, {})
        if text not in numbers:
            numbers[text] = len(numbers) + 1
            value = {"str": text.encode()} if table == _TEXTS else {"name": text}
            getattr(begin.interned_data, table).add(iid=numbers[text], **value)
        return numbers[text]

    def _memory(self, rank: int) -> Any:
        trace = self._messages.Trace()
        for moment, value in memory_changes(self._timeline, rank):
            packet = self._add(trace)
            packet.timestamp = moment
            event = packet.track_event
            event.type, event.track_uuid, event.double_counter_value = event.TYPE_COUNTER, _track(rank, 1), value
        return trace


def _track(rank: int, number: int) -> int:
    """Return the id of a track: 0 of a rank is its process, 1 its counter, the others are its lanes."""
    return (rank + 1) * _TRACKS_PER_RANK + number
