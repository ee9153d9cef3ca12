"""Gradients of several micro-batches that fully sharded ranks add up whole, and reduce once."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from simulator.analysis.time.memory_curve import memory_curve
from simulator.config import warnings
from simulator.errors import InputError
from simulator.models import rank_parts
from simulator.operations.weights import elements
from simulator.output.memory_plot import memory_layers
from simulator.step_result import StepResult
from tests.support.grids import every_pair
from tests.support.sharded import load, play

ONCE: dict[str, Any] = {"dp": 2, "zero": 3, "sync_each_micro_batch": False}
#: Weights of the small job.
PARAMS = sum(elements(part.weights) for part in rank_parts(load(dp=2), 0))


def rows(result: StepResult, name: str) -> pd.DataFrame:
    """Rows of the first rank with a name."""
    frame = result.timeline
    return frame[(frame["rank"] == 0) & (frame["name"] == name)]


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize(("grad_dtype", "nbytes"), [("bf16", 2), ("fp32", 4)])
def test_the_last_micro_batch_alone_reduces(m: int, grad_dtype: str, nbytes: int) -> None:
    """All weights' gradients travel once, not once a micro-batch: each of two ranks sends half of them. Units are
    gathered as often as before."""
    training = {"global_batch": 2 * m, "grad_dtype": grad_dtype}
    each = play(training, framework="pytorch", dp=2, zero=3)
    once = play(training, framework="pytorch", **ONCE)
    reduced = rows(once, "dp.reduce_scatter grads")
    assert reduced["nbytes"].sum() == nbytes * PARAMS / 2
    assert set(reduced["microbatch"]) == {m - 1}
    assert rows(each, "dp.reduce_scatter grads")["nbytes"].sum() == m * nbytes * PARAMS / 2
    gathered = [rows(one, "dp.all_gather params")["nbytes"].sum() for one in (each, once)]
    assert gathered[0] == gathered[1]


@pytest.mark.parametrize("m", [2, 4])
def test_kernels_of_whole_gradients(m: int) -> None:
    """The first gradients, 2 bytes each, are cast to 4. Those of others are read with the sum of 4 bytes, and the new
    sum is written: 10 bytes. What is reduced is copied as it is, 8 bytes, and no shard is added to another."""
    training = {"global_batch": 2 * m, "grad_dtype": "fp32"}
    result = play(training, framework="pytorch", **ONCE)
    assert rows(result, "fsdp.cast grads")["nbytes"].sum() == (2 + 4) * PARAMS
    assert rows(result, "fsdp.add grads")["nbytes"].sum() == (m - 1) * 10 * PARAMS
    copied = rows(result, "fsdp.reduce copy in")
    assert copied["nbytes"].sum() == 8 * PARAMS
    assert set(copied["kind"]) == {"chunk_cat"}
    assert rows(result, "fsdp.accumulate").empty


def test_gradients_of_the_working_type_are_kept_as_they_are() -> None:
    """Autograd's first gradients stay, and it adds the others to them: 2 bytes read, 2 of the sum, 2 written."""
    result = play({"global_batch": 6, "grad_dtype": "bf16"}, framework="pytorch", **ONCE)
    assert rows(result, "fsdp.cast grads").empty
    assert rows(result, "fsdp.add grads")["nbytes"].sum() == 2 * 6 * PARAMS


def test_whole_gradients_take_their_memory() -> None:
    """A rank holds 4 bytes for every weight beside its state between two micro-batches. Where each micro-batch is
    reduced it holds its shard of them."""
    training = {"global_batch": 4, "grad_dtype": "fp32"}

    def between(**keys: Any) -> float:
        result = play(training, framework="pytorch", dp=2, zero=3, **keys)
        curve = memory_curve(result.spans, 0)
        labels = rows(result, "fsdp.gather copy in")
        begins = labels[labels["microbatch"] == 1]["start_s"].min()
        return float(curve.held_bytes[curve.times <= begins][-1])

    assert between(sync_each_micro_batch=False) - between() == pytest.approx(4 * PARAMS - 4 * PARAMS / 2, rel=1e-6)


def test_whole_gradients_are_gradients_in_reports_and_pictures() -> None:
    """The first forward pass has none. Before the second one they take 4 bytes for every weight. What is gathered
    beside them is never as much."""
    training = {"global_batch": 4, "grad_dtype": "fp32"}
    result = play(training, framework="pytorch", **ONCE)
    times, layers = memory_layers(result.spans, result.memories[0])
    frame = rows(result, "fsdp.gather copy in")
    second = frame[frame["microbatch"] == 1]["start_s"].min()
    at = int((times <= second).sum()) - 1
    assert layers["gradients"][0] == 0
    assert layers["gradients"][at] == pytest.approx(4 * PARAMS, rel=1e-6)
    assert layers["gathered"].max() < 4 * PARAMS
    memory = result.memories[0]
    assert memory.static.accumulated == pytest.approx(4 * PARAMS)
    assert memory.contents.get("gathered", 0.0) < memory.static.accumulated


@every_pair(
    {
        "kind": ["none", "full"],
        "grad_dtype": ["bf16", "fp32"],
        "keys": [{}, {"tp": 2}, {"pp": 2}, {"pp": 2, "schedule": "zb_h1"}, {"dp": 4, "hsdp": 2}],
    }
)
def test_all_that_a_step_takes_is_given_back(keys: dict[str, Any], grad_dtype: str, kind: str) -> None:
    """After the step nothing is left of what it took, and never less than none is held."""
    training = {"global_batch": 12, "recompute": kind, "grad_dtype": grad_dtype}
    result = play(training, framework="pytorch", **(ONCE | keys))
    for rank in result.spans.ranks:
        held = memory_curve(result.spans, rank).held_bytes
        assert abs(held[-1]) < 1e-6 * held.max()
        assert held.min() > -1e-6 * held.max()


def test_who_adds_whole_gradients() -> None:
    """Accelerate's ``no_sync`` does where Hugging Face's Trainer runs several micro-batches of a sharded model; plain
    PyTorch reduces each. Frameworks that shard in other ways have no such choice."""
    assert load(framework="hugging_face", dp=2, zero=3).adds_whole_gradients
    assert not load(framework="hugging_face", dp=2, zero=3, sync_each_micro_batch=True).adds_whole_gradients
    assert not load(framework="pytorch", dp=2, zero=3).adds_whole_gradients
    assert not load({"global_batch": 2}, framework="hugging_face", dp=2, zero=3).adds_whole_gradients
    with pytest.raises(InputError, match="reduces the gradients of every micro-batch"):
        load(framework="megatron_core", **ONCE)
    notes = warnings(load(framework="pytorch", dp=2, sync_each_micro_batch=False))
    assert any("parallelism.sync_each_micro_batch has no effect" in note for note in notes)


def test_stages_of_torch_keep_parameters_from_their_first_backward_pass_on() -> None:
    """``set_reshard_after_backward(False)``: layers that forward passes keep are gathered once a step, and reduced one
    after another behind the stage's last backward pass."""
    result = play({"global_batch": 16}, framework="pytorch", dp=2, pp=2, zero=3, reshard_after_forward=False)
    gathers, reductions = rows(result, "dp.all_gather params"), rows(result, "dp.reduce_scatter grads")
    first = [elements(part.weights) for part in rank_parts(result.workload, 0)]
    assert gathers["nbytes"].sum() == 2 * sum(first) / 2  # each of two ranks sends its half, 2 bytes each
    copied = rows(result, "fsdp.gather copy out")["nbytes"].sum()
    assert copied == 2 * 2 * sum(first)  # read and written where they were gathered, and nowhere else
    frame = result.timeline
    passes = frame[(frame["rank"] == 0) & (frame["phase"] == "B")]
    assert len(reductions) == len([count for count in first if count])
    assert reductions["start_s"].min() >= passes["end_s"].max() - 1e-12
    starts, ends = reductions["start_s"].to_numpy(), reductions["end_s"].to_numpy()
    assert (starts[1:] >= ends[:-1] - 1e-12).all()
    with pytest.raises(InputError, match="reduce the gradients of sharded stages once"):
        load(framework="pytorch", dp=2, pp=2, zero=3, sync_each_micro_batch=True)
