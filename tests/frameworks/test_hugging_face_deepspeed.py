"""DeepSpeed's ZeRO around Hugging Face's models: what is sent, copied and checked, counted by hand from its source."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.api import run
from simulator.config import Workload, load_workload
from simulator.costs.launch import issued
from simulator.errors import InputError
from simulator.frameworks.framework import ReducedGradients
from simulator.frameworks.zero_kernels import kernels
from simulator.lowering import build_program
from simulator.models import host_update_bytes, made_gradient_bytes, optimizer_ops, rank_parts, weights_of
from simulator.operations.nodes import Op
from simulator.program import Block, Collective, CollectiveKind, Compute, HostKind, HostOperation, Memory, Role

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 3, 256, 4, 2, 512, 1000
#: Queries and output, keys and values, three products of the MLP, and two norms.
LAYER = 2 * HIDDEN**2 + 2 * HIDDEN * 128 + 3 * HIDDEN * FFN + 2 * HIDDEN
TABLE = VOCAB * HIDDEN
PARAMETERS = TABLE + LAYERS * LAYER + HIDDEN
#: Nine tensors of a layer, the table and the last norm.
TENSORS = 9 * LAYERS + 2
LLAMA: dict[str, Any] = {
    **{"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": 64, "ffn_hidden": FFN},
    **{"vocab": VOCAB, "activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False},
    "tied_embeddings": True,
}


def load(zero: int = 2, dp: int = 2, passes: int = 1, model: dict[str, Any] | None = None, **changes: Any) -> Workload:
    """``changes`` are keys of ``parallelism``, or of ``training`` with that before two underscores."""
    training = {"seq": 128, "micro_batch": 2, "global_batch": 2 * dp * passes, "grad_clip": 1.0}
    training |= {key.removeprefix("training__"): changes.pop(key) for key in [*changes] if key.startswith("training__")}
    return load_workload(
        {
            "name": "small",
            "model": LLAMA | (model or {}),
            "training": training,
            "parallelism": {"dp": dp, "zero": zero, **changes},
            "framework": "hugging_face_deepspeed",
            "cluster": {"name": "hgx_h200_8gpu", "node": {"host_memory_bandwidth_Bps": 600e9}},
        }
    )


def role(workload: Workload) -> Role:
    return next(iter(build_program(workload).roles))


def collectives(ranks_role: Role, lane: str) -> list[Collective]:
    return [step.op for step in ranks_role.lanes.get(lane, ()) if isinstance(step.op, Collective)]


def memory_ops(ops: tuple[Op, ...]) -> list[tuple[str, str, float, float, int]]:
    """Name, class, bytes read and written, and launches of each kernel."""
    return [
        (op.name, op.kernel.op, op.kernel.read_bytes, op.kernel.write_bytes, op.kernel.launches)
        for op in ops
        if isinstance(op, Compute) and isinstance(op.kernel, Memory)
    ]


# --- what is sent ---


@pytest.mark.parametrize(("zero", "passes"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_gradients_are_all_reduced_whole(zero: int, passes: int) -> None:
    """Each rank needs half of them, but all go round in bf16: of the last micro-batch up to stage 1, of each from 2."""
    ops = collectives(role(load(zero, passes=passes)), "dp")
    assert {op.op for op in ops} == {CollectiveKind.ALL_REDUCE}
    assert sum(op.nbytes for op in ops) == 2 * PARAMETERS * (passes if zero == 2 else 1)


def test_stage_3_scatters() -> None:
    ops = collectives(role(load(3)), "dp")
    assert {op.op for op in ops} == {CollectiveKind.REDUCE_SCATTER}
    assert sum(op.nbytes for op in ops) == 2 * PARAMETERS


@pytest.mark.parametrize("zero", [1, 2])
def test_nothing_is_sent_beside_computation(zero: int) -> None:
    """Every step of computation behind a reduction waits for it, and the gather of parameters ends the step."""
    lanes = role(load(zero)).lanes
    compute = list(lanes["compute"])
    (gather,) = lanes["dp_gather"]
    assert compute[-1].label in gather.after
    for reduction in lanes["dp"]:
        behind = [step for step in compute if reduction.label in step.after]
        maker = next(number for number, step in enumerate(compute) if step.label in reduction.after)
        assert compute[maker + 1] == behind[0]
    overlap = load(zero).parallelism.overlap
    assert not (overlap.grad_reduce)
    assert not (overlap.param_gather)


@pytest.mark.parametrize(
    "trained",
    [{}, {"training__adapters": {"rank": 16, "targets": ["q"]}}, {"training__freeze": ["layers"]}],
    ids=["all", "adapters", "ends"],
)
def test_layers_are_gathered_ahead_as_long_as_live_parameters_allow(trained: dict[str, Any]) -> None:
    """Table and last norm take 262 million of 1e9, a layer of a Llama of 1.2 billion 60.8: 12 fit, one is in use.

    Frozen parameters are alive as others are."""
    sizes = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn_hidden": 8192, "vocab": 128256}
    lanes = role(load(3, model=sizes, **trained)).lanes
    waits = {step.label: step.after for step in lanes["dp_gather"]}
    assert waits["gather 0F0.12"] == waits["gather 0F0.1"]  # 11 ahead of layer 1, which piece 1 is, behind the table
    assert "0F0.1" in waits["gather 0F0.13"]


def test_hooks_run_around_every_module() -> None:
    """Nine modules of a layer have weights; the layer, its attention, its MLP and the activation have none: 13."""
    workload = load(3)
    gathers = [op for op in collectives(role(workload), "dp_gather") if op.nbytes == 2 * LAYER]
    assert len(gathers) == 2 * LAYERS
    assert {op.hooks for op in gathers} == {13}
    assert issued(gathers[0], "F") == {"gather": 1, "hook": 13}
    assert {op.hooks for op in collectives(role(load(1)), "dp_gather")} == {0}


# --- kernels ---


def test_copies_around_a_reduction() -> None:
    """All gradients go into the bucket and are divided by 2. The one bucket has parts for both ranks, and is joined.

    Each rank copies its half of the sum."""
    lanes = role(load(1)).lanes
    copies = {step.label: step.op for step in lanes["compute"] if "reduce grads" in step.label}
    into, back = copies["copy reduce grads"], copies["copy back reduce grads"]
    assert isinstance(into, Block)
    assert isinstance(back, Block)
    nbytes = 2.0 * PARAMETERS
    assert memory_ops(into.ops) == [
        ("dp.copy grads", "copy", nbytes, nbytes, TENSORS),
        ("dp.scale grads", "activation", nbytes, nbytes, 1),
        ("dp.join grads", "copy", nbytes, nbytes, 1),
    ]
    assert memory_ops(back.ops) == [("dp.copy back grads", "copy", nbytes / 2, nbytes / 2, TENSORS)]


def test_few_buckets_have_parts_for_two_ranks() -> None:
    """The cut between two ranks goes through one bucket: with a tenth of the gradients a bucket, a tenth is joined."""
    lanes = role(load(1, bucket_bytes=PARAMETERS // 5)).lanes
    into = next(step.op for step in lanes["compute"] if step.label == "copy reduce grads")
    assert isinstance(into, Block)
    assert memory_ops(into.ops)[-1][2] == pytest.approx(0.2 * PARAMETERS, rel=1e-5)


def test_checks_and_norm_of_stage_2() -> None:
    """4 tensors have 100 elements in bf16. The search for the highest and the lowest value reads all 200 bytes. 11
    kernels on one number follow for each tensor. The norm reads a copy in fp64. Flat copies are in bf16 and fp32."""
    work = kernels(ReducedGradients(elements=100, tensors=4, element_bytes=2, zero=2, passes=1, alone=False))
    assert memory_ops(work.check) == [
        ("optimizer.highest", "reduce", 200, 16, 4),
        ("optimizer.lowest", "reduce", 200, 16, 4),
        ("optimizer.finite", "activation", 176, 176, 44),
    ]
    assert memory_ops(work.norm) == [
        ("optimizer.norm cast", "upcast", 200, 800, 4),
        ("optimizer.norm", "reduce", 800, 32, 4),
    ]
    assert memory_ops(work.ready) == [
        ("optimizer.flatten", "copy", 200, 200, 1),
        ("optimizer.gradients to fp32", "upcast", 200, 400, 1),
    ]
    assert memory_ops(work.clip) == [("optimizer.clip", "strided", 400, 400, 1)]


def test_stage_3_compares_all_gradients_at_once() -> None:
    """Magnitudes are compared with infinity, values with themselves: a byte for the answer of each, and all of them."""
    work = kernels(ReducedGradients(elements=100, tensors=4, element_bytes=2, zero=3, passes=1, alone=False))
    assert [(name, read, written) for name, _, read, written, _ in memory_ops(work.check)] == [
        ("optimizer.magnitude", 200, 200),
        ("optimizer.infinite", 200, 100),
        ("optimizer.any infinite", 100, 1),
        ("optimizer.not a number", 200, 100),
        ("optimizer.any not a number", 100, 1),
    ]


def test_one_rank_copies_too() -> None:
    """Into a bucket and out of it, in each of three passes: 600 bytes of 100 elements."""
    work = kernels(ReducedGradients(elements=100, tensors=4, element_bytes=2, zero=2, passes=3, alone=True))
    names = {name: (read, launches) for name, _, read, _, launches in memory_ops(work.check[:3])}
    assert names == {
        "optimizer.copy to bucket": (600, 12),
        "optimizer.scale": (600, 1),
        "optimizer.copy from bucket": (600, 12),
    }


@pytest.mark.parametrize(("zero", "copies"), [(1, 1), (2, 3), (3, 3)])
def test_gradients_are_copied_once_a_step_or_once_a_micro_batch(zero: int, copies: int) -> None:
    """ZeRO-1 keeps gradients whole until the step ends; of three micro-batches, the other stages hand on each's."""
    workload = load(zero, dp=1, passes=3)
    ops = memory_ops(optimizer_ops(workload, weights_of(rank_parts(workload, 0))))
    (read,) = [read for name, _, read, _, _ in ops if name == "optimizer.copy to bucket"]
    assert read == copies * 2 * PARAMETERS


@pytest.mark.parametrize("dp", [1, 2])
def test_the_host_reads_whether_gradients_are_finite_and_their_norm(dp: int) -> None:
    """Twice nothing more is issued before the answer is there; the kernels that clear buffers are none."""
    ops = optimizer_ops(load(2, dp), weights_of(rank_parts(load(2, dp), 0)))
    waits = [op.name for op in ops if isinstance(op, Compute | Collective) and op.host_waits]
    alone = ["optimizer.finite", "optimizer.norm"]
    assert waits == (alone if dp == 1 else ["dp.all_reduce found_inf", "dp.all_reduce grad norm"])
    assert not any("zero" in op.name for op in ops if isinstance(op, Compute))


def test_the_rank_with_most_tensors_counts() -> None:
    """All weights in a row are cut in two, within a layer, as the table is less than half. One rank has the table and a
    part of the layers. The other has the rest of the layers and the last norm."""
    ops = optimizer_ops(load(2), weights_of(rank_parts(load(2), 0)))
    launches = next(op[-1] for op in memory_ops(ops) if op[0] == "optimizer.highest")
    assert TENSORS / 2 < launches <= TENSORS
    assert (
        next(op[-1] for op in memory_ops(optimizer_ops(load(3), weights_of(rank_parts(load(3), 0)))) if "norm" in op[0])
        == TENSORS
    )


# --- memory ---


@pytest.mark.parametrize(("zero", "element_bytes"), [(1, 2.0), (2, 1.0), (3, 0.0)])
def test_gradients_that_live_within_a_step(zero: int, element_bytes: float) -> None:
    """Stage 1 has all of them in bf16, stage 2 the half that stays. Stage 3 has a buffer all the time."""
    workload = load(zero)
    assert made_gradient_bytes(workload, weights_of(rank_parts(workload, 0))) == element_bytes * PARAMETERS


def test_static_memory() -> None:
    """Two ranks. Weights in bf16; masters and two states in fp32 for half of them. Stage 3 has half the weights, half
    the gradients, and a bucket of 5e8 bf16 elements, whatever the model."""
    early, late = (run(load(zero)).memories[0].static for zero in (2, 3))
    assert early.state.weights + early.state.optimizer == 2 * PARAMETERS + 12 * PARAMETERS / 2
    assert (early.gradients, early.bucket) == (0, 0)
    assert late.state.total == 16 * PARAMETERS / 2
    assert late.bucket == 1e9


# --- the host ---


def test_gradients_go_to_the_host_in_fp32() -> None:
    """A half of them each: 4 bytes. The update scales them (read and written), reads them for Adam with weights and
    states (12 bytes, written too), and copies weights to 16 bits: 8 + 4 + 24 + 6 = 42 bytes a parameter."""
    workload = load(2, offload={"optimizer": "cpu"}, training__optimizer={"name": "adamw"})
    steps = [step for _, _, step in role(workload).steps()]
    copies = [step.op for step in steps if isinstance(step.op, HostOperation) and step.op.op == HostKind.TO_HOST]
    assert sum(op.nbytes for op in copies) == 4 * PARAMETERS / 2
    assert host_update_bytes(workload) == 42


# --- limits ---


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"zero": 0}, "parallelism.zero"),
        ({"zero": 3, "prefetch": 2}, "parallelism.prefetch"),
        ({"zero": 3, "reshard_after_forward": False}, "parallelism.reshard_after_forward"),
        ({"zero": 2, "overlap": {"grad_reduce": True}}, "parallelism.overlap.grad_reduce"),
        ({"dp": 4, "hsdp": 2}, "parallelism.hsdp"),
        ({"training__grad_dtype": "fp32"}, "training.grad_dtype"),
        ({"training__optimizer": {"master_weights": False}}, "training.optimizer.master_weights"),
    ],
)
def test_limits(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        load(**changes)
    assert key in str(caught.value)


def test_fp32_is_refused_once() -> None:
    """Weights without a copy and gradients in fp32 follow from it, and have no errors of their own."""
    with pytest.raises(InputError) as caught:
        load(training__precision="fp32")
    assert caught.value.key == "training.precision"


def test_hooks_of_a_single_rank_run_before_each_layer() -> None:
    """Stage 3 on one GPU gathers nothing, and its hooks run all the same. A layer has seven linear layers, two norms,
    and four modules without weights; the root has the words, a norm and the head, and those four. Layers are given up
    after their forward pass, so that hooks fetch them once more. The root is not: 2 * 3 * (7 + 2 + 4) + 3 + 4 = 85.
    """
    steps = [step for lane in role(load(zero=3, dp=1)).lanes.values() for step in lane]
    assert sum(step.hooks for step in steps) == 85
    assert [step.hooks for step in steps if step.phase == "F"][:2] == [7, 13]
    assert not any(isinstance(step.op, Collective) for step in steps)
    assert not any(step.hooks for lane in role(load(zero=3, dp=2)).lanes.values() for step in lane)
