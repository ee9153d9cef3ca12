"""Each pass of lowering turns the text of a rank's lanes into another text."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.lowering.passes import PASSES, apply_passes
from simulator.lowering.passes.add_copies import add_tied_gradients, add_twin_gradients
from simulator.lowering.passes.cut_by_unit import cut_by_unit
from simulator.lowering.passes.gather_units import gather_units
from simulator.lowering.passes.reduce_gradients import reduce_gradients
from simulator.models.weight_names import WORDS
from simulator.operations.weights import elements
from tests.support.frameworks import PYTORCH
from tests.support.lanes import pipeline_passes, rank, read, step_called, write
from tests.support.passes import ALL_REDUCED, AT_THE_END, FORWARD_AND_BACKWARD, SHORT, TWO_RANKS, lines, same


@pytest.mark.parametrize("change", PASSES, ids=lambda change: change.__name__)
def test_a_pass_leaves_the_lanes_that_it_is_given_alone(change: Any) -> None:
    """Passes are pure: of a job in which most passes have work, the lanes before are the same after the call."""
    context = rank(
        dp=2, pp=2, zero=1, model={"layers": 2}, training={"global_batch": 4}, offload={"activations": "cpu"}
    )
    lanes = pipeline_passes(context)
    for earlier in PASSES[: PASSES.index(change)]:
        lanes = earlier(lanes, context)
    before = write(lanes, places=True, memory=True)
    change(lanes, context)
    assert write(lanes, places=True, memory=True) == before


def test_one_gpu_computes_and_updates_its_weights() -> None:
    """A job without another rank has nothing to reduce or gather: passes add the optimizer alone."""
    context = rank(model={"layers": 2}, training={"global_batch": 1, "grad_clip": None})
    lanes = apply_passes(pipeline_passes(context), context)
    assert same(lanes, "lane compute\n step 0F0\n step 0B0\n step optimizer")


# ZeRO-3


def test_passes_are_cut_by_layer_and_what_is_beside_them() -> None:
    """Embedding, two layers, final norm with head; backward the same from the end. The last piece has the label of the
    whole, which others wait for."""
    context = rank(dp=2, zero=3, **SHORT)
    assert same(
        cut_by_unit(pipeline_passes(context), context),
        """
        lane compute
          step 0F0.0
          step 0F0.1
          step 0F0.2
          step 0F0
          step 0B0.0
          step 0B0.1
          step 0B0.2
          step 0B0
        """,
    )


def test_pieces_whose_activations_are_offloaded_take_the_bytes_of_their_gradients() -> None:
    """One micro-batch makes each gradient once, in fp32: 4 bytes of every parameter, the root's among them."""
    context = rank(dp=2, zero=3, offload={"activations": "cpu"}, **SHORT)
    passes = pipeline_passes(context)
    whole, apart = (
        sum(step.alloc_bytes for step in lanes["compute"]) for lanes in (passes, cut_by_unit(passes, context))
    )
    assert apart - whole == pytest.approx(4.0 * elements(context.weights))


def test_torch_copies_what_it_gathers_in_steps_before_each_piece() -> None:
    """Forward each piece has its copies; backward layers do, and the root, which is still whole, does not."""
    context = rank(dp=2, zero=3, framework=PYTORCH, **SHORT)
    cut = cut_by_unit(pipeline_passes(context), context)
    copies = [step.label for step in cut["compute"] if step.label.endswith(" copies")]
    assert copies == [f"{piece} copies" for piece in ("0F0.0", "0F0.1", "0F0.2", "0F0", "0B0.1", "0B0.2")]


def test_units_are_gathered_one_ahead() -> None:
    """Of two layers both are there or on their way while the first computes, one being ahead: forward neither waits.
    They are given up after their forward pass. Backward the last layer, piece 0B0.1, is gathered again once its
    last use has ended. The first, 0B0.2, may be gathered beside that, once the head, the piece before, has ended; its
    own last use was 0F0.1. The root stays whole in between."""
    context = rank(dp=2, zero=3, **SHORT)
    lanes = gather_units(cut_by_unit(pipeline_passes(context), context), context)
    waits = {step.label: step.after for steps in lanes.values() for step in steps if step.after}
    assert waits == {
        "0F0.0": ("gather 0F0 root",),
        "0F0.1": ("gather 0F0.1",),
        "0F0.2": ("gather 0F0.2",),
        "0B0.1": ("gather 0B0.1",),
        "0B0.2": ("gather 0B0.2",),
        "gather 0B0.1": ("0F0.2",),
        "gather 0B0.2": ("0B0.0", "0F0.1"),
    }


def test_gradients_of_units_are_reduced_as_they_are_made() -> None:
    """Two layers and the root. While one reduction moves, the next gradients are made: 0B0, the piece after layer
    0B0.2, waits for the reduction of layer 0B0.1, so that at most two sets of gradients are alive."""
    context = rank(dp=2, zero=3, **SHORT)
    lanes = reduce_gradients(gather_units(cut_by_unit(pipeline_passes(context), context), context), context)
    assert {step.label: step.after for step in lanes["dp"]} == {
        "reduce 0B0.1": ("0B0.1",),
        "reduce 0B0.2": ("0B0.2",),
        "reduce 0B0 root": ("0B0",),
    }
    assert step_called(lanes, "0B0").after == ("reduce 0B0.1",)


def test_torch_gathers_for_the_next_micro_batch_after_the_last_reduction() -> None:
    """``finalize_backward`` waits for the root's reduction: no gather of the second forward pass begins before."""
    context = rank(
        dp=2, zero=3, framework=PYTORCH, model={"layers": 2}, training={"global_batch": 4, "grad_clip": None}
    )
    lanes = reduce_gradients(gather_units(cut_by_unit(pipeline_passes(context), context), context), context)
    second = [step for step in lanes["dp_gather"] if step.label.startswith("gather 0F1")]
    assert len(second) == 3
    assert all("reduce 0B0 root" in step.after for step in second)


# Reductions


def test_gradients_are_reduced_after_all_passes() -> None:
    """Data parallelism without overlap: one all-reduce of all gradients, 4 bytes each, once the last backward ended."""
    context = rank(dp=2, overlap=AT_THE_END, **SHORT)
    nbytes = 4.0 * elements(context.weights)
    assert same(
        reduce_gradients(read(FORWARD_AND_BACKWARD), context),
        f"""
        lane compute
          step 0F0
          step 0B0
        lane dp
          step 'reduce grads' after=0B0
            comm 'dp.all_reduce grads' all_reduce nbytes={nbytes} axis=dp purpose=dp
        """,
    )


def test_instances_reduce_their_shards_once_more() -> None:
    """hsdp 2 of 4 ranks: a reduce-scatter within the 2 of an instance, and an all-reduce of its half across."""
    context = rank(dp=4, zero=1, hsdp=2, overlap=AT_THE_END, model={"layers": 2}, training={"global_batch": 4})
    nbytes = 4.0 * elements(context.weights)
    lanes = reduce_gradients(read(FORWARD_AND_BACKWARD), context)
    assert lines(write({"dp": lanes["dp"], "dp_replica": lanes["dp_replica"]})) == lines(
        f"""
        lane dp
          step 'reduce grads' after=0B0
            comm 'dp.reduce_scatter grads' reduce_scatter nbytes={nbytes} axis=dp_shard purpose=dp
        lane dp_replica
          step 'reduce grads shard' after='reduce grads'
            comm 'dp.all_reduce shards' all_reduce nbytes={nbytes / 2} axis=dp_replica purpose=dp stream=replica
        """
    )


def test_buckets_reduce_beside_the_last_backward_pass() -> None:
    """Two micro-batches, buckets that any weight fills: the first backward pass stays whole, the second is cut, and
    each piece is followed by the reduction of its weights, which add up to all of them."""
    context = rank(dp=2, bucket_bytes=1, model={"layers": 2}, training={"global_batch": 4})
    lanes = reduce_gradients(pipeline_passes(context), context)
    whole, cut = (
        [step.label for step in lanes["compute"] if step.phase == "B" and step.microbatch == number]
        for number in (0, 1)
    )
    assert whole == ["0B0"]
    assert cut == [*(f"0B1.{number}" for number in range(len(cut) - 1)), "0B1"]
    assert [step.after for step in lanes["dp"]] == [(label,) for label in cut]
    assert sum(step.op.nbytes for step in lanes["dp"]) == 4 * elements(context.weights)  # type: ignore[union-attr]


# Copies of parameters


def test_both_ends_of_a_pipeline_sum_the_tied_table() -> None:
    """The first rank has the table, 4 bytes a gradient; it is summed once the rank's own reduction is done."""
    context = rank(overlap=AT_THE_END, **TWO_RANKS)
    table = next(weight for weight in context.weights if weight.name == WORDS)
    assert same(
        add_tied_gradients(read(ALL_REDUCED), context),
        f"""
        lane compute
          step 0F0
          step 0B0
          step 'embedding grads' after='reduce grads'
            comm 'pp.all_reduce embedding grads' all_reduce nbytes={4.0 * table.elements} axis=embd purpose=pp
        lane dp
          step 'reduce grads' after=0B0
            comm 'dp.all_reduce grads' all_reduce nbytes=1024.0 axis=dp purpose=dp
        """,
    )


def test_a_rank_in_the_middle_has_no_table() -> None:
    context = rank(1, **(TWO_RANKS | {"pp": 4, "model": {"layers": 4}}))
    lanes = read(ALL_REDUCED)
    assert add_tied_gradients(lanes, context) == lanes


def test_two_ranks_with_the_same_stages_sum_their_gradients() -> None:
    """DualPipe: both directions' copies of a rank's stages are summed, 4 bytes a gradient, after its own reduction."""
    context = rank(pp=2, dp=2, vpp=1, schedule="dualpipe", model={"layers": 4}, training={"global_batch": 16})
    lanes = add_twin_gradients(read(ALL_REDUCED), context)
    nbytes = 4.0 * elements(context.weights)
    assert lines(write({"compute": lanes["compute"][-1:]})) == lines(
        f"""
        lane compute
          step 'twin grads' after='reduce grads'
            comm 'dp.all_reduce twin grads' all_reduce nbytes={nbytes} axis=twin purpose=dp
        """
    )
