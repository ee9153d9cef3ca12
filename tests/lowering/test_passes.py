"""Each pass of lowering turns the text of a rank's lanes into another text."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.lowering.lanes import Lanes
from simulator.lowering.passes import PASSES, apply_passes
from simulator.lowering.passes.add_copies import add_tied_gradients, add_twin_gradients
from simulator.lowering.passes.compress_gradients import compress_gradients
from simulator.lowering.passes.cut_by_unit import cut_by_unit
from simulator.lowering.passes.gather_parameters import gather_parameters
from simulator.lowering.passes.gather_units import gather_units
from simulator.lowering.passes.offload_activations import offload_activations
from simulator.lowering.passes.reduce_gradients import reduce_gradients
from simulator.lowering.passes.update_on_host import move_parameters_out, update_on_host
from simulator.lowering.passes.update_weights import free_input_gradients, update_weights
from simulator.models.weight_names import WORDS
from simulator.operations.weights import elements
from tests.support.frameworks import PYTORCH
from tests.support.lanes import pipeline_passes, rank, read, step_called, write

#: Two layers, so that texts are short.
SHORT: dict[str, Any] = {"model": {"layers": 2}, "training": {"global_batch": 2, "grad_clip": None}}
#: Two pipeline ranks of a layer each, with two micro-batches; the table is tied and at both ends.
TWO_RANKS: dict[str, Any] = {
    "model": {"layers": 2},
    "training": {"global_batch": 4, "grad_clip": None},
    "pp": 2,
    "dp": 2,
}
AT_THE_END = {"grad_reduce": False, "param_gather": False}

FORWARD_AND_BACKWARD = """
  lane compute
    step 0F0 block=0 phase=F microbatch=0 stage=0
    step 0B0 block=0 phase=B microbatch=0 stage=0
"""
ALL_REDUCED = f"""{FORWARD_AND_BACKWARD}
  lane dp
    step "reduce grads" after=0B0
      comm "dp.all_reduce grads" all_reduce nbytes=1024 axis=dp purpose=dp
"""
REDUCE_SCATTERED = ALL_REDUCED.replace("all_reduce", "reduce_scatter")
ON_HOST = f"""{ALL_REDUCED}
  lane d2h_grads
    step "reduce grads to host" after="reduce grads"
      comm "offload.grads to host" to_host nbytes=1024 axis=rank purpose=offload stream=grads
"""
UPDATED = """
    step optimizer block=0 phase=O
"""


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def same(lanes: Lanes, text: str) -> bool:
    """Return True where the lanes are as in the text, whose places of passes and bytes held are left out."""
    assert lines(write(lanes)) == lines(text)
    return True


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


# The optimizer


def test_the_optimizer_waits_for_gradients_and_for_the_host_of_blocking_transfers() -> None:
    """A blocking batch holds the host up, and so all that follows the pipeline."""
    pipeline = """
      lane pp
        step 0SEND_F0 batch=1 after=0F0
          comm send_fwd send nbytes=64 axis=pp purpose=pp peer=1 tag=0F0
    """
    lanes = update_weights(read(ALL_REDUCED + pipeline), rank(overlap=AT_THE_END, **TWO_RANKS))
    assert step_called(lanes, "optimizer").after == ("0SEND_F0", "reduce grads")


def test_ranks_agree_beside_the_next_step_without_optimizer_sync() -> None:
    """The norm of all stages' gradients is summed on a lane of its own; the optimizer's block has no such sum."""
    norm = TWO_RANKS | {"training": {"global_batch": 4, "grad_clip": 1.0}}
    for sync in (True, False):
        lanes = update_weights(read(ALL_REDUCED), rank(optimizer_sync=sync, **norm))
        block = step_called(lanes, "optimizer").op
        agreed = [comm.axis for comm in block.comms]  # type: ignore[union-attr]
        assert agreed == (["mp"] if sync else [])
        assert [step.label for step in lanes.get("mp", ())] == ([] if sync else ["validate mp.all_reduce grad norm"])


def test_gradients_of_inputs_are_freed_once_a_pass() -> None:
    """Torch keeps the gradient of a split pass's input until the step ends. A pass that is cut counts once."""
    context = rank(1, schedule="zb_h1", framework=PYTORCH, **TWO_RANKS)
    cut = """
      lane compute
        step 1I0.0 block=0 phase=I microbatch=0 stage=1
        step 1I0 block=0 phase=I microbatch=0 stage=1
        step 1I1 block=0 phase=I microbatch=1 stage=1
        step 1W1 block=0 phase=W microbatch=1 stage=1
    """
    each = context.stages.variants.parts[1][0].input_gradient_bytes
    lanes = free_input_gradients(read(cut), context)
    assert each > 0
    assert [step.free_bytes for step in lanes["compute"]] == [0.0, 0.0, 0.0, 2 * each]


# Hosts


def test_the_host_updates_each_share_and_copies_it_back() -> None:
    """1,024 bytes of fp32 gradients are 256 parameters: 512 bytes of bf16 weights go back. Without clipping and with
    gradients on the host nothing is left on the GPU, so the update follows the backward pass and the copy."""
    context = rank(dp=2, offload={"optimizer": "cpu"}, **SHORT)
    lanes = update_on_host(read(ON_HOST), context)
    update = step_called(lanes, "update 0")
    assert update.after == ("reduce grads to host", "0B0", "reduce grads", "reduce grads to host")
    assert lines(write({"h2d_params": lanes["h2d_params"]})) == lines(
        """
        lane h2d_params
          step 'params in 0' after='update 0'
            comm 'offload.params to GPU' from_host nbytes=512.0 axis=rank purpose=offload stream=params
        """
    )


def test_gradients_of_two_micro_batches_are_updated_once() -> None:
    """What the CPU has added to the first micro-batch's gradients is one share, ready when it is added."""
    both = """
      lane dp
        step "reduce 0B0.1" after=0B0
          comm "dp.reduce_scatter grads" reduce_scatter nbytes=1024 axis=dp purpose=dp
        step "reduce 0B1.1" after=0B0
          comm "dp.reduce_scatter grads" reduce_scatter nbytes=1024 axis=dp purpose=dp
      lane d2h_grads
        step "reduce 0B0.1 to host" after="reduce 0B0.1"
          comm "offload.grads to host" to_host nbytes=512 axis=rank purpose=offload stream=grads
        step "reduce 0B1.1 to host" after="reduce 0B1.1"
          comm "offload.grads to host" to_host nbytes=512 axis=rank purpose=offload stream=grads
      lane cpu
        step "reduce 0B1.1 added" after="reduce 0B1.1 to host" after="reduce 0B0.1 to host"
          comm "offload.add grads" host_update nbytes=1536 axis=rank purpose=optimizer
    """
    context = rank(dp=2, zero=2, offload={"optimizer": "cpu"}, **SHORT)
    lanes = update_on_host(read(FORWARD_AND_BACKWARD + both), context)
    updates = [step for step in lanes["cpu"] if step.label.startswith("update")]
    assert [step.after[0] for step in updates] == ["reduce 0B1.1 added"]


def test_parameters_that_live_on_drives_go_there_by_way_of_the_host() -> None:
    """The GPU updates its half of bf16 parameters, copies it out, and the host writes it."""
    context = rank(dp=2, zero=3, offload={"parameters": "nvme"}, **SHORT)
    lanes = move_parameters_out(read(FORWARD_AND_BACKWARD + UPDATED), context)
    nbytes = 2.0 * elements(context.weights) / 2
    assert lines(write({lane: steps for lane, steps in lanes.items() if lane != "compute"})) == lines(
        f"""
        lane d2h
          step 'params out' after=optimizer
            comm 'offload.params to host' to_host nbytes={nbytes} axis=rank purpose=offload
        lane nvme_write_params
          step 'params to drive' after='params out'
            comm 'offload.params to drive' to_nvme nbytes={nbytes} axis=rank purpose=offload stream=params
        """
    )


def test_layers_save_to_the_host_and_load_for_their_backward_pass() -> None:
    """Layers are parts 1 and 2 of the stage. What each saves goes out after its forward pass and comes back for its
    backward pass, the last layer's first."""
    context = rank(offload={"activations": "cpu"}, model={"layers": 2}, training={"global_batch": 1})
    lanes = offload_activations(pipeline_passes(context), context)
    saves, loads = lanes["d2h_activations"], lanes["h2d_activations"]
    assert [load.after[0] for load in loads] == [save.label for save in reversed(saves)]
    assert [save.after for save in saves] == [(save.label.removeprefix("save "),) for save in saves]
    assert len(saves) == len(loads) == 2


# Parameters


@pytest.mark.parametrize("zero", [1, 2])
def test_parameters_are_gathered_after_the_optimizer(zero: int) -> None:
    context = rank(dp=2, zero=zero, overlap=AT_THE_END, **SHORT)
    nbytes = 2.0 * elements(context.weights)
    lanes = gather_parameters(read(FORWARD_AND_BACKWARD + UPDATED), context)
    assert lines(write({"dp_gather": lanes["dp_gather"]})) == lines(
        f"""
        lane dp_gather
          step 'gather 0' after=optimizer
            comm 'dp.all_gather params' all_gather nbytes={nbytes} axis=dp purpose=dp stream=gather
        """
    )


def test_parameters_are_gathered_after_the_hosts_copies() -> None:
    """Where the host updates them, the GPU has its shard once that has been copied in."""
    context = rank(dp=2, zero=1, overlap=AT_THE_END, offload={"optimizer": "cpu"}, **SHORT)
    lanes = gather_parameters(update_on_host(read(ON_HOST), context), context)
    assert step_called(lanes, "gather 0").after == ("params in 0",)


def test_parameters_are_gathered_beside_the_first_forward_pass_alone() -> None:
    """Two micro-batches, buckets that any weight fills: pieces of the first forward pass wait for a gather each."""
    context = rank(dp=2, zero=1, bucket_bytes=1, model={"layers": 2}, training={"global_batch": 4})
    lanes = gather_parameters(pipeline_passes(context), context)
    gathers = [step.label for step in lanes["dp_gather"]]
    forward = [step for step in lanes["compute"] if step.phase == "F"]
    assert [step.after for step in forward] == [*((label,) for label in gathers), ()]
    assert len(gathers) > 2


# Compression


def test_gradients_are_packed_before_and_unpacked_after_their_reduction() -> None:
    """fp8 from fp32: 1,024 bytes become 256. The optimizer waits for the reduction, and so what it waits for is
    unpacked before it."""
    context = rank(dp=2, grad_compression="fp8", overlap=AT_THE_END, **SHORT)
    waiting = UPDATED.replace("phase=O", 'phase=O after="reduce grads"')
    lanes = compress_gradients(read(ALL_REDUCED.replace("lane dp", f"{waiting}  lane dp")), context)
    assert same(
        lanes,
        """
        lane compute
          step 0F0
          step 0B0
          step 'pack reduce grads' after=0B0
          step 'unpack reduce grads' after='reduce grads'
          step optimizer after='reduce grads'
        lane dp
          step 'reduce grads' after='pack reduce grads'
            comm 'dp.all_reduce grads' all_reduce nbytes=256.0 axis=dp purpose=dp
        """,
    )


def test_a_sharded_sum_of_int8_is_an_exchange() -> None:
    """int8 cannot be added on the way: a reduce-scatter is an all-to-all of a quarter of the bytes, added up after."""
    context = rank(dp=2, zero=1, grad_compression="int8", overlap=AT_THE_END, **SHORT)
    lanes = compress_gradients(read(REDUCE_SCATTERED), context)
    assert [step.label for step in lanes["compute"]] == ["0F0", "0B0", "pack reduce grads", "add reduce grads"]
    assert lines(write({"dp": lanes["dp"]})) == lines(
        """
        lane dp
          step 'reduce grads' after='pack reduce grads'
            comm 'dp.all_to_all grads' all_to_all nbytes=256.0 axis=dp purpose=dp
        """
    )
