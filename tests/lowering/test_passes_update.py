"""Passes of lowering behind the gradients, text to text: the update, hosts and drives, gathering, compression."""

from __future__ import annotations

import pytest

from simulator.lowering.passes.compress_gradients import compress_gradients
from simulator.lowering.passes.gather_parameters import gather_parameters
from simulator.lowering.passes.offload_activations import offload_activations
from simulator.lowering.passes.update_on_host import move_parameters_out, update_on_host
from simulator.lowering.passes.update_weights import free_input_gradients, update_weights
from simulator.operations.weights import elements
from tests.support.frameworks import PYTORCH
from tests.support.lanes import pipeline_passes, rank, read, step_called, write
from tests.support.passes import ALL_REDUCED, AT_THE_END, FORWARD_AND_BACKWARD, SHORT, TWO_RANKS, lines, same

REDUCE_SCATTERED = ALL_REDUCED.replace("all_reduce", "reduce_scatter")

ON_HOST = f"""{ALL_REDUCED}
  lane d2h_grads
    step "reduce grads to host" after="reduce grads"
      comm "offload.grads to host" to_host nbytes=1024 axis=rank purpose=offload stream=grads
"""

UPDATED = """
    step optimizer block=0 phase=O
"""


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


def test_parameters_are_gathered_without_waiting_for_states_that_are_written_to_drives() -> None:
    """ZeRO-1: the gather behind an update needs the parameters on the GPU. Nobody reads the states before the next."""
    offload = {"optimizer": "nvme"}
    context = rank(dp=2, zero=1, offload=offload, overlap=AT_THE_END, **SHORT)
    lanes = gather_parameters(update_on_host(read(ON_HOST), context), context)
    assert step_called(lanes, "states out 0").after == ("update 0",)
    assert step_called(lanes, "gather 0").after == ("params in 0",)


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
