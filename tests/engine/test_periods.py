"""Steps that are played until their pipeline repeats itself, beside the same steps played whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simulator.config import load_workload
from simulator.engine import UnsteadyError
from simulator.engine.marks import Marks, PeriodMark
from simulator.engine.periods import stop_unsteady
from simulator.lowering import ShortenedStep, shortened, shortening
from simulator.program import later_label
from simulator.schedules import SCHEDULES, Order
from simulator.step_result import StepResult
from simulator.timeline import SpanLabels
from tests.support.exact import steady_differences
from tests.support.jobs import FAST_HOSTS, job, play
from tests.support.random_checks import differences

#: GPUs whose NCCL is not known to hold SMs. Where it does, kernels beside it settle more slowly than these steps last.
UNDISTURBED = {"name": "dgx_a100", "node": {**FAST_HOSTS, "gpus": {"type": "a100-pcie-80gb"}}}
P2P = {"p2p": True}
GRADIENTS = {"p2p": True, "grad_reduce": True, "param_gather": True}
SECTIONS: dict[str, dict[str, Any]] = {
    "naive": {"pp": 2, "schedule": "naive"},
    "1f1b, blocking": {"pp": 4, "schedule": "1f1b", "tp": 2},
    "1f1b, beside": {"pp": 4, "schedule": "1f1b", "dp": 2, "overlap": GRADIENTS},
    "interleaved, blocking": {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    "interleaved, beside": {"pp": 4, "vpp": 2, "schedule": "interleaved", "overlap": P2P},
    "dualpipe_v": {"pp": 2, "vpp": 2, "schedule": "dualpipe_v", "overlap": P2P},
    "dualpipe": {"pp": 2, "schedule": "dualpipe", "overlap": P2P},
    "no pipeline": {"dp": 2, "zero": 3, "overlap": GRADIENTS},
}


@pytest.fixture(autouse=True)
def small_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps be shortened however few passes that leaves out."""
    monkeypatch.setattr(shortening, "LEAST_LEFT_OUT", 0)


def both(section: dict[str, Any], batch: int = 64, **simulation: bool | str) -> tuple[StepResult, StepResult]:
    """Return a step as it is played with and without ``simulation.steady``."""
    batches = batch * section.get("dp", 1)
    workload = job(parallelism=section, training__global_batch=batches, cluster=UNDISTURBED)
    return play(workload, **simulation), play(workload, steady=False, **simulation)


def played_microbatches(step: ShortenedStep) -> int:
    """Return how many micro-batches are in the order of a shortened step."""
    return len({action.microbatch for slots in step.order for slot in slots for action in slot})


def assert_equal(short: StepResult, whole: StepResult) -> None:
    assert list(steady_differences(short.spans, whole.spans)) == []
    assert list(differences(short.to_dict(), whole.to_dict(), whole.spans.step_time_s)) == []


@pytest.mark.parametrize("name", SECTIONS)
def test_a_step_with_periods_put_in_is_the_step(name: str) -> None:
    short, whole = both(SECTIONS[name])
    assert short.repetition is not None
    assert short.spans.events < whole.spans.events
    assert_equal(short, whole)


@pytest.mark.parametrize("simulation", [{"engine": "python"}, {"fold": False, "coalesce": False}])
def test_it_is_so_with_either_engine_and_without_other_shortcuts(simulation: dict[str, Any]) -> None:
    short, whole = both(SECTIONS["1f1b, beside"], 32, **simulation)
    assert short.repetition is not None
    assert_equal(short, whole)


def test_more_microbatches_cost_no_more_events() -> None:
    events = {both(SECTIONS["1f1b, beside"], batch)[0].spans.events for batch in (64, 128)}
    # Periods are the same, and as many are played.
    assert len(events) == 1


def test_the_order_of_passes_tells_the_period() -> None:
    def period(**section: Any) -> int | None:
        step = shortened(load_workload(job(parallelism=section, training__global_batch=64)))
        return None if step is None else step.repetition.microbatches

    # 1F1B does the same with every micro-batch, interleaved stages with every round of as many as there are ranks.
    assert period(pp=4, schedule="1f1b") == 1
    assert period(pp=4, vpp=2, schedule="interleaved") == 4
    # GPipe runs all forward passes first: the more micro-batches, the longer each of its two halves.
    assert period(pp=4, schedule="gpipe") is None


@pytest.mark.parametrize(
    "schedule",
    [
        "interleaved",
        # No micro-batch of its passes comes again, whichever of the 36 periods that would fit is tried.
        "looped_bfs",
    ],
)
def test_one_order_is_built_whatever_the_periods_that_are_tried(schedule: str) -> None:
    built: list[int] = []
    whole = SCHEDULES[schedule]

    def order(p: int, m: int, v: int) -> Order:
        built.append(m)
        return whole.order(p, m, v)

    shortening.shortened_order(replace(whole, order=order), (4, 128, 2))
    assert built == [128]


@pytest.mark.parametrize(
    ("schedule", "size"), [("1f1b", (4, 64, 1)), ("interleaved", (4, 64, 2)), ("dualpipe", (4, 64, 1))]
)
def test_the_shortened_order_is_that_of_fewer_microbatches(schedule: str, size: tuple[int, int, int]) -> None:
    p, m, v = size
    step = shortening.shortened_order(SCHEDULES[schedule], size)
    assert step is not None
    fewer, copies = played_microbatches(step), SCHEDULES[schedule].copies
    # Both copies of DualPipe's model have half of the micro-batches each; those of the second are numbered as in the
    # whole step, from half of all on.
    later = (m - fewer) // copies
    order = [
        [tuple(a._replace(microbatch=a.microbatch + later * (a.stage // (p * v))) for a in slot) for slot in slots]
        for slots in SCHEDULES[schedule].order(p, fewer, v)
    ]
    assert step.order == order


def test_what_is_left_out_is_counted_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """DualPipe runs passes of two micro-batches in one slot; each of them counts, whatever slot it is in."""
    workload = load_workload(job(parallelism=SECTIONS["dualpipe_v"], training__global_batch=64))
    step = shortened(workload)
    assert step is not None
    slots = [slot for rank in workload.parallelism.pipeline_schedule.order(2, 64, 2) for slot in rank]
    passes = sum(map(len, slots))
    assert passes > len(slots)
    left_out = step.repetition.times * step.repetition.microbatches / 64 * passes
    monkeypatch.setattr(shortening, "LEAST_LEFT_OUT", left_out)
    assert shortened(workload) is not None
    monkeypatch.setattr(shortening, "LEAST_LEFT_OUT", left_out + 1)
    assert shortened(workload) is None


def test_what_piles_up_until_the_optimizer_is_played_whole() -> None:
    # The second reduction of hybrid shards waits for the first and not for computation. Its launch comes before the
    # first computation that waits for it, the optimizer, where the launches of all micro-batches pile up.
    section = {"dp": 4, "zero": 2, "hsdp": 2, "overlap": {"grad_reduce": True, "param_gather": True}}
    workload = job(parallelism=section, training__global_batch=4 * 32)
    assert shortened(load_workload(workload)) is not None
    assert play(workload).repetition is None


def test_a_deep_pipeline_is_played_until_its_first_rank_has_settled() -> None:
    step = shortened(load_workload(job(parallelism={"pp": 8, "schedule": "1f1b"}, training__global_batch=64)))
    assert step is not None
    # Seven micro-batches fill the pipeline. A change at the last rank takes one pass for each rank to come to the
    # first, and half as long again to fade: twelve for eight ranks.
    assert played_microbatches(step) == 7 + 12


def test_a_play_stops_where_its_pipeline_drains_and_no_two_periods_were_equally_long() -> None:
    def put_all(*times_s: float) -> None:
        """Put marks at ``times_s``, of which four are of a training step."""
        marks = Marks[int, int]([range(4), range(4, 8)])
        for time_s in times_s:
            marks.put(PeriodMark(time_s, np.zeros(1), {}, (), {}))
            stop_unsteady(marks)

    # Periods of 1, 2 and 3 s, and of 1, 2 and 2 s. Before the last mark of a step a period may still come.
    with pytest.raises(UnsteadyError):
        put_all(0.0, 1.0, 3.0, 6.0)
    put_all(0.0, 1.0, 3.0)
    put_all(0.0, 1.0, 3.0, 5.0)
    # The second step has none either, whatever the first one had.
    with pytest.raises(UnsteadyError):
        put_all(0.0, 1.0, 3.0, 5.0, 9.0, 10.0, 12.0, 15.0)


def test_experts_are_tried_where_an_eighth_is_played() -> None:
    def microbatches(batch: int) -> int | None:
        section = {"pp": 4, "ep": 2, "dp": 2, "schedule": "1f1b"}
        moe = {"experts": 4, "top_k": 2, "ffn_hidden": 64}
        step = shortened(load_workload(job(parallelism=section, training__global_batch=2 * batch, model__moe=moe)))
        return None if step is None else played_microbatches(step)

    # Three fill the pipeline, and eight are played in it at least.
    assert microbatches(11 * 8) == 11
    assert microbatches(11 * 8 - 1) is None


def test_labels_are_those_of_steps_so_many_microbatches_later() -> None:
    labels = SpanLabels(["0F1", "optimizer"], np.array([0, 1, 0, 0]), np.array([0, 2, 2, 1]), later_label)
    assert labels == ("0F1", "optimizer", "0F3", "0F2")
    assert labels.select(np.array([3, 1])) == ("0F2", "optimizer")
    assert list(labels) == [labels[span] for span in range(len(labels))]


def test_labels_are_no_text() -> None:
    labels = SpanLabels.written(["a", "b"])
    assert labels == ["a", "b"]
    assert labels != "ab"
    assert labels != {"a", "b"}


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("background", {"from": "node0.nic0", "to": "node1.nic0", "bandwidth_Bps": 1e9}),
        ("overrides", {"gpu": "node0.gpu1", "speed_scale": 0.9}),
    ],
)
def test_what_cannot_settle_is_not_tried(key: str, change: dict[str, Any]) -> None:
    # Background traffic comes and goes without the pipeline; the replica of a slow GPU falls behind the other one.
    workload = job(parallelism={"pp": 4, "dp": 2, "tp": 2, "schedule": "1f1b"}, training__global_batch=128)
    assert shortened(load_workload(workload)) is not None
    workload["cluster"][key] = [change]
    assert shortened(load_workload(workload)) is None


@pytest.mark.parametrize(("zero", "shortens"), [(1, True), (2, False), (3, False)])
def test_a_step_that_ends_with_a_check_of_every_pass_is_played_whole(zero: int, shortens: bool) -> None:
    # DeepSpeed looks for infinities in the sum of ZeRO-1, but in the shards of ZeRO-2 and 3 pass by pass.
    layout = {"dp": 2, "zero": zero, "overlap": {"grad_reduce": False, "param_gather": False}}
    workload = job(parallelism=layout, training__global_batch=2 * 64, training__precision="fp16")
    workload["framework"] = "hugging_face_deepspeed"
    workload["model"] |= {"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False}
    assert (shortened(load_workload(workload)) is not None) == shortens
