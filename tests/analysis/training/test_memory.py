"""Memory over time of hand-made Timelines: peaks, and what is in them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

import simulator
from simulator.analysis.time.memory_curve import memory_curve, memory_curves
from simulator.analysis.training.memory import RankMemory, memory_of_ranks, memory_report, worst_per_stage
from simulator.analysis.training.static_memory import StaticMemory, communicators
from simulator.config import load_workload
from simulator.models import StateBytes, pass_bytes, stage_parts
from simulator.models.experts import experts as mixed_experts
from simulator.models.experts import mixture
from simulator.models.latent_attention import latent, latent_projections
from simulator.models.shapes import shapes
from simulator.units import DTYPE_BYTES, GiB, MiB
from tests.support import experts
from tests.support.timelines import Span, pipeline, template, timeline

STATE = StateBytes(weights=2 * GiB, gradients=5 * GiB, optimizer=12 * GiB)
NOTHING = StateBytes(0.0, 0.0, 0.0)


def bare(memory: RankMemory) -> float:
    """Without what the allocator has cached, the context and NCCL."""
    return memory.total - memory.cached - memory.static.overhead


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 2, 8])
def test_1f1b_holds_as_many_activations_as_the_depth_that_is_left(p: int, m: int) -> None:
    # 1 GiB a micro-batch: stage s holds min(m, p - s) of them, beside its 19 GiB of state.
    play = pipeline("1f1b", p, m, activation=GiB)
    memories = memory_of_ranks(play, dict.fromkeys(range(p), StaticMemory(STATE)))
    for memory in memories:
        expected = min(m, p - memory.stage)
        assert memory.activations == pytest.approx(expected * GiB)
        assert memory.in_flight == expected
        assert memory.allocated == pytest.approx((19 + expected) * GiB)
        assert bare(memory) == pytest.approx((19 + expected) * GiB)
        assert memory.cached == 0  # blocks of one size are used again
        assert sum(memory.contents.values()) == pytest.approx(memory.total)


def test_workspace_counts_only_while_its_op_runs() -> None:
    # 0-1 holds 4, 1-2 needs 3 for itself beside them: 7 at 1 s. The third op allocates as the second gives back.
    op = template(("a", "norm", "compute", 1.0))
    play = timeline(
        [
            Span(0, "compute", op, 0.0, alloc=4.0, stage=0, microbatch=0),
            Span(0, "compute", op, 1.0, workspace=3.0, free=4.0, phase="B", stage=0, microbatch=0),
            Span(0, "compute", op, 2.0, alloc=5.0, free=5.0, stage=0, microbatch=1),
        ]
    )
    (memory,) = memory_of_ranks(play, {0: StaticMemory(NOTHING)})
    assert (memory.activations, memory.workspace, memory.peak_at_s) == (4.0, 3.0, 1.0)
    assert memory.during == "the backward pass of micro-batch 0, stage 0"
    curve = memory_curve(play, 0)
    assert curve.times[-1] == 3.0
    assert curve.held_bytes[-1] == 0.0


def test_a_step_that_is_cut_keeps_its_workspace_while_its_lane_waits() -> None:
    """A pass runs from 0 to 1, waits for its host, and goes on from 3 to 4; the next pass has a workspace of its own
    from 6 on, though its lane has come to it at 4. A gather that takes 5 bytes at 2 meets the 10 of the first."""
    work = template(("mlp", "matmul", "compute", 1.0))
    gather = template(("gather", "all_gather", "dp", 1.0))
    spans = [
        Span(0, "compute", work, 0.0, label="0F0", workspace=10.0),
        Span(0, "compute", work, 3.0, label="0F0", workspace=10.0, posted=1.0),
        Span(0, "compute", work, 6.0, label="0F1", workspace=10.0, posted=4.0),
        Span(0, "dp", gather, 2.0, label="gather", alloc=5.0),
    ]
    curve = memory_curve(timeline(spans), 0)
    history = {at: (held, workspace) for at, held, workspace in zip(*curve[:3], strict=True)}
    assert history == {0.0: (0, 10), 1.0: (0, 10), 2.0: (5, 10), 3.0: (5, 10), 4.0: (5, 0), 6.0: (5, 10), 7.0: (5, 0)}


def test_a_step_of_one_rank_does_not_go_on_on_the_next() -> None:
    """Both ranks have one pass with the same label on the same lane, as neighbours in the order of spans.

    That of rank 1, to which its lane comes at 0, takes its workspace when it starts, at 2.
    """
    work = template(("mlp", "matmul", "compute", 1.0))
    each = [Span(rank, "compute", work, 2.0, label="0F0", workspace=10.0, posted=0.0) for rank in (0, 1)]
    curves = memory_curves(timeline(each))
    assert [curve.times.tolist() for curve in curves.values()] == [[2.0, 3.0]] * 2
    assert [curve.workspace_bytes.tolist() for curve in curves.values()] == [[10.0, 0.0]] * 2


def test_report_takes_the_fullest_rank_of_each_stage() -> None:
    play = pipeline("1f1b", 2, 4, activation=GiB)
    # Stage 0: 19 of state and 2 of activations; stage 1: 19, 1 and 10 communicators of 320 MiB, which are no tensors.
    holdings = {0: StaticMemory(STATE), 1: StaticMemory(STATE, communicators=10)}
    both = memory_of_ranks(play, holdings)
    context = holdings[0].overhead
    report = memory_report([replace(memory, capacity=24 * GiB) for memory in both])
    assert report["fits"]
    assert report["peak_bytes"] == pytest.approx(20 * GiB + 10 * 320 * MiB + context)
    assert report["peak_allocated_bytes"] == report["peak_reserved_bytes"] == 21 * GiB
    for row in report["per_stage"]:
        parts = ("weights", "gradients", "optimizer", "activations", "buffers")
        assert sum(row[part] for part in parts) == pytest.approx(row["peak"])
        assert sum(row["contents"].values()) == pytest.approx(row["peak"])
    assert not memory_report([replace(memory, capacity=22 * GiB) for memory in both])["fits"]
    assert [memory.stage for memory in worst_per_stage(both)] == [0, 1]


def test_overhead_grows_with_communicators() -> None:
    overhead = [StaticMemory(NOTHING, communicators=count).overhead for count in (0, 1, 4)]
    assert 0 < overhead[0] < overhead[1] < overhead[2] < 3 * GiB


def test_a_rank_has_a_communicator_in_every_group_that_it_is_a_member_of() -> None:
    groups = {"tp": ((0, 1), (2, 3)), "embd": ((0, 2),)}
    counts = communicators(groups, range(5))
    assert [counts[rank] for rank in range(5)] == [2, 1, 2, 1, 0]
    assert communicators(groups, [2, 4]) == {2: 2}


JOB: dict[str, Any] = {
    "name": "tiny",
    "model": {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 50_000, "attention": "unfused", "dropout": 0.1},
    "training": {"seq": 1024, "micro_batch": 2, "global_batch": 16},
    "parallelism": {"pp": 2, "dp": 2},
    "cluster": "dgx_a100",
}


def fullest(**changes: Any) -> RankMemory:
    result = simulator.run(JOB, set={key.replace("__", "."): value for key, value in changes.items()})
    return max(result.memories, key=lambda memory: memory.total)


def allocated(**changes: Any) -> float:
    result = simulator.run(JOB, set={key.replace("__", "."): value for key, value in changes.items()})
    return max(memory.allocated for memory in result.memories)


def test_what_is_in_the_peak_is_counted_by_hand() -> None:
    """Stage 0 of 2 holds two micro-batches of its embedding and four layers: q, k, v and context are 2 bytes each per
    token and hidden unit, the scores' softmax, mask and dropped ones 5 bytes per head and pair of tokens, and the input
    of the qkv product 2 more."""
    memory = next(m for m in simulator.run(JOB).memories if m.stage == 0)
    tokens, hidden, layers, in_flight = 2 * 1024, 1024, 4, 2
    scores = 2 * 16 * 1024**2
    attention = layers * (
        2 * tokens * hidden * 5 + 5 * scores + tokens * hidden
    )  # and a mask byte after the projection
    assert memory.activations_by_kind["attention"] == pytest.approx(in_flight * attention, rel=0.05)
    mlp = layers * (2 * tokens * hidden * (1 + 4 + 4) + tokens * hidden)  # normed input, before and after GELU, mask
    assert memory.activations_by_kind["mlp"] == pytest.approx(in_flight * mlp, rel=0.05)
    assert memory.gathered == 0
    assert sum(memory.contents.values()) == pytest.approx(memory.total)


@pytest.mark.parametrize("kind", ["F", "B"])
def test_the_workspace_of_a_pass_is_what_its_fullest_moment_needs_more(kind: str) -> None:
    """The last stage: its backward begins with the head, whose logits are gone when the layers need their gradients;
    its forward ends with the head, when all layers hold theirs. Step by step, part by part:"""
    workload = simulator.run(JOB).workload
    parts = stage_parts(workload, 1)
    total = level = sum(part.saved_bytes for part in parts)
    peak = total
    for part in reversed(parts):
        peak = max(peak, level + (part.forward_bytes if kind == "F" else part.workspace_bytes))
        level -= part.saved_bytes  # forward: what this part had not taken yet before; backward: what it gives back
    assert pass_bytes(parts, kind).workspace == pytest.approx(peak - total)
    loose = max(part.forward_bytes if kind == "F" else part.workspace_bytes for part in parts)
    assert pass_bytes(parts, kind).workspace <= loose


def test_more_of_anything_takes_more_memory() -> None:
    sizes = [allocated(training__micro_batch=b, training__global_batch=16) for b in (1, 2, 4)]
    assert sizes == sorted(sizes)
    assert allocated(training__seq=2048) > sizes[1] > allocated(training__seq=512)
    kept = [allocated(training__recompute=how) for how in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    assert allocated(parallelism__dp=1, parallelism__tp=2) < sizes[1]
    assert allocated(parallelism__zero=1) < sizes[1]
    assert allocated(parallelism__schedule="gpipe") > sizes[1]


def test_a_stage_that_keeps_its_output_holds_one_more_tensor_per_micro_batch() -> None:
    """Two in flight on stage 0, each 2 bytes per token and hidden unit."""
    more = allocated(parallelism__deallocate_pipeline_outputs=False) - allocated()
    assert more == 2 * (2 * 2 * 1024 * 1024)


def test_what_accumulated_gradients_need_beside_the_buffer() -> None:
    """Placeholders of each shape of a layer's weights, 12 h^2 of 2 bytes, where the product accumulates; none where it
    does not. Gradients that stay add 2 bytes per parameter of the state, buckets 4 for each of their 40 million."""
    fused, apart = fullest().static, fullest(training__gradient_accumulation_fusion=False).static
    assert fused.placeholders == 2 * 12 * 1024**2
    assert apart.placeholders == 0
    params = fused.state.weights / DTYPE_BYTES["bf16"]
    kept = fullest(training__gradient_accumulation_fusion=False, training__keep_gradients=True).static.state
    assert kept.gradients == (4 + 2) * params
    assert fused.state.gradients == 4 * params
    assert fullest(parallelism__copy_to_buckets=True).static.bucket == 4 * 40e6
    assert fullest(parallelism__copy_to_buckets=True, parallelism__dp=1).static.bucket == 0


def test_sixteen_bit_gradients_are_copied_for_the_optimizer() -> None:
    """Large weights and little else: the copies in fp32 (4 bytes of the parameters that a rank updates) are the peak of
    the step, and ZeRO-1 halves them."""
    small = {"training__seq": 128, "training__micro_batch": 1, "training__grad_dtype": "bf16"}
    memory = fullest(**small)
    params = memory.static.state.weights / 2
    assert memory.during == "the optimizer"
    assert memory.workspace == 4 * params
    assert memory.activations == 0
    row = memory_report([memory])["per_stage"][0]
    assert (row["activations"], row["contents"]["optimizer workspace"]) == (0, 4 * params)
    assert "workspace" not in row["contents"]
    assert row["buffers"] == memory.buffers + 4 * params
    changes = {key.replace("__", "."): value for key, value in small.items()}
    sharded = simulator.run(JOB, set=changes | {"parallelism.zero": 1})
    steps = [step for role in sharded.program.roles for _, _, step in role.steps() if step.label == "optimizer"]
    most = max(memory.static.state.weights for memory in sharded.memories) / 2
    assert max(step.workspace_bytes for step in steps) == 4 * most / 2


def test_gradients_that_stay_are_copied_whatever_the_layer() -> None:
    """Beside gradients in bf16 that stay there is the copy of one in the buffer's fp32 while it is added, twice as much
    as the gradient itself: of products, of latent attention's, and of experts'."""

    def adding(*, stay: bool) -> list[float]:
        changes = {"training.gradient_accumulation_fusion": False, "training.keep_gradients": stay}
        workload = load_workload(experts.job(model__mla=experts.MLA), changes)
        z, compressed, routed = shapes(workload), latent(workload), mixed_experts(workload)
        assert compressed is not None
        _router, *of_experts = mixture(z, routed).nodes  # whose gradient is in a type of its own
        nodes = (*chain(*latent_projections(z, compressed)), *of_experts)
        return [node.weight_grad_bytes for node in nodes if node.weight_grad]

    own, copies = adding(stay=False), adding(stay=True)
    assert len(own) >= 6
    assert copies == [2 * nbytes for nbytes in own]
