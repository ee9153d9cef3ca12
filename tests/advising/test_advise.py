"""Advice on speed: what is tried, what is said of it, and that a user who follows it gets just that."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

import simulator
from simulator.advising.advise import HELPS, SpeedAdvice, advise
from simulator.advising.proposals import LEAST_SHORTENED, Proposal, proposals
from simulator.analysis.training import key_changes
from simulator.analysis.training.advice import CANDIDATES
from simulator.config import altered, load_workload, parse_changes
from simulator.input_files import as_options
from simulator.output.change_table import change_lines
from tests.support.jobs import FAST_HOSTS, job

#: Two stages of whole micro-batches, with the activations of every layer computed again: much to gain. Hosts hold up
#: nothing.
SLOW: dict[str, Any] = job(
    parallelism={"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": False, "overlap": {"grad_reduce": False}},
    training={"seq": 4096, "global_batch": 16, "recompute": "full"},
    model={"layers": 8, "hidden": 2048, "heads": 16, "vocab": 1024},
) | {"cluster": {"name": "dgx_a100", "node": FAST_HOSTS}}


@pytest.fixture(scope="module")
def advice() -> SpeedAdvice:
    return advise(SLOW)


def test_who_follows_advice_gets_the_step_and_the_memory_that_it_names(advice: SpeedAdvice) -> None:
    assert len(advice.best) == 3
    for one in advice.best:
        typed = [text for text in shlex.split(as_options(one.change)) if text != "--set"]
        result = simulator.run(SLOW, set=parse_changes(typed))
        assert result.spans.step_time_s == pytest.approx(one.step_time_s, rel=1e-9)
        assert result.report["memory"]["peak_bytes"] == pytest.approx(one.peak_bytes, rel=1e-9)
        assert one.saved_s == pytest.approx(advice.step_time_s - one.step_time_s, rel=1e-9)
        assert one.saved_s >= HELPS * advice.step_time_s


def test_the_change_that_saves_most_comes_first(advice: SpeedAdvice) -> None:
    saved = [one.saved_s for one in advice.best]
    assert saved == sorted(saved, reverse=True)
    # Recompute runs every forward pass twice: of F + F + 2F a quarter goes, more than any other change frees.
    assert advice.best[0].change == {"training.recompute": "none"}
    assert all(one.fits for one in advice.best)
    assert advice.too_large is None


def test_a_faster_change_that_does_not_fit_is_named_apart() -> None:
    """Llama 3 8B without recompute keeps 32 layers of 8,192 tokens: faster by a sixth, and more than 80 GB."""
    told = advise("llama3_8b_dgx_h100")
    assert {"training.recompute": "none"} not in [one.change for one in told.best]
    assert told.too_large is not None
    assert told.too_large.change == {"training.recompute": "none"}
    assert not told.too_large.fits
    assert "Faster, if it fitted: --set training.recompute=none" in " ".join(repr(told).split())


def test_when_the_time_is_over_nothing_more_is_tried() -> None:
    told = advise(SLOW, budget_s=0)
    assert (told.best, told.simulated, told.refused) == ((), 0, 0)
    listed = proposals(load_workload(SLOW), simulator.run(SLOW).report["time_breakdown_s"], None)
    assert told.left == len(listed) > 10
    assert f"{told.left} not tried for want of time" in " ".join(repr(told).split())


def test_progress_is_told() -> None:
    heard: list[tuple[int, int]] = []
    advise(SLOW, watch=lambda done, total: heard.append((done, total)))
    assert [done for done, _ in heard] == list(range(heard[0][1]))


def test_only_what_takes_time_is_worth_a_change() -> None:
    """One GPU: no bubble, no communication. What shortens these alone is not tried."""
    alone = simulator.run(job())
    breakdown = alone.report["time_breakdown_s"]
    listed = proposals(alone.workload, breakdown, None)
    assert listed
    assert all(one.seconds(breakdown) >= LEAST_SHORTENED * alone.spans.step_time_s for one in listed)
    keys = {key for one in listed for key in one.change}
    assert not keys & {"parallelism.schedule", "parallelism.overlap.grad_reduce", "parallelism.bucket_bytes"}


def test_a_better_split_of_the_layers_is_among_the_proposals() -> None:
    workload = load_workload(SLOW)
    breakdown = simulator.run(SLOW).report["time_breakdown_s"]
    assert {"parallelism.layers_per_stage": [5, 3]} in [one.change for one in proposals(workload, breakdown, (5, 3))]


def test_both_kinds_of_advice_take_scatter_gather_back_for_sequence_parallelism() -> None:
    """The two exclude each other: a change that left the first would be refused."""
    split = job(parallelism={"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": False, "scatter_gather_p2p": True})
    workload = load_workload(split)
    (change,) = key_changes.sequence_parallel(workload)
    assert altered(workload, change).parallelism.sequence_parallel
    breakdown = simulator.run(split).report["time_breakdown_s"]
    assert change in [one.change for one in proposals(workload, breakdown, None)]
    assert change in [next(one(workload), {}) for one in CANDIDATES]


def test_a_change_that_changes_nothing_counts_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four proposals is the job itself, one has half of its GPUs, one is illegal, and one is simulated."""
    changes = (
        {"training.recompute": "full"},
        {"parallelism.dp": 1},
        {"parallelism.tp": 3},
        {"training.recompute": "none"},
    )
    listed = [Proposal(change, ("bubble",)) for change in changes]
    monkeypatch.setattr("simulator.advising.advise.proposals", lambda *_: listed)
    told = advise(SLOW)
    assert (told.simulated, told.refused, told.left) == (1, 1, 0)


def test_a_job_that_does_not_fit_is_advised_to_nothing_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3 8B without recompute lacks memory. Faster with buckets of another size it lacks as much; with recompute
    it fits, and is slower."""
    changes = ({"parallelism.bucket_bytes": 400e6}, {"training.recompute": "full"})
    listed = [Proposal(change, ("dp",)) for change in changes]
    monkeypatch.setattr("simulator.advising.advise.proposals", lambda *_: listed)
    monkeypatch.setattr("simulator.advising.advise.HELPS", -1.0)
    result = simulator.run("llama3_8b_dgx_h100", set={"training.recompute": "none"})
    assert not result.report["memory"]["fits"]
    told = advise(result)
    assert [one.change for one in told.best] == [{"training.recompute": "full"}]
    assert told.too_large is not None
    assert told.too_large.change == {"parallelism.bucket_bytes": 400e6}


def test_a_change_for_which_the_host_lacks_memory_says_so() -> None:
    """Its GPU would have room: 40 of 80 GiB."""
    row = {"options": "--set a=1", "step_time_s": 1.0, "peak_bytes": 40 * 2**30, "capacity_bytes": 80 * 2**30}
    (line, _) = change_lines({"changes": [], "too_large": row, "simulated": 1, "refused": 0, "left": 0})
    assert (
        line == "Faster, if it fitted: --set a=1 takes 1.00 s a step and needs more memory of the host than a node has."
    )


def test_nothing_that_was_not_tried_is_said_not_to_help() -> None:
    (line,) = change_lines({"changes": [], "too_large": None, "simulated": 0, "refused": 0, "left": 4})
    assert line == "0 changes simulated, each by itself, 4 not tried for want of time (--budget-s)."
