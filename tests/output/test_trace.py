"""The trace file: its format, its bytes, and what a reader that we did not write makes of it."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.errors import InputError
from simulator.output.files import writing
from simulator.output.trace import write_trace
from simulator.timeline import COMMUNICATION, Timeline, covered_s
from tests.support.jobs import job
from tests.support.timelines import Span, pipeline, template, timeline
from tests.support.traces import trace_problems


def play(schedule: str = "1f1b", p: int = 3, m: int = 4, v: int = 1) -> Timeline:
    """A pipeline whose blocks hold kernels and in-line collectives, with lengths that no nanosecond divides."""
    forward = template(("norm", "norm", "compute", 1e-6 / 3), ("attn.qkv", "matmul", "compute", 2e-3 / 7),
                       ("attn", "all_reduce", "tp", 1e-4 / 3, 5e7))  # fmt: skip
    backward = template(("again", "matmul", "recompute", 1e-3 / 7), ("attn.qkv.grad", "matmul", "compute", 1e-3 / 3),
                        phase="B")  # fmt: skip
    return pipeline(schedule, p, m, v, comm=1e-4 / 9, forward=forward, backward=backward)


def events(path: Path, ph: str) -> list[dict[str, Any]]:
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return [event for event in document["traceEvents"] if event["ph"] == ph]


@pytest.mark.parametrize(("schedule", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_the_file_keeps_to_the_format_and_holds_every_row(tmp_path: Path, schedule: str, v: int, suffix: str) -> None:
    tl = play(schedule, 3, 6, v)
    path = tmp_path / f"trace.{suffix}"
    write_trace(tl, path)
    assert trace_problems(path) == []
    slices = events(path, "X")
    assert len(slices) == tl.n_rows
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(tl.step_time_s * 1e6, abs=2e-3)
    # Each micro-batch crosses p v - 1 edges forward and as many backward: an arrow with two ends for each.
    assert len(events(path, "s")) == len(events(path, "f")) == 2 * 6 * (3 * v - 1)


def test_events_say_what_runs_for_whom(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(play(), path, name="tiny")
    names = {e["name"] for e in events(path, "X")}
    assert names == {
        *("F norm", "F attn.qkv", "B again", "B attn.qkv.grad"),
        *("ncclKernel_AllReduce F attn", "ncclKernel_Send send", "ncclKernel_Recv recv"),
    }
    qkv = next(
        e for e in events(path, "X")
        if (e["name"], e["pid"], e["args"]["microbatch"]) == ("F attn.qkv", 1, 3)
    )  # fmt: skip
    assert qkv["args"] == {
        "stream": 1,
        "phase": "F",
        "kind": "matmul",
        "category": "compute",
        "stage": 1,
        "chunk": 0,
        "microbatch": 3,
    }
    threads = {e["args"]["name"] for e in events(path, "M") if e["name"] == "thread_name"}
    assert threads == {"compute", "tp", "pp send fwd", "pp recv fwd", "pp send bwd", "pp recv bwd"}
    assert {e["args"]["name"] for e in events(path, "M") if e["name"] == "process_name"} == {
        f"rank {rank} · stage {rank}" for rank in range(3)
    }
    other = json.loads(path.read_bytes())["otherData"]
    assert (other["name"], other["time_unit"], other["version"]) == ("tiny", "us", 1)
    assert {event["name"] for event in events(path, "C")} == {"memory of the step (GiB)"}


def test_a_table_by_name_sums_over_micro_batches_and_chunks(tmp_path: Path) -> None:
    """Two ranks run two chunks of two micro-batches: a kernel of the forward pass has one name and eight rows."""
    path = tmp_path / "trace.json"
    write_trace(play("interleaved", 2, 2, 2), path)
    rows = [e["args"] for e in events(path, "X") if e["name"] == "F attn.qkv"]
    assert len(rows) == 2 * 2 * 2
    assert {(row["microbatch"], row["chunk"]) for row in rows} == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.slow
def test_the_flagship_has_an_arrow_for_every_hand_over(tmp_path: Path) -> None:
    """16 of its 96 micro-batches cross the 11 edges of 12 stages forward and back; the checker refuses arrows to
    oneself."""
    path = tmp_path / "trace.json"
    simulator.run("gpt175b_3d", set={"training.global_batch": 256}).save_trace(path)
    assert trace_problems(path) == []
    assert len(events(path, "s")) == len(events(path, "f")) == 2 * 16 * 11


def test_the_same_timeline_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        write_trace(play(), tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_operations_that_overlap_on_a_lane_get_tracks_of_their_own(tmp_path: Path) -> None:
    # Two reductions at once, and one that meets an in-line collective of the same lane.
    reduce = template(("grads", "all_reduce", "dp", 4.0), phase="C")
    block = template(("mm", "matmul", "compute", 5.0), ("norm", "all_reduce", "dp", 2.0), phase="O")
    spans = [Span(0, "dp", reduce, start, phase="C") for start in (0.0, 3.0, 4.0)]
    path = tmp_path / "trace.json"
    write_trace(timeline([*spans, Span(0, "compute", block, 0.0, phase="O")]), path)
    assert trace_problems(path) == []
    tracks = {e["tid"]: e["args"]["name"] for e in events(path, "M") if e["name"] == "thread_name"}
    assert list(tracks.values()) == ["compute", "dp", "dp 2", "dp 3"]


def test_stretched_rows_are_drawn_where_they_ran(tmp_path: Path) -> None:
    block = template(("a", "norm", "compute", 1e-6), ("b", "norm", "compute", 1e-6))
    path = tmp_path / "trace.json"
    rows = ((1e-6, 4e-6), (2e-6, 5e-6))
    write_trace(timeline([Span(0, "compute", block, 0.0, end=5e-6, rows=rows, microbatch=7)]), path)
    assert [(e["name"], e["ts"], e["dur"]) for e in events(path, "X")] == [("F a", 1.0, 1.0), ("F b", 4.0, 1.0)]


def test_one_rank_per_stage_unless_told(tmp_path: Path) -> None:
    # Ranks 0 and 1 are stage 0, rank 2 is stage 1; receives whose sender is not drawn have no arrow.
    op, send, recv = (
        template(("a", "matmul", "compute", 1.0)),
        template(("send_fwd", "send", "pp", 1.0)),
        template(("send_fwd", "recv", "pp", 1.0)),
    )
    tl = timeline(
        [*(Span(rank, "compute", op, 0.0, stage=rank // 2, microbatch=0) for rank in range(3)),
         Span(0, "pp_send_fwd", send, 1.0, phase="C", stage=0, microbatch=0),
         Span(2, "pp_recv_fwd", recv, 1.0, phase="C", stage=0, microbatch=0)]
    )  # fmt: skip
    path = tmp_path / "trace.json"
    write_trace(tl, path)
    assert {e["pid"] for e in events(path, "X")} == {0, 2}
    assert len(events(path, "s")) == 1
    write_trace(tl, path, ranks=[1, 2])
    assert {e["pid"] for e in events(path, "X")} == {1, 2}
    assert events(path, "s") == []
    with pytest.raises(ValueError, match=r"\[9\] are not simulated"):
        write_trace(tl, path, ranks=[9])


def test_nothing_is_left_half_written(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    with pytest.raises(TypeError), writing(target) as file:
        file.writelines([b"half", None])  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match=r"cannot be written"):
        write_trace(play(), tmp_path / "missing" / "out.json")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ts": "soon"}, "ts missing or of the wrong type"),
        ({"dur": -1.0}, "negative time"),
        ({"dur": 1e9}, "starts before"),
        ({"ph": "Z"}, "is none of"),
        ({"tid": 77}, "has no name"),
    ],
)
def test_the_validator_finds_what_is_wrong(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "trace.json"
    write_trace(play(), path)
    document = json.loads(path.read_bytes())
    first = next(e for e in document["traceEvents"] if e["ph"] == "X")
    first |= change
    path.write_text(json.dumps(document))
    assert any(complaint in problem for problem in trace_problems(path))


#: Schedule, chunks, stages, and whether transfers go on beside computation; the other way round is slow.
CROSSED = [("1f1b", 1, 4, True), ("interleaved", 2, 4, False), ("zb_v", 2, 3, True), ("dualpipe", 1, 4, False)]
CROSSED += [("1f1b", 1, 2, False)]


@pytest.mark.parametrize(
    ("schedule", "vpp", "pp", "overlap"),
    CROSSED + [pytest.param(*sizes, not overlap, marks=pytest.mark.slow) for *sizes, overlap in CROSSED],
)
def test_arrows_lead_from_the_sender_to_the_receiver(
    tmp_path: Path, schedule: str, vpp: int, pp: int, *, overlap: bool
) -> None:
    """Every micro-batch crosses each of the v p - 1 edges both ways, in each of two pipelines side by side. That holds
    for batched transfers and for those beside computation. The arrows from one stage to the next are as many."""
    result = simulator.run(
        job(
            model__layers=24,
            parallelism__pp=pp,
            parallelism__dp=2,
            parallelism__schedule=schedule,
            parallelism__vpp=vpp,
            parallelism__overlap={"p2p": overlap},
        ),
        set={"simulation.fold": False},
    )
    path = tmp_path / "trace.json"
    write_trace(result.spans, path, ranks=list(result.spans.ranks))
    assert trace_problems(path) == []
    if result.steady is None:
        v_turns = vpp - 1 if schedule == "zb_v" else 0  # the V turns around on a rank
        assert len(events(path, "s")) == 2 * 8 * 2 * (vpp * pp - 1 - v_turns)


def test_the_validator_finds_arrows_that_go_astray(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(play("1f1b", 4, 4), path)
    document = json.loads(path.read_bytes())
    first, second, *_ = (e for e in document["traceEvents"] if e["ph"] == "f")
    sender = next(e for e in document["traceEvents"] if e["ph"] == "s" and e["id"] == first["id"])
    first |= {key: sender[key] for key in ("pid", "tid", "ts")}
    second["pid"] = (second["pid"] + 2) % 4
    path.write_text(json.dumps(document))
    problems = trace_problems(path)
    for complaint in ("from a rank to itself", "does not lead from a send", "shares an end", "no neighbours"):
        assert any(complaint in problem for problem in problems), complaint


def test_the_validator_finds_loose_flows(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(play(), path)
    document = json.loads(path.read_bytes())
    flows = [e for e in document["traceEvents"] if e["ph"] == "s"]
    document["traceEvents"].remove(flows[0])
    flows[1]["ts"] = 1e9
    path.write_text(json.dumps(document))
    problems = trace_problems(path)
    assert any("lacks an end" in problem for problem in problems)
    assert any("ends before it starts" in problem for problem in problems)


@pytest.mark.skipif(not importlib.util.find_spec("perfetto"), reason="perfetto is not installed")
def test_packets_hold_what_the_json_holds(tmp_path: Path) -> None:
    """Rows by process, track and name, with times and arguments; as many arrows with the same ends; the counter."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    result = simulator.run(job(parallelism={"pp": 2, "tp": 2, "vpp": 2, "schedule": "interleaved"}))
    for name in ("trace.json", "trace.pftrace", "again.pftrace", "trace.pftrace.gz"):
        result.save_trace(tmp_path / name)
    content = (tmp_path / "trace.pftrace").read_bytes()
    assert content == (tmp_path / "again.pftrace").read_bytes()
    assert content == gzip.decompress((tmp_path / "trace.pftrace.gz").read_bytes())
    tracks: dict[int, tuple[int, str]] = {}
    texts: dict[str, dict[int, Any]] = {"names": {}, "keys": {}, "values": {}}
    rows, began = [], {}
    ends: dict[str, dict[int, int]] = {"s": {}, "f": {}}
    counted = []
    for packet in Trace.FromString(content).packet:
        if packet.HasField("track_descriptor"):
            told = packet.track_descriptor
            process = told.process.pid - 1 if told.HasField("process") else tracks[told.parent_uuid][0]
            tracks[told.uuid] = (process, told.name)
            continue
        interned = packet.interned_data
        texts["names"] |= {one.iid: one.name for one in interned.event_names}
        texts["keys"] |= {one.iid: one.name for one in interned.debug_annotation_names}
        texts["values"] |= {one.iid: one.str.decode() for one in interned.debug_annotation_string_values}
        event = packet.track_event
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            began[event.track_uuid] = (packet.timestamp, event)
            ends["s"] |= dict.fromkeys(event.flow_ids, packet.timestamp)
            ends["f"] |= dict.fromkeys(event.terminating_flow_ids, packet.timestamp)
        elif event.type == TrackEvent.TYPE_SLICE_END:
            start, begin = began.pop(event.track_uuid)
            arguments = {}
            for one in begin.debug_annotations:
                value = getattr(one, one.WhichOneof("value"))
                interned_text = one.WhichOneof("value") == "string_value_iid"
                arguments[texts["keys"][one.name_iid]] = texts["values"][value] if interned_text else value
            rows.append((*tracks[event.track_uuid], texts["names"][begin.name_iid], start, packet.timestamp, arguments))
        else:
            counted.append((tracks[event.track_uuid][0], packet.timestamp, event.double_counter_value))
    path = tmp_path / "trace.json"
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(path, "M") if e["name"] == "thread_name"}

    def ns(us: float) -> int:
        return round(us * 1000)

    assert sorted(rows, key=repr) == sorted(
        (
            (
                e["pid"], lanes[e["pid"], e["tid"]], e["name"], ns(e["ts"]), ns(e["ts"]) + ns(e["dur"]),
                {key: value for key, value in e["args"].items() if key != "stream"},
            )
            for e in events(path, "X")
        ),
        key=repr,
    )  # fmt: skip
    assert ends == {end: {e["id"]: ns(e["ts"]) for e in events(path, end)} for end in "sf"}
    assert ends["s"]
    assert counted == [(e["pid"], ns(e["ts"]), e["args"]["GiB"]) for e in events(path, "C")]


@pytest.mark.filterwarnings("ignore")  # of that package
@pytest.mark.skipif(not importlib.util.find_spec("hta"), reason="HolisticTraceAnalysis is not installed")
def test_holistic_trace_analysis_reads_a_folder_to_our_overlap_and_idle_times(tmp_path: Path) -> None:
    """HTA counts whole microseconds, rounded down, so that each row may lose one.

    Idle is what no kernel covers between a rank's first and last; overlap is the share of communication beside
    computation.
    """
    from hta.trace_analysis import TraceAnalysis

    model = {"layers": 8, "hidden": 2048, "heads": 16, "vocab": 1024}
    result = simulator.run(job(model=model, training__seq=1024, parallelism={"pp": 2, "tp": 2, "dp": 2}))
    files = result.save_traces(tmp_path)
    assert [file.name for file in files] == ["rank0.pt.trace.json.gz", "rank4.pt.trace.json.gz"]
    analysis = TraceAnalysis(trace_dir=str(tmp_path))
    assert sorted(analysis.t.traces) == [0, 4]
    idle = analysis.get_temporal_breakdown(visualize=False).set_index("rank")["idle_time(us)"]
    overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    for rank in (0, 4):
        rows = result.timeline[
            (result.timeline["rank"] == rank) & (result.timeline["end_s"] > result.timeline["start_s"])
        ]
        start, end = rows["start_s"].to_numpy(), rows["end_s"].to_numpy()
        sends = rows["category"].isin(COMMUNICATION).to_numpy()
        all_s, comm_s, comp_s = (covered_s(start[of], end[of]) for of in (sends | ~sends, sends, ~sends))
        assert idle[rank] * 1e-6 == pytest.approx(end.max() - start.min() - all_s, abs=1e-6 * len(rows))
        assert overlap[rank] / 100 == pytest.approx((comm_s + comp_s - all_s) / comm_s, abs=0.01)


@pytest.mark.filterwarnings("ignore")  # of that package
@pytest.mark.skipif(not importlib.util.find_spec("hta"), reason="HolisticTraceAnalysis is not installed")
def test_holistic_trace_analysis_reads_the_same_step(tmp_path: Path) -> None:
    from hta.trace_analysis import TraceAnalysis

    tl = play("1f1b", 2, 4)
    for rank in (0, 1):
        write_trace(tl, tmp_path / f"rank{rank}.json.gz", ranks=[rank])
    analysis = TraceAnalysis(trace_dir=str(tmp_path))
    assert sorted(analysis.t.traces) == [0, 1]
    # It counts whole microseconds from each rank's first event; rank 0 begins the step and ends it.
    frame = analysis.t.traces[0]
    assert (frame.ts + frame.dur).max() - frame.ts.min() == pytest.approx(tl.step_time_s * 1e6, abs=2)
    breakdown = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    assert (breakdown["compute_time(us)"] > 0).all()
    assert (breakdown["non_compute_time(us)"] > 0).all()  # the all-reduces, known by their names
