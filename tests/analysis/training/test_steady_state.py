"""Steps that follow one another: the steady period, what it is made of, and the schedules whose claim is of it."""

from __future__ import annotations

import csv
import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import run, schedule
from simulator.analysis.time.activity import activity
from simulator.analysis.training.steady_state import steady
from simulator.cluster.ideal import ideal_cluster
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.engine.invariants import check
from simulator.lowering import schedule_program
from simulator.schedules import SCHEDULES, Action, Order, Times
from simulator.validation import SUITES
from simulator.validation.rows import workload_of
from tests.support.grids import grid
from tests.support.jobs import job
from tests.support.timelines import Span, template, timeline

STEADY = [name for name, schedule in SCHEDULES.items() if schedule.steady]


def pipelined(name: str, **changes: Any) -> dict[str, Any]:
    return job(parallelism__schedule=name, parallelism__pp=2, training__grad_clip=1.0, **changes)


def leaves(breakdown: dict[str, Any]) -> float:
    return sum(breakdown["exposed"].values()) + sum(value for key, value in breakdown.items() if key != "exposed")


def test_which_schedules_claim_a_period() -> None:
    assert STEADY == ["zb_h2", "zb_auto", "zb_v", "async_1f1b"]


@pytest.mark.parametrize(
    ("name", "p2p", "layout"), grid(STEADY, [True, False], [(1, 1, 0), (2, 2, 1), (1, 4, 0)], every=5)
)
def test_the_parts_of_a_period_are_the_period(name: str, p2p: bool, layout: tuple[int, int, int]) -> None:
    """Several steps played are possible ones, and links carry one step's bytes.

    The breakdown's leaves, the critical path and every rank's spent and idle time each sum to one period. Each rank's
    compute lane holds one step's passes.
    """
    tp, dp, zero = layout
    overlap = {"p2p": p2p, "grad_reduce": p2p, "param_gather": p2p}
    sizes = {"parallelism__tp": tp, "parallelism__dp": dp, "parallelism__zero": zero, "parallelism__overlap": overlap}
    result = run(pipelined(name, **sizes))
    assert result.steady is not None
    assert result.steady.stable
    check(result.program, result.played)
    report = result.to_dict()
    period = report["step_time_s"]
    assert leaves(report["time_breakdown_s"]) == pytest.approx(period, rel=1e-9)
    assert sum(row["seconds"] for row in report["critical_path"]) == pytest.approx(period, rel=1e-9)
    cut = activity(result.spans)
    assert cut.spent_s.sum(axis=1) + cut.idle_s == pytest.approx(np.full(len(result.spans.ranks), period), rel=1e-9)
    spans = result.spans
    for rank in spans.ranks:
        for kind in ("F", "W") if SCHEDULES[name].splits else ("F", "B"):
            passes = (spans.rank == rank) & (spans.phase == kind)
            seen = set(zip(spans.stage[passes], spans.microbatch[passes], strict=True))
            if name != "zb_auto":  # which may leave backward passes whole
                assert len(seen) == 16 // dp * (SCHEDULES[name].chunks or 1)
    sent = report["communication"]["pp"]["bytes_per_gpu"]
    carried = sum(link.nbytes * link.count for link in spans.links if link.leaves_gpu) / spans.n_ranks
    assert 0 < sent <= carried * (1 + 1e-9)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1"])
def test_one_step_is_what_it_was(name: str) -> None:
    result = run(pipelined(name))
    assert result.steady is None
    assert result.spans.step_time_s == result.spans.length_s


def test_a_mean_period_counts_ranks_by_how_many_each_stands_for() -> None:
    """Six steps, each longer than the one before. Rank 0, which stands for three, begins them at 0, 1, 3, 6, 10 and 15:
    from the middle one to the last 9 s in 2 steps, 4.5 each. Rank 1 stands for itself and begins at 0, 1, 3, 6, 10 and
    16: 5 each. The mean of all four is (3 * 4.5 + 5) / 4."""
    begins = {0: [0.0, 1.0, 3.0, 6.0, 10.0, 15.0], 1: [0.0, 1.0, 3.0, 6.0, 10.0, 16.0]}
    work = template(("mlp", "matmul", "compute", 0.5))
    spans = [
        Span(rank, "compute", work, at, microbatch=n) for rank, times in begins.items() for n, at in enumerate(times)
    ]
    found = steady(timeline(spans, {0: 3, 1: 1}), 6, 1)
    assert not found.stable
    assert found.period.step_time_s == pytest.approx((3 * 4.5 + 5) / 4, rel=1e-12)


def test_a_period_of_two_ranks_by_hand() -> None:
    """zb_h2, p 2, m 3, F = I = W = 1. Rank 0: F F F I W I W I W, nine units without a gap from 0 on. Rank 1: F I W? its
    first I comes at 2; F I F I F I and three W, from 1 to 10. So it is in all steps, a period of 9."""
    result = schedule("zb_h2", 2, 3)
    assert result.to_dict()["makespan"] == 9
    assert result.order[0] == ["0F0", "0F1", "0F2", "0I0", "0W0", "0I1", "0W1", "0I2", "0W2"]
    assert result.order[1] == ["1F0", "1I0", "1F1", "1I1", "1F2", "1I2", "1W0", "1W1", "1W2"]
    begins = [float(result.spans.start_s[result.spans.rank == rank].min()) for rank in (0, 1)]
    assert begins == [0, 1]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (4, 1), (4, 3), (3, 7), (4, 12), (8, 5)])
def test_async_1f1b_never_waits(p: int, m: int) -> None:
    """Every rank keeps alternating: no idle time at any F and B, micro-batches per step or ranks, and p - r held."""
    for forward, backward in ((1.0, 2.0), (2.0, 1.0), (1.0, 1.3)):
        report = schedule("async_1f1b", p, m, forward=forward, backward=backward).to_dict()
        assert report["makespan"] == pytest.approx(m * (forward + backward), rel=1e-9)
        assert report["bubble_ratio"] == pytest.approx(0, abs=1e-9)
        assert report["peak_activations"] == [p - rank for rank in range(p)]


@pytest.mark.parametrize("name", ["zb_h2", "zb_v", "async_1f1b"])
def test_the_steady_period_has_no_bubble(name: str) -> None:
    """The claim holds where F = I = W, transfers are free and m >= 2p - 1."""
    for p, more in itertools.product((1, 2, 4), (0, 3)):
        report = schedule(name, p, 2 * p - 1 + more).to_dict()
        assert report["bubble_ratio"] == pytest.approx(report["bubble_ratio_claimed"], abs=1e-9) == 0


def peak(order: Order, times: Times) -> list[float]:
    """Return what each rank holds at most: F takes, I changes to what it leaves, W or B gives back."""
    peaks = []
    for rank, slots in enumerate(order):
        held = most = 0.0
        for (action,) in slots:
            taken, kept = times.forward_bytes[rank], times.split_bytes[rank]
            held += {"F": taken, "I": kept - taken, "W": -kept, "B": -taken}[action.kind]
            most = max(most, held)
        assert held == pytest.approx(0)
        peaks.append(most)
    return peaks


@pytest.mark.parametrize(("size", "kept"), grid([(2, 3), (3, 7), (4, 5)], [0.4, 1.0, 1.3], every=3))
def test_the_search_keeps_to_its_memory_and_uses_what_it_gets(size: tuple[int, int], kept: float) -> None:
    """Never more than the limit times 1F1B's peak, at equal stages and at uneven ones; more memory is never slower."""
    p, m = size
    for f, i, w, hop in ((1.0, 1.0, 1.0, 0.0), (1.0, 1.3, 0.7, 0.05)):
        slower = float("inf")
        for limit in (1 / 2, 1.0, 1.5, 2.0):
            times = Times.equal(p, f, i, w, hop, limit, kept)
            assert max(peak(SCHEDULES["zb_auto"].tuned(times).order(p, m, 1), times)) <= limit * min(m, p) * (1 + 1e-9)
            seconds = schedule(
                "zb_auto", p, m, forward=f, backward=i + w, weight=w, comm=hop, zb_memory_limit=limit, kept=kept
            ).to_dict()["makespan"]
            assert seconds <= slower * (1 + 1e-9)
            slower = seconds
    sizes = tuple(1.0 + 0.3 * (stage % 2) for stage in range(p))
    uneven = Times(sizes, sizes, sizes, sizes, tuple(kept * size for size in sizes), 0.1, 1.0)
    most = max(min(m, p - stage) * size for stage, size in enumerate(sizes))
    assert max(peak(SCHEDULES["zb_auto"].tuned(uneven).order(p, m, 1), uneven)) <= most * (1 + 1e-9)


def test_the_search_is_fast_and_no_worse_than_1f1b() -> None:
    """p 32, m 128: the same order again costs nothing; whole backward passes where split ones need too much memory."""
    times = Times.equal(4, 1.0, 1.0, 1.0, kept=1.9)
    order = SCHEDULES["zb_auto"].tuned(times).order(4, 8, 1)
    assert (Action(0, "B", 0),) in order[0]
    assert schedule("zb_auto", 4, 8, kept=1.9).to_dict()["makespan"] <= schedule("1f1b", 4, 8).to_dict()["makespan"]
    with pytest.raises(ValueError, match=r"no room for a micro-batch: at least 0\.25"):
        SCHEDULES["zb_auto"].tuned(Times.equal(4, 1.0, 1.0, 1.0, limit=0.2)).order(4, 8, 1)


@given(
    p=st.integers(1, 5),
    more=st.integers(0, 8),
    costs=st.tuples(*[st.floats(0.3, 2.0)] * 3),
    hop=st.sampled_from([0.0, 0.1]),
    kept=st.floats(0.2, 1.8),
    limit=st.floats(1.0, 3.0),
)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_the_search_is_no_worse_than_what_was_made_by_hand(
    p: int, more: int, costs: tuple[float, float, float], hop: float, kept: float, limit: float
) -> None:
    """Wherever 1F1B, ZB-H1 or ZB-H2 holds no more than the limit times 1F1B's peak, which a search may not know to
    start from."""
    m = p + more
    f, i, w = costs
    times = Times.equal(p, f, i, w, hop, limit, kept)
    most = limit * min(m, p) * (1 + 1e-9)
    assert max(peak(SCHEDULES["zb_auto"].tuned(times).order(p, m, 1), times)) <= most
    split: dict[str, Any] = {"forward": f, "backward": i + w, "weight": w, "comm": hop}
    found = schedule("zb_auto", p, m, zb_memory_limit=limit, kept=kept, **split).to_dict()["makespan"]
    for name in ("1f1b", "zb_h1", "zb_h2"):
        if max(peak(SCHEDULES[name].order(p, m, 1), times)) <= most:
            assert found <= schedule(name, p, m, **split).to_dict()["makespan"] * (1 + 1e-9)


def published() -> list[dict[str, str]]:
    with SUITES["zero-bubble"].table.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def slow_if_large(row: dict[str, str]) -> Any:
    large = int(row["pp"]) > 8 or int(row["global_batch"]) // int(row["micro_batch"]) > 32
    return pytest.param(row, marks=[pytest.mark.slow] if large else [], id=row["id"])


@pytest.mark.parametrize("row", [slow_if_large(row) for row in published() if row["bubble_rate"]])
def test_bubble_rates_of_the_zero_bubble_paper(row: dict[str, str]) -> None:
    """Table 5 of arXiv 2401.10241 from its own F, I, W and transfers (table 6): (cost - m (F + I + W)) / cost. A
    forward takes 34 + 5 a s / h bytes per s b h, and its weight gradient needs 32 of them (table 1)."""
    times = {key: float(value) for key, value in re.findall(r"T_(\w+)=([\d.]+)", row["notes"])}
    f, i, w = times["F"], times["B"], times["W"]
    p, m, v = int(row["pp"]), int(row["global_batch"]) // int(row["micro_batch"]), int(row["vpp"])
    name = {"1F1B": "1f1b", "1F1B-I": "interleaved"}.get(row["schedule"], "zb_auto")
    limit = 2.0 if row["schedule"] == "ZB-2p" else 1.0
    kept = 32 / (34 + 5 * int(row["heads"]) * int(row["seq"]) / int(row["hidden"]))
    result = schedule(
        name, p, m, v, forward=f, backward=i + w, weight=w, comm=times["comm"], zb_memory_limit=limit, kept=kept,
    )  # fmt: skip
    cost = result.spans.step_time_s
    rate = (cost - m * (f + i + w)) / cost
    # To the last printed digit, but for interleaving, whose transfers its authors' own calculation hides otherwise.
    assert abs(rate - float(row["bubble_rate"])) <= (0.003 if v > 1 else 1e-4)


def measured(row: dict[str, str], predicted: dict[str, tuple[float, float]]) -> tuple[float, float, float, float]:
    seconds, peak_bytes = predicted[row["id"]]
    return float(row["derived_step_s"]), seconds, float(row["mem_gb"]), peak_bytes


COLUMNS = list(dict.fromkeys((row["model"], row["global_batch"]) for row in published()))


@pytest.mark.parametrize(
    ("model", "batch"),
    [pytest.param(*key, marks=[] if key[1] == "72" else [pytest.mark.slow]) for key in COLUMNS],
)
def test_schedules_are_in_the_measured_order(model: str, batch: str) -> None:
    """In every column of table 4 (a model and a number of micro-batches): of any two schedules the one that was
    measured faster is simulated faster, and the one that took more memory (by more than the 3 GB that ZB-1p took
    beside 1F1B) takes more."""
    rows = []
    for row in published():
        if "-t4-" in row["id"] and (row["model"], row["global_batch"]) == (model, batch):
            report = run(workload_of(row, SUITES["zero-bubble"].settings_of(row))).to_dict()
            figures = (report["step_time_s"], report["memory"]["peak_bytes"])
            rows.append(measured(row, {row["id"]: figures}))
    if rows:
        for (slow, slow_here, full, full_here), (fast, fast_here, less, less_here) in itertools.permutations(rows, 2):
            if slow > fast:
                assert slow_here > fast_here
            if full > less + 3:
                assert full_here > less_here


def test_what_all_stages_agree_on_holds_nobody_up_unless_asked() -> None:
    """Table 7 of arXiv 2401.10241: the optimizer that waits for all stages makes ZB-2p slower, by 8 to 11 % there."""
    row = next(row for row in published() if row["id"] == "zerobubble-t4-010")
    workload = workload_of(row, SUITES["zero-bubble"].settings_of(row))
    free, held = (run(workload, set={"parallelism.optimizer_sync": sync}).spans.step_time_s for sync in (False, True))
    assert 1.04 < held / free < 1.13


@pytest.mark.parametrize(("p", "m"), [(2, 1), (4, 1), (4, 2), (4, 5)])
def test_versions_of_the_weights_are_counted(p: int, m: int) -> None:
    """PipeDream's p - r where weights change after every micro-batch; the two of PipeDream-2BW where m >= p - 1, and
    one on the last rank, which has no other micro-batch under way."""
    workload = job(parallelism__pp=p, training__global_batch=m, model__tied_embeddings=False)
    weights = {
        name: [
            stage["weights"]
            for stage in run(workload | {"parallelism": {"pp": p, "schedule": name}}).to_dict()["memory"]["per_stage"]
        ]
        for name in ("1f1b", "async_1f1b")
    }
    versions = [many / one for many, one in zip(weights["async_1f1b"], weights["1f1b"], strict=True)]
    if m == 1:
        assert versions == [p - rank for rank in range(p)]
    if m >= p - 1:
        assert versions == [2] * (p - 1) + [1]


def test_a_step_that_never_repeats_is_said() -> None:
    """Steps that run on as one begin and end gradually: of four steps of one micro-batch on four ranks none repeats the
    one before on all ranks. The mean period of the later half is given, and not called stable; more steps show it."""
    found = {}
    for steps in (4, 16):
        program = schedule_program(SCHEDULES["async_1f1b"], 4, 1, 1, 1.0, 2.0, steps=steps)
        found[steps] = steady(simulate(program, ideal_cluster(4, 0.0), Costs.ideal()), steps, 1)
    assert not found[4].stable
    assert found[4].period.step_time_s > 0
    assert found[16].stable
    assert found[16].period.step_time_s == pytest.approx(3.0)


@pytest.mark.parametrize("name", ["zb_h2", "zb_v"])
def test_a_step_may_end_with_a_collective(name: str) -> None:
    """With gradients and optimizer on the host the last thing that the compute lane comes to may be the reduction of
    norms' gradients over tp. Steps are still cut where they begin: together they last as many periods, and what the
    first one fills and the last one drains. That may be nothing, as a step reads parameters once all are updated."""
    section = {"pp": 4, "dp": 2, "tp": 2, "schedule": name, "zero": 3, "offload": {"optimizer": "cpu"}}
    result = run(job(training__global_batch=32) | {"parallelism": section})
    last = result.program.roles[0].lanes["compute"][-1].op
    assert [type(op).__name__ for op in last.ops] == ["Collective"]
    assert result.steady is not None
    assert result.steady.stable
    steps = (int(result.played.microbatch.max()) + 1) // 16
    assert 0.9 < steps * result.spans.step_time_s / result.played.length_s <= 1 + 1e-9
