"""The cost of a simulation, counted in events: that does not depend on the machine or on what else it does."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.bench_gpt175b import main
from simulator.api import run
from tests.support.jobs import job
from tests.support.quick import load, play, play_undisturbed


def test_the_main_job_takes_few_events() -> None:
    """1,536 GPUs in 12 stages. Stages and replicas differ by where they sit among the switches, tensor-parallel ranks
    by nothing: at most 4 ranks are simulated for each stage. Each runs 96 micro-batches forward and back and has up to
    four ends of transfers for each: 27,648 spans, and about two events a span."""
    timeline = run("gpt175b_3d").spans
    assert timeline.n_ranks == 1536
    assert 12 <= len(timeline.ranks) <= 48
    assert timeline.events <= 60_000
    assert timeline.n_rows >= 20 * timeline.events  # a row for every kernel all the same


@pytest.mark.parametrize("dp", [4, 8, 10])
def test_replicas_cost_nothing(dp: int) -> None:
    """Replicas under one leaf switch do the same at the same time: as many events, however many there are. (Rings: in a
    tree replicas differ.)"""

    def cost(dp: int) -> tuple[int, int]:
        description = job(
            parallelism__dp=dp,
            parallelism__pp=2,
            parallelism__tp=8,
            parallelism__collective_algorithm="ring",
            training__global_batch=8 * dp,
        )
        timeline = play(load(description)).spans
        return timeline.events, len(timeline.ranks)

    assert cost(dp) == cost(2)
    assert cost(dp)[1] == 2


@pytest.mark.parametrize("layers", [8, 16])
def test_layers_of_a_stage_cost_no_events(layers: int) -> None:
    """Where nothing else crosses the links of its tensor-parallel group, a stage's pass is advanced as a whole: more
    layers, no more events. (There may be fewer: who meets whom at an instant depends on how long passes last.)"""

    def events(layers: int) -> int:
        description = job(parallelism__pp=4, parallelism__tp=8)
        description["model"]["layers"] = layers
        return play(load(description)).spans.events

    assert events(layers) <= 1.01 * events(4)


@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_in_a_node_cost_layers_events_only_while_they_reduce(zero: int) -> None:
    """Gradients cross the NVLinks of the tensor-parallel group, but not before the last backward pass, parameters only
    at first: in every micro-batch between them each of both passes is one event more or less, however many layers."""

    def cost(m: int, layers: int) -> int:
        overlap = {"grad_reduce": True, "param_gather": True}
        description = job(
            parallelism__tp=4,
            parallelism__dp=2,
            parallelism__zero=zero,
            parallelism__overlap=overlap,
            training__global_batch=2 * m,
        )
        description["model"]["layers"] = layers
        return play(load(description)).spans.events

    for layers in (4, 16):
        assert cost(24, layers) - cost(8, layers) <= 16 * 2 * 2


@pytest.mark.parametrize("p2p", [True, False])
def test_events_grow_with_microbatches_alone(p2p: bool) -> None:
    """Events are a constant for the end of the step, and so many for each micro-batch.

    On 4 ranks a micro-batch has 8 passes and both ends of 6 transfers. These are 20 spans, at most two events each. A
    lane that comes to a step just when what it waits for ends may save an event. Kernels that a transfer slows would
    take more.
    """

    def cost(m: int) -> tuple[int, int]:
        keys = {"parallelism__pp": 4, "parallelism__tp": 8, "parallelism__overlap": {"p2p": p2p}}
        timeline = play_undisturbed(load(job(**keys, training__global_batch=m))).spans
        return timeline.events, len(timeline.rank)

    costs = [cost(m) for m in (8, 16, 24, 40)]
    events, spans = zip(*[(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(costs)], strict=True)
    assert spans == (8 * 20, 8 * 20, 16 * 20)
    assert events == pytest.approx([events[0], events[0], 2 * events[0]], rel=0.01)
    assert events[0] <= 2 * spans[0]


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--workload", "gpt22b_tp8", "--repeat", "1", "--plain", "--set", "training.global_batch=4"])
    printed = capsys.readouterr().out
    for word in ("events", "ops", "ranks simulated", "build program", "simulate", "write trace", "draw", "without"):
        assert word in printed


def test_passes_cost_one_event_where_communication_could_slow_them() -> None:
    """On H100s, where the power limit is settled by the second play: a micro-batch more on each of 8 replicas is two
    passes more, with nothing beside them."""

    def cost(m: int) -> int:
        small = {"model.layers": 4, "training.recompute": "none", "parallelism.zero": 0}
        return run("llama3_8b_dgx_h100", set=small | {"training.global_batch": 8 * m}).spans.events

    assert cost(3) - cost(2) == cost(2) - cost(1) == 2 * 2


def test_layers_share_their_templates() -> None:
    """A stage's pass stops at every collective of its layers, between which the same ops run."""

    def templates(layers: int) -> int:
        description = job(model__layers=layers, parallelism__tp=2, parallelism__pp=2)
        return len(run(description | {"cluster": "dgx_h100"}).spans.templates)

    assert templates(16) == templates(8)
