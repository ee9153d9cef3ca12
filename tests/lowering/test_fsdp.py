"""ZeRO-3 as FSDP does it: units gathered ahead of their pass, dropped after it, gradients reduced as they are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from simulator.analysis.time.memory_curve import memory_curve
from simulator.lowering import build_program
from simulator.models import rank_parts
from simulator.operations.weights import elements
from simulator.program import Block, Comm, Role, Step
from simulator.step_result import StepResult
from tests.support.grids import every_pair, grid
from tests.support.sharded import load, play

LAYERS = 8
BLOCKING = {"grad_reduce": False, "param_gather": False}
#: Wide enough that a layer computes about as long as it is gathered.
WIDE: dict[str, Any] = {"hidden": 1024, "heads": 16}
LONG = {"seq": 512, "global_batch": 16}


def spans(result: StepResult, rank: int = 0) -> pd.DataFrame:
    """Start and end of every step of a rank, indexed by label."""
    timeline = result.spans
    mine = timeline.rank == rank
    frame = pd.DataFrame(
        {
            "label": np.array(timeline.labels, dtype=object)[mine],
            "lane": np.array(timeline.lane_names, dtype=object)[timeline.lane[mine]],
            "start": timeline.start_s[mine],
            "end": timeline.end_s[mine],
        }
    )
    return frame.groupby("label", sort=False).agg({"lane": "first", "start": "min", "end": "max"})


def whole_layers(result: StepResult) -> int:
    """The most layers that are whole, or on their way, at one moment: from the start of a gather to the end of the pass
    that drops the layer (any pass, or the next backward pass without resharding)."""
    steps = spans(result)
    drops = result.workload.parallelism.reshard_after_forward
    changes: list[tuple[float, int]] = []
    for label, step in steps.iterrows():
        if not str(label).startswith("gather ") or str(label).endswith("root"):
            continue
        served = str(label).removeprefix("gather ")
        if not drops:  # layer k of LAYERS is part k + 1 of F, and part LAYERS - k of B
            stage, part = served.split(".")
            served = f"{stage.replace('F', 'B')}.{LAYERS + 1 - int(part)}"
        changes += [(step["start"], 1), (steps.loc[served, "end"], -1)]
    changes.sort()  # what ends at a moment is dropped before another is gathered
    return int(np.cumsum([change for _, change in changes]).max())


def of(result: StepResult) -> Role:
    return result.program.roles[0]


def steps_of(role: Role) -> dict[str, Step]:
    return {step.label: step for _, _, step in role.steps()}


@every_pair({"prefetch": [0, 1, 2, 3], "seq": [32, 512], "m": [1, 2]})
def test_at_most_one_and_prefetch_layers_are_whole(prefetch: int, seq: int, m: int) -> None:
    """While layer k computes, k + 1 to k + prefetch may be there or in flight: 1 + prefetch beside the root, whether
    gathers or computation are slower (32 tokens or 512); and the bound is reached where gathers are not what all
    wait for."""
    keys = {"dp": 4, "zero": 3, "prefetch": prefetch}
    result = play({"seq": seq, "global_batch": 4 * m}, WIDE, **keys)
    assert whole_layers(result) <= 1 + prefetch
    assert whole_layers(result) == 1 + prefetch or seq == 32


def test_without_resharding_all_layers_are_whole() -> None:
    result = play({"seq": 512, "global_batch": 4}, WIDE, dp=4, zero=3, reshard_after_forward=False)
    assert whole_layers(result) == LAYERS


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_memory_is_that_of_units_gradients_and_activations(prefetch: int) -> None:
    """Activations of 8 layers are those of ZeRO-1, and at the peak there is beside them: the root's parameters (2
    bytes) and gradients (4), the layers that are whole, and two sets of layer gradients, one made and one reduced. The
    peak is in the backward pass, when the root's gradients are there: more than activations and root, and no more than
    all of these."""
    result = play(LONG, WIDE, dp=4, zero=3, prefetch=prefetch)
    plain = play(LONG, WIDE, dp=4, zero=1)
    peaks = [memory_curve(one.spans, 0).held_bytes.max() for one in (result, plain)]
    parts = rank_parts(result.workload, 0)
    layer, root = (
        sum(elements(p.weights) for p in parts if (p.name == "layer") == is_layer) for is_layer in (True, False)
    )
    layer //= LAYERS
    extra = peaks[0] - peaks[1]
    assert 6 * root < extra <= 6 * root + (1 + prefetch) * 2 * layer + 2 * 4 * layer


def test_prefetching_hides_gathers() -> None:
    """Gathering one layer ahead exposes less than gathering each when it is needed, and more ahead does not hurt;
    without prefetching no other layer computes while one gathers."""
    steps, exposed = [], []
    for prefetch in (0, 1, 2):
        answer = play(LONG, WIDE, dp=4, zero=3, prefetch=prefetch).to_dict()
        steps.append(answer["step_time_s"])
        exposed.append(answer["communication"]["dp"]["exposed_s"])
    assert exposed[1] < 0.6 * exposed[0]
    assert steps[1] < steps[0]
    assert steps[2] <= steps[1] * (1 + 1e-9)
    # With prefetch 0, or overlap off, the first op of a layer waits for its gather, which waits for the layer before.
    for keys in ({"prefetch": 0}, {"overlap": {"param_gather": False}}):
        frame = spans(play(LONG, WIDE, dp=4, zero=3, **keys))
        computed = frame[frame["lane"] == "compute"].sort_values("start")
        layers = [label for label in frame.index if label.startswith("gather ") and not label.endswith("root")]
        for label in layers:
            begin, end = frame.loc[label, "start"], frame.loc[label, "end"]
            beside = computed[(computed["start"] < end - 1e-12) & (computed["end"] > begin + 1e-12)]
            assert all(other.endswith(".0") or "." not in other for other in beside.index)  # parts of the root


def test_without_overlap_nothing_computes_while_gradients_reduce() -> None:
    frame = spans(play(LONG, WIDE, dp=4, zero=3, overlap=BLOCKING))
    computed = frame[frame["lane"] == "compute"]
    for _, step in frame[frame["lane"] == "dp"].iterrows():
        beside = (computed["start"] < step["end"] - 1e-12) & (computed["end"] > step["start"] + 1e-12)
        assert not beside.any()
    overlapped = play(LONG, WIDE, dp=4, zero=3).to_dict()
    assert overlapped["step_time_s"] < frame["end"].max()


@every_pair({"framework": ["pytorch", "megatron_core"], "m": [1, 2], "prefetch": [0, 1, 2], "seq": [32, 512]})
def test_gathers_and_reductions_take_turns_on_one_communicator(framework: str, m: int, prefetch: int, seq: int) -> None:
    """NCCL runs what is issued on one communicator one after another. A gather is issued with the pass that it goes on
    beside, `prefetch` before its own, and before that one's reduction. In the backward pass of head and layers 7 to 0
    (g: a gather, r: the reduction of a layer) that is 1 + prefetch gathers, then r7, g, r6, g ..., and what is left."""
    keys = {"dp": 4, "zero": 3, "prefetch": prefetch}
    result = play({"seq": seq, "global_batch": 4 * m}, WIDE, framework, **keys)
    frame = spans(result)
    called = frame[frame["lane"].isin(["dp", "dp_gather"])].sort_values("start")
    assert (called["end"].to_numpy()[:-1] <= called["start"].to_numpy()[1:] + 1e-12).all()
    backward = [label for label in called.index if f"B{m - 1}" in label and not label.endswith("root")]
    ahead = 1 + prefetch
    order = ["g"] * ahead + ["r", "g"] * (LAYERS - ahead) + ["r"] * ahead
    assert "".join("g" if label.startswith("gather") else "r" for label in backward) == "".join(order)


@pytest.mark.parametrize(
    ("keys", "recompute"),
    grid([{}, {"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2, "schedule": "zb_v"}], ["none", "full"], every=2),
)
def test_what_is_computed_stays_the_same(keys: dict[str, Any], recompute: str) -> None:
    """Cutting passes by unit changes neither kernels nor their order, and no pass is lost."""
    training = {"recompute": recompute, "global_batch": 16}
    sharded, plain = (build_program(load(training, dp=2, zero=zero, **keys)) for zero in (3, 0))
    for ours, theirs in zip(sharded.roles, plain.roles, strict=True):
        ops, expected = (
            [
                op
                for step in role.lanes["compute"]
                if isinstance(step.op, Block) and step.phase != "O"
                for op in step.op.ops
            ]
            for role in (ours, theirs)
        )
        assert ops == expected
        passes, pieces = ({step.label for step in role.lanes["compute"]} for role in (theirs, ours))
        assert {label for label in passes if "." not in label} <= pieces


def test_order_of_a_micro_batch() -> None:
    """Root first, then layers in order; in the backward pass layers from the last, which are reduced as they are done,
    and the root at the end. The last forward layer is gathered anew (it has just been dropped), the root is not."""
    role = of(play({"global_batch": 4}, {"layers": 2}, dp=4, zero=3))
    assert [step.label for step in role.lanes["compute"]] == [
        *("0F0.0", "0F0.1", "0F0.2", "0F0"),
        *("0B0.0", "0B0.1", "0B0.2", "0B0"),
        "optimizer",
    ]
    assert [step.label for step in role.lanes["dp_gather"]] == [
        *("gather 0F0 root", "gather 0F0.1", "gather 0F0.2"),
        *("gather 0B0.1", "gather 0B0.2"),
    ]
    assert [step.label for step in role.lanes["dp"]] == ["reduce 0B0.1", "reduce 0B0.2", "reduce 0B0 root"]
    steps = steps_of(role)
    assert steps["0F0.0"].after == ("gather 0F0 root",)
    assert steps["gather 0B0.1"].after == ("0F0.2",)  # its own forward pass: it goes on beside the head
    assert steps["gather 0B0.2"].after == ("0B0.0", "0F0.1")  # when the head is done, beside the layer before
    assert steps["0B0"].after == ("reduce 0B0.1",)  # before a third set of gradients is made
    assert set(steps["optimizer"].after) == {"reduce 0B0.1", "reduce 0B0.2", "reduce 0B0 root"}


def test_a_split_backward_gathers_for_the_input_gradient_and_reduces_after_the_weights() -> None:
    """A weight gradient is a product of inputs and output gradients: W needs no parameters, and makes all gradients."""
    workload = load({"global_batch": 16}, dp=2, pp=2, zero=3, schedule="zb_h1")
    for role in build_program(workload).roles:
        gathers = [step.label.split()[1] for step in role.lanes["dp_gather"]]
        assert {label.split(".")[0][1] for label in gathers} == {"F", "I"}
        reduced = [label for step in role.lanes["dp"] for label in step.after if not label.startswith("gather")]
        kinds = {label.split(".")[0][1] for label in reduced}
        assert kinds == {"W"}


def test_a_table_that_two_stages_of_a_rank_share_is_one_unit() -> None:
    """zb_v puts embedding and tied projection on rank 0: one root, gathered with the table for the passes of both; the
    norm of the head goes with it."""
    workload = load({"global_batch": 16}, dp=2, pp=2, vpp=2, schedule="zb_v", zero=3)
    (role, other) = build_program(workload).roles
    parts = rank_parts(workload, 0)
    root = sum(elements(part.weights) for part in parts if part.name != "layer")
    gathers = [step for step in role.lanes["dp_gather"] if step.label.endswith("root")]
    assert {step.op.nbytes for step in gathers if isinstance(step.op, Comm)} == {2.0 * root}
    reductions = [step for step in role.lanes["dp"] if step.label.endswith("root")]
    assert len(reductions) == workload.microbatches
    assert not [step for step in other.lanes["dp_gather"] if step.label.endswith("root")]


def test_eager_gradients_are_cast_for_their_reduction() -> None:
    """Autograd, where no product adds to a buffer, makes gradients in 2 bytes, which become 4 when they are reduced."""
    for fusion, made, cast in ((True, 4, 0), (False, 2, 2)):
        training = {"gradient_accumulation_fusion": fusion, "global_batch": 4}
        role = build_program(load(training, dp=4, zero=3)).roles[0]
        (layer,) = {elements(part.weights) for part in rank_parts(load(dp=4), 0) if part.name == "layer"}
        steps = steps_of(role)
        saved = next(part.saved_bytes for part in rank_parts(load(dp=4), 0) if part.name == "layer")
        # A layer's gradients are there when its parameters and what it saved are given back.
        assert steps["0B0.2"].alloc_bytes - steps["0B0.2"].free_bytes == made * layer - 2 * layer - saved
        assert (steps["reduce 0B0.2"].alloc_bytes, steps["reduce 0B0.2"].free_bytes) == (cast * layer, 4 * layer)


def test_a_long_job_has_few_events() -> None:
    """80 layers and 8 micro-batches: 8 x (81 gathers forward, 80 backward, 81 reductions) meet once each. A
    communication costs about four events and a pass one more than what disturbs it: under 10 per step of a lane."""
    result = play({"global_batch": 64, "seq": 32}, {"layers": 80, "hidden": 64, "heads": 4}, dp=8, zero=3)
    steps = sum(1 for _ in of(result).steps())
    assert steps == 8 * (82 + 82 + 81 + 80 + 81) + 1
    assert result.spans.events < 10 * steps


@pytest.mark.parametrize(
    ("keys", "m", "kind"),
    grid(
        [{}, {"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2, "schedule": "zb_v"}, {"pp": 2, "schedule": "zb_h1"}],
        [1, 2],
        ["none", "full"],
        every=5,
    ),
)
def test_all_that_a_step_takes_is_given_back(keys: dict[str, Any], m: int, kind: str) -> None:
    """Parameters, gradients and activations come and go unit by unit; after the step none is left, and never less than
    none is held."""
    result = play({"global_batch": 8 * m, "recompute": kind}, dp=2, zero=3, **keys)
    for rank in result.spans.ranks:
        held = memory_curve(result.spans, rank).held_bytes
        assert abs(held[-1]) < 1e-6 * held.max()
        assert held.min() > -1e-6 * held.max()


@pytest.mark.parametrize("layers", [2, 8, 12])
@pytest.mark.parametrize("seq", [256, 1024])
def test_a_large_vocabulary_is_fullest_at_the_loss(layers: int, seq: int) -> None:
    """What the loss needs is no more needed when layers are whole: with a vocabulary of 64 hidden sizes most is held at
    the head's backward pass: state, all activations, the root's parameters and what the head's backward pass needs
    beside them; no layer's parameters or gradients, as the gather beside it takes memory after the loss.

    So it was on 2 H200s (calibration/results/runs): 15.51 GB beside the state, of which 11.45 of activations, 0.64 of
    the root and 3.36 of the head's backward pass (fsdp2_h3072_l12)."""
    training = {"seq": seq, "global_batch": 2, "grad_dtype": "fp32"}
    model = {"layers": layers, "vocab": 64 * 256, "hidden": 256, "heads": 4}
    result = play(training, model, "pytorch", dp=2, zero=3)
    parts = rank_parts(result.workload, 0)
    root = 2.0 * sum(elements(part.weights) for part in parts if not part.is_unit)
    head = parts[-1]
    (memory,) = result.memories[:1]
    saved = sum(part.saved_bytes for part in parts)
    assert memory.activations == pytest.approx(saved, rel=1e-9)
    assert memory.gathered + memory.step_gradients == pytest.approx(root, rel=1e-9)
    assert memory.workspace == pytest.approx(head.workspace_bytes, rel=1e-9)


def test_layers_are_fullest_where_their_parameters_outweigh_the_loss() -> None:
    """Few tokens: passes hold most when the first of eight layers computes backward, not at the loss.

    The layer has the buffer of its gather, parameters copied out of it, and their gradients, 2 bytes each. Gradients of
    the layer behind are reduced in fp32, 4 bytes. Seven layers have half of their gradients in fp32, which two ranks
    share. The root has parameters and gradients, 2 bytes each. Activations of one layer are a few KB beside that.
    """
    training = {"seq": 32, "global_batch": 2, "grad_dtype": "fp32"}
    result = play(training, {**WIDE, "layers": 8}, "pytorch", dp=2, zero=3)
    parts = rank_parts(result.workload, 0)
    layer = next(elements(part.weights) for part in parts if part.is_unit)
    root = sum(elements(part.weights) for part in parts if not part.is_unit)
    held = memory_curve(result.spans, 0).held_bytes
    assert held.max() == pytest.approx((2 + 2 + 2 + 4 + 7 * 4 / 2) * layer + (2 + 2) * root, rel=1e-4)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_shards_of_later_micro_batches_are_added(m: int) -> None:
    """The first micro-batch's reduced shard is the gradient; those of others are read with it and the sum written, 12
    bytes for each parameter of the shard (torch's ``foreach_reduce``)."""
    training = {"global_batch": 2 * m, "grad_dtype": "fp32"}
    frame = play(training, framework="pytorch", dp=2, zero=3).timeline
    added = frame[(frame["rank"] == 0) & (frame["name"] == "fsdp.accumulate")]
    params = sum(elements(part.weights) for part in rank_parts(load(dp=2), 0))
    assert added["nbytes"].sum() == pytest.approx((m - 1) * 12 * params / 2)


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", "chunk_cat"), ("fp32", "chunk_upcast")])
def test_copies_of_units_are_kernels_of_their_own(dtype: str, kind: str) -> None:
    """Each way has its kernel, and so its speed: a cast and a copy of many tensors at once into what is gathered, a
    split out of it, a concatenation by rank into what is reduced, slower where the type grows."""
    optimizer = {"master_weights": True, "state_dtype": "fp32"}
    training = {"global_batch": 2, "grad_dtype": dtype, "optimizer": optimizer}
    frame = play(training, framework="pytorch", dp=2, zero=3).timeline
    kinds = frame[frame["name"].str.startswith("fsdp.")].groupby("name")["kind"].agg(set).to_dict()
    assert kinds == {
        **({"fsdp.shard cast": {"upcast"}} if dtype == "bf16" else {}),
        "fsdp.cast": {"optimizer"},
        "fsdp.gather copy in": {"foreach_copy"},
        "fsdp.gather copy out": {"split_copy"},
        "fsdp.reduce copy in": {kind},
    }


@pytest.mark.parametrize("whole", [False, True])
def test_gradients_of_weights_in_fp32_are_kept_in_fp32(whole: bool) -> None:
    """They are reduced in 16 bits. Each reduced shard, half of all weights, is read at 2 bytes and written at 4: once a
    micro-batch, or once where whole gradients are added up before. Sums of shards are 12 bytes. The update reads what
    is there: nothing is cast to fp32 before it."""
    training: dict[str, Any] = {"global_batch": 4, "grad_dtype": "bf16", "optimizer": {"master_weights": True}}
    keys: dict[str, Any] = {"dp": 2, "zero": 3, "sync_each_micro_batch": not whole}
    result = play(training, framework="pytorch", **keys)
    frame = result.timeline[result.timeline["rank"] == 0]
    shard = sum(elements(part.weights) for part in rank_parts(load(dp=2), 0)) / 2
    moved = frame.groupby("name")["nbytes"].sum()
    assert moved["fsdp.shard cast"] == pytest.approx((1 if whole else 2) * 6 * shard)
    assert moved.get("fsdp.accumulate", 0.0) == pytest.approx(0.0 if whole else 12 * shard)
    assert moved["dp.reduce_scatter grads"] == pytest.approx((1 if whole else 2) * 2 * shard)
    assert "gradients to fp32" not in moved
    static = result.memories[0].static
    assert static.step_gradients == static.state.gradients == pytest.approx(4 * shard)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_a_backward_pass_of_torch_ends_with_its_root(m: int) -> None:
    """Torch's ``finalize_backward``: what follows a backward pass, the gathers of the next forward pass too, waits for
    the root's reduction, and the root's gradients are copied together when all layers' are reduced."""
    frame = spans(play({"global_batch": 2 * m, "seq": 64}, WIDE, "pytorch", dp=2, zero=3))
    for number in range(m):
        layers = frame[[label.startswith(f"reduce 0B{number}.") for label in frame.index]]
        root = frame.loc[f"reduce 0B{number} root"]
        assert frame.loc[f"0B{number}", "start"] >= layers["end"].max() - 1e-12
        follows = [f"gather 0F{number + 1} root", f"0F{number + 1}.0"] if number + 1 < m else ["optimizer"]
        assert frame.loc[follows, "start"].min() >= root["end"] - 1e-12
