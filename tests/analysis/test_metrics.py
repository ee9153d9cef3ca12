"""Bubble, breakdown, communication and activations of hand-made Timelines, against figures worked out by hand."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from simulator.analysis.time.activity import activity, weigh
from simulator.analysis.time.breakdown import communication, time_breakdown
from simulator.analysis.time.links import busiest_links
from simulator.analysis.training.bubble import bubble
from simulator.analysis.training.in_flight import peak_activations
from simulator.timeline import LinkUse, Timeline
from tests.support.timelines import Span, pipeline, template, timeline


def leaves(tree: dict) -> float:
    return sum(leaves(value) if isinstance(value, dict) else value for value in tree.values())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("m", [1, 4, 17])
def test_bubble_of_ideal_pipelines_is_p_minus_1_over_m(schedule: str, p: int, m: int) -> None:
    # Each rank works m (F + B) and waits (p - 1) (F + B): the ratio is (p - 1) / m, the fraction (p - 1) / (m + p - 1),
    # whatever F and B are, and whatever comes after the last backward.
    tail = template(("adam", "optimizer", "optimizer", 3.0), phase="O")
    result = bubble(activity(pipeline(schedule, p, m, f=0.7, b=1.9, tail=tail)), [tuple(range(p))])
    assert result.ratio == pytest.approx((p - 1) / m, rel=1e-9, abs=1e-12)
    assert result.fraction == pytest.approx((p - 1) / (m + p - 1), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("p", "v", "rounds"), [(2, 2, 2), (4, 2, 2), (4, 3, 1), (8, 4, 2)])
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, v: int, rounds: int) -> None:
    # With v chunks a rank waits (p - 1) times the F + B of one chunk, of which it does m v.
    m = p * rounds
    result = bubble(activity(pipeline("interleaved", p, m, v, f=1.0, b=2.0)), [tuple(range(p))])
    assert result.ratio == pytest.approx((p - 1) / (v * m), rel=1e-9)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
@pytest.mark.parametrize("m", [1, 3, 12])
def test_peak_activations_are_what_the_schedules_promise(p: int, m: int) -> None:
    # GPipe holds every micro-batch; 1F1B has p - stage forwards ahead of the first backward.
    assert peak_activations(pipeline("gpipe", p, m)) == dict.fromkeys(range(p), m)
    assert peak_activations(pipeline("1f1b", p, m)) == {stage: min(m, p - stage) for stage in range(p)}


def test_ops_of_no_length_are_held_too() -> None:
    assert peak_activations(pipeline("gpipe", 2, 3, f=0.0, b=0.0)) == {0: 3, 1: 3}


def overlapped() -> Timeline:
    """One rank of 10 s: computes 0-4 and 6-7 (1 s of it recompute), an in-line all-reduce 4-5, a send 3-6, a gradient
    reduction 5-9, optimizer 9-10."""
    block = template(("mm", "matmul", "compute", 4.0), ("ar", "all_reduce", "tp", 1.0, 8.0))
    backward = template(("re", "matmul", "recompute", 1.0), phase="B")
    return timeline(
        [
            Span(0, "compute", block, 0.0),
            Span(0, "compute", backward, 6.0, phase="B"),
            Span(0, "compute", template(("adam", "optimizer", "optimizer", 1.0), phase="O"), 9.0, phase="O"),
            Span(0, "pp", template(("send", "send", "pp", 3.0, 5.0), phase="C"), 3.0, phase="C"),
            Span(0, "dp", template(("grads", "all_reduce", "dp", 4.0, 7.0), phase="C"), 5.0, phase="C"),
        ],
        ranks_like={0: 4},
        algorithms={"dp": "ring"},
    )


def test_breakdown_gives_every_moment_to_the_first_use_in_priority() -> None:
    # 0-4 compute, 4-5 tp (before the send beside it), 5-6 pp (before dp), 6-7 recompute, 7-9 dp, 9-10 optimizer.
    cut = activity(overlapped())
    parts = time_breakdown(cut, [(0,)])
    assert parts["compute"] == 4.0
    assert parts["recompute"] == 1.0
    assert parts["optimizer"] == 1.0
    assert parts["exposed"] == {"tp": 1.0, "cp": 0.0, "ep": 0.0, "pp": 1.0, "dp": 2.0, "offload": 0.0}
    assert parts["host"] == parts["bubble"] == parts["other"] == 0.0
    figures = communication(cut)
    assert figures["pp"] == {"bytes_per_gpu": 5.0, "time_s": 3.0, "exposed_s": 1.0, "algorithm": "none", "links": []}
    assert figures["dp"] == {"bytes_per_gpu": 7.0, "time_s": 4.0, "exposed_s": 2.0, "algorithm": "ring", "links": []}
    assert figures["tp"]["time_s"] == 1.0
    assert figures["tp"]["bytes_per_gpu"] == 8.0


def test_the_cut_does_not_depend_on_how_a_step_is_split_into_spans() -> None:
    # The same rows as spans of one op each, the all-reduce on its own lane: nothing may change.
    whole = overlapped()
    rows = whole.rows()
    names = np.array(whole.lane_names)[rows["lane"]]
    spans = []
    for i in range(len(names)):
        category = ("compute", "recompute", "optimizer", "tp", "cp", "ep", "pp", "dp")[rows["category"][i]]
        op = (rows["name"][i], rows["kind"][i], category, rows["end_s"][i] - rows["start_s"][i], rows["nbytes"][i])
        phase = str(whole.phase[rows["span"][i]])
        spans.append(Span(0, str(names[i]), template(op), float(rows["start_s"][i]), phase=phase))
    pieces = timeline(spans, ranks_like={0: 4}, algorithms={"dp": "ring"})
    assert time_breakdown(activity(pieces), [(0,)]) == time_breakdown(activity(whole), [(0,)])
    assert bubble(activity(pieces), [(0,)]) == bubble(activity(whole), [(0,)])
    assert communication(activity(pieces)) == communication(activity(whole))


def test_waiting_inside_a_stretched_span_is_the_hosts() -> None:
    # Two kernels of 1 s each; the first starts 1 s after the span (launch), the second 2 s after the first ended, and
    # a send covers one of those 2 s: communication in flight comes before the host.
    block = template(("a", "norm", "compute", 1.0), ("b", "norm", "compute", 1.0))
    play = timeline(
        [
            Span(0, "compute", block, 0.0, end=5.0, rows=((1.0, 4.0), (2.0, 5.0))),
            Span(0, "pp", template(("send", "send", "pp", 1.0)), 2.5, phase="C"),
        ]
    )
    parts = time_breakdown(activity(play), [(0,)])
    assert parts["compute"] == 2.0
    assert parts["exposed"]["pp"] == 1.0
    assert parts["host"] == 2.0


def test_leaves_sum_to_the_step_and_waiting_for_other_replicas_is_not_bubble() -> None:
    # Two replicas of two stages; the second takes twice as long. Until its own last op a replica's idle time is bubble,
    # afterwards it waits for the job: 4 ranks, of which two wait half of the step.
    fast, slow = pipeline("1f1b", 2, 4, f=1, b=2), pipeline("1f1b", 2, 4, f=2, b=4)
    spans = [
        Span(int(play.rank[i]) + 2 * replica, "compute", play.templates[play.template[i]], float(play.start_s[i]),
             phase=str(play.phase[i]), stage=int(play.stage[i]), microbatch=int(play.microbatch[i]))
        for replica, play in enumerate((fast, slow))
        for i in range(len(play.rank))
    ]  # fmt: skip
    both = timeline(spans)
    step = both.step_time_s
    parts = time_breakdown(activity(both), [(0, 1), (2, 3)])
    assert leaves(parts) == pytest.approx(step, rel=1e-9)
    assert parts["other"] == pytest.approx(step / 4)
    # One of five F + B of each replica's window is idle; in the mean over both, (1/5 + 1/10) / 2 of the step.
    assert parts["bubble"] == pytest.approx(step * 0.15)
    assert bubble(activity(both), [(0, 1), (2, 3)]).ratio == pytest.approx(1 / 4)


def test_folded_ranks_weigh_as_many_as_they_stand_for() -> None:
    play = pipeline("1f1b", 2, 2)
    folded = timeline(
        [Span(0, "compute", template(("a", "matmul", "compute", 1.0)), 0.0),
         Span(1, "compute", template(("a", "matmul", "compute", 3.0)), 0.0)],
        ranks_like={0: 3, 1: 1},
    )  # fmt: skip
    assert time_breakdown(activity(folded), [(0,), (1,)])["compute"] == pytest.approx((3 * 1 + 1 * 3) / 4)
    # Listing a pipeline once or once per replica is the same.
    assert bubble(activity(play), [(0, 1)] * 5) == bubble(activity(play), [(0, 1)])
    with pytest.raises(ValueError, match="in no pipeline"):
        weigh(play, [(0,)])


def test_exposed_tensor_parallel_communication_keeps_a_pipeline_busy() -> None:
    # F is 1 s of products and 1 s of all-reduce, B twice that; the bubble of a pipeline does not change by it.
    forward = template(("mm", "matmul", "compute", 1.0), ("ar", "all_reduce", "tp", 1.0))
    backward = template(("mm", "matmul", "compute", 2.0), ("ar", "all_reduce", "tp", 2.0), phase="B")
    play = pipeline("1f1b", 4, 8, forward=forward, backward=backward)
    assert bubble(activity(play), [range(4)]).ratio == pytest.approx(3 / 8)
    parts = time_breakdown(activity(play), [range(4)])
    assert parts["exposed"]["tp"] == pytest.approx(parts["compute"])


def test_a_hand_over_that_takes_time_is_exposed_pp_then_bubble() -> None:
    # p = 2, m = 1, F = 1, B = 2, hand-over 0.5: rank 0 works 0-1 and 5-7, rank 1 works 1.5-4.5. Each sees both
    # transfers (1-1.5, 4.5-5) exposed; the rest of its 7 s is bubble.
    play = pipeline("1f1b", 2, 1, comm=0.5)
    parts = time_breakdown(activity(play), [(0, 1)])
    assert play.step_time_s == 7.0
    assert parts["exposed"]["pp"] == pytest.approx(1.0)
    assert parts["bubble"] == pytest.approx(7.0 - 3.0 - 1.0)
    # Sends count on the wire, receives do not: each rank sends one megabyte.
    assert communication(activity(play))["pp"]["bytes_per_gpu"] == pytest.approx(1e6)


def test_links_are_ranked_by_the_share_of_the_step_that_their_bytes_need() -> None:
    links = [LinkUse("nvlink", "nvlink", 8, 100.0, 100.0), LinkUse("nic", "nic", 8, 40.0, 10.0)]
    idle = LinkUse("pcie", "pcie", 8, 0.0, 10.0)
    play = timeline([Span(0, "compute", template(("a", "matmul", "compute", 8.0)), 0.0)], links=[*links, idle])
    found = busiest_links(play)
    assert [(link["name"], link["utilisation"]) for link in found] == [("nic", 0.5), ("nvlink", 0.125)]


@pytest.mark.parametrize("length_s", [0.1, 0.3, 0.7, 1.1, 1.3])
def test_of_links_that_are_equally_busy_the_first_is_told(length_s: float) -> None:
    # A NIC that carries a third of an uplink's bytes at a third of its bandwidth is as busy: 0.1 s. Rounding of 0.3 / 3
    # and 0.1 / 1 over the length of a step must not tell them apart.
    links = [LinkUse("nic", "infiniband", 1, 0.1, 1.0), LinkUse("up", "infiniband", 1, 0.1 * 3, 3.0)]
    for first, second in (links, links[::-1]):
        play = timeline(
            [Span(0, "compute", template(("a", "matmul", "compute", length_s)), 0.0)], links=[first, second]
        )
        assert [(link["name"], link["bytes"], link["count"]) for link in busiest_links(play)] == [
            (first.name, first.nbytes, 2)
        ]


def test_of_a_span_that_a_period_cuts_the_rows_before_are_left_out() -> None:
    # A product to 1 s, a gather to 4 s beside two norms, a sum to 5 s. A period that begins at 2.5 s has the rest
    # of the gather, the half of the second norm that is left then, and the sum.
    ops = template(
        ("mm", "matmul", "compute", 1.0, 8.0),
        ("gather", "all_gather", "tp", 3.0, 16.0),
        ("one", "norm", "compute", 1.0),
        ("two", "norm", "compute", 1.0),
        ("sum", "sum", "compute", 1.0),
    )
    play = timeline([Span(0, "compute", replace(ops, beside={1: 2}), 0.0, end=5.0)])
    period = play.cut({0: (2.5, 5.0)}, 2.5, compute_lane="compute", steps=1, microbatches=1)
    rows = period.frame().sort_values(["start_s", "name"])
    assert list(zip(rows["name"], rows["start_s"], rows["end_s"], strict=True)) == [
        ("gather", 0.0, 1.5),
        ("two", 0.0, 0.5),
        ("sum", 1.5, 2.5),
    ]
    assert period.templates[period.template[0]].beside == {0: 1}
    assert sum(period.templates[period.template[0]].nbytes) == 0.0


def test_nothing_to_analyse() -> None:
    # A Timeline without spans has no step to divide; the shares are zero rather than not-a-number.
    cut = activity(timeline([]))
    assert bubble(cut, []).ratio == 0.0
    assert peak_activations(cut.timeline) == {}


def test_links_of_a_kind_that_carry_nearly_the_same_are_told_as_one() -> None:
    loads = [("a", "nvlink", 100.0), ("b", "nvlink", 97.0), ("c", "nvlink", 50.0), ("d", "nic", 99.0)]
    links = [LinkUse(name, kind, 4, nbytes, 10.0) for name, kind, nbytes in loads]
    play = timeline([Span(0, "compute", template(("a", "matmul", "compute", 20.0)), 0.0)], links=links)
    assert [(link["name"], link["count"]) for link in busiest_links(play)] == [("a", 8), ("d", 4), ("c", 4)]


def test_a_span_that_begins_after_its_lane_came_to_it_waited_for_the_host() -> None:
    op = template(("a", "matmul", "compute", 1.0))
    play = timeline([Span(0, "compute", op, 0.25, posted=0.0), Span(0, "compute", op, 2.0, posted=1.25)])
    parts = time_breakdown(activity(play), [(0,)])
    assert parts["host"] == 1.0
    assert parts["compute"] == 2.0


def test_communication_that_the_network_times_is_as_long_as_its_span() -> None:
    # Its template has no work; the engine knows its length only when the transfer has ended.
    send = template(("send", "send", "pp", 0.0, 5.0), phase="C")
    play = timeline([Span(0, "pp", send, 1.0, end=4.0, phase="C")])
    assert communication(activity(play))["pp"]["time_s"] == 3.0
    assert play.frame()["end_s"].tolist() == [4.0]


def test_only_passes_keep_a_pipeline_busy() -> None:
    # Stage 0 has done its F and B by 3 s and reduces its optimizer's norm over tp from 3 s to 5 s, in its block or on a
    # lane of its own, while stage 1 still works until 6 s: its own work is 3 of the 6 s.
    forward, backward = template(("f", "mlp", "compute", 1.0)), template(("b", "mlp", "compute", 2.0), phase="B")
    late = template(("b", "mlp", "compute", 5.0), phase="B")
    passes = [Span(0, "compute", forward, 0.0), Span(0, "compute", backward, 1.0, phase="B")]
    passes += [Span(1, "compute", forward, 0.0), Span(1, "compute", late, 1.0, phase="B")]
    norm = template(("norm", "all_reduce", "tp", 2.0), phase="O")
    beside = Span(0, "dp", template(("grads", "all_reduce", "dp", 2.5), phase="C"), 2.9, phase="C")
    for lane in ("compute", "tp"):
        for more in ([], [beside]):
            play = timeline([*passes, Span(0, lane, norm, 3.0, phase="O"), *more])
            idle = bubble(activity(play), [(0, 1)])
            assert (idle.fraction, idle.ratio) == pytest.approx((3 / 12, 3 / 9))


def test_communication_needs_no_table_of_ranks_by_templates() -> None:
    # Every rank has a template of its own: 1,500 x 1,500 numbers would be 18 MB.
    n = 1500
    spans = [Span(r, "tp", template(("ar", "all_reduce", "tp", 1.0, float(r))), 0.0, phase="C") for r in range(n)]
    cut = activity(timeline(spans))
    tracemalloc.start()
    figures = communication(cut)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert figures["tp"]["bytes_per_gpu"] == pytest.approx((n - 1) / 2)
    assert most < 4e6
