"""ZeRO stages and HSDP: what is sharded, what travels and how often, and that every schedule runs with each of them.

P parameters, n ranks, g bytes per gradient, 2 per parameter; a reduce-scatter or all-gather of x sends (n-1)/n x per
GPU.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from simulator.analysis.time.memory_curve import memory_curve
from simulator.api import run_step
from simulator.cluster import build_cluster
from simulator.config import Parallelism, Workload, warnings
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.lowering import build_program, layout
from simulator.models import optimizer_ops, rank_parts, state_bytes, weights_of
from simulator.operations.weights import elements, elements_by_axis
from simulator.program import Comm, Step
from simulator.schedules import SCHEDULES
from simulator.step_result import StepResult
from simulator.units import DTYPE_BYTES
from tests.support import quick
from tests.support.exact import assert_same
from tests.support.grids import every_pair, grid
from tests.support.sharded import load, play

RING = {"collective_algorithm": "ring"}


def sent(result: StepResult) -> float:
    return float(result.to_dict()["communication"]["dp"]["bytes_per_gpu"])


def parameters(workload: Workload, layers_only: bool = False) -> int:
    parts = rank_parts(workload, 0)
    return sum(elements(part.weights) for part in parts if not layers_only or part.name == "layer")


def calls(result: StepResult, op: str, rank: int = 0) -> list[Step]:
    role = result.program.roles[result.program.role_of[rank]]
    return [
        step
        for _, _, step in role.steps()
        if isinstance(step.op, Comm) and step.op.purpose == "dp" and step.op.op == op
    ]


# Bytes


@pytest.mark.parametrize(("n", "grad_dtype", "overlap"), grid([2, 4, 8], ["bf16", "fp32"], [True, False], every=9))
def test_bytes_of_one_micro_batch(n: int, grad_dtype: str, overlap: bool) -> None:
    """DDP all-reduces gradients: 2 g P. ZeRO-1 and 2 scatter them and gather parameters: (g + 2) P. ZeRO-3 gathers
    parameters once for the forward and, but for the root unit which stays, once more for the backward pass:
    (g + 2) P + 2 P_layers (arXiv 1910.02054, section 7). All times (n-1)/n. Of a layer that is, with 2-byte gradients,
    4, 4, 4 and 6 bytes: in the ratio 1, 1, 1, 1.5; with fp32 gradients 8, 6, 6 and 8."""
    g = DTYPE_BYTES[grad_dtype]
    training = {"grad_dtype": grad_dtype, "global_batch": n}
    on = {"grad_reduce": overlap, "param_gather": overlap}

    def of(zero: int, layers: int) -> tuple[float, Workload]:
        result = play(training, {"layers": layers}, dp=n, zero=zero, overlap=on, **RING)
        return sent(result), result.workload

    per_layer = []
    for zero in range(4):
        moved, workload = of(zero, 8)
        whole, layers = parameters(workload), parameters(workload, layers_only=True)
        expected = 2 * g * whole if zero == 0 else (g + 2) * whole + (2 * layers if zero == 3 else 0)
        assert moved == pytest.approx(expected * (n - 1) / n, rel=1e-12)
        per_layer.append((moved - of(zero, 4)[0]) / (layers / 2) * n / (n - 1))
    assert per_layer == pytest.approx([4, 4, 4, 6] if g == 2 else [8, 6, 6, 8], rel=1e-9)


@pytest.mark.parametrize(("m", "schedule"), grid([1, 2, 8], ["1f1b", "gpipe"], every=2))
def test_accumulation_communicates_as_often_as_the_stage_says(m: int, schedule: str) -> None:
    """With m micro-batches ZeRO-1 reduces gradients once, ZeRO-2 m times; both gather parameters once. ZeRO-3 does
    everything m times. With one micro-batch ZeRO-2 moves what ZeRO-1 does, and without resharding after the
    forward pass ZeRO-3 saves its second gather."""
    n = 4
    once = {"dp": n, "schedule": schedule, **RING}
    training = {"global_batch": m * n}
    results = [play(training, zero=zero, **once) for zero in range(4)]
    kept = play(training, zero=3, reshard_after_forward=False, **once)
    whole, layers = (parameters(kept.workload, layers_only=only) for only in (False, True))
    share = (n - 1) / n
    # Under GPipe all forward passes come first: a root (or kept layer) is gathered by the first of them and, dropped by
    # each backward pass, by every backward pass but the first: m times too.
    expected = [8 * whole, 6 * whole, (4 * m + 2) * whole, m * (6 * whole + 2 * layers)]
    assert [sent(result) for result in results] == pytest.approx([bytes_ * share for bytes_ in expected], rel=1e-12)
    assert sent(kept) == pytest.approx(m * 6 * whole * share, rel=1e-12)
    for result, times in zip(results[1:], (1, m, m), strict=True):
        assert sum(step.op.nbytes for step in calls(result, "reduce_scatter")) == times * 4 * whole


def test_reductions_go_on_beside_the_micro_batch_that_makes_them() -> None:
    """ZeRO-2 reduces the first micro-batch's gradients while later ones compute: little is exposed."""
    training, model = {"global_batch": 32, "seq": 1024, "micro_batch": 2}, {"hidden": 1024, "heads": 16}
    keys = {"dp": 4, "zero": 2, "bucket_bytes": 10_000_000}
    result = play(training, model, **keys)
    frame = result.timeline
    computed = frame[(frame["lane"] == "compute") & (frame["microbatch"] == 1)]
    reduced = frame[(frame["lane"] == "dp") & (frame["microbatch"] == 0)]
    assert reduced["start_s"].min() < computed["start_s"].min() < reduced["end_s"].max()
    answer = result.to_dict()["communication"]["dp"]
    blocking = play(training, model, **keys, overlap={"grad_reduce": False})
    assert answer["exposed_s"] < 0.5 * blocking.to_dict()["communication"]["dp"]["exposed_s"]
    assert result.spans.step_time_s < blocking.spans.step_time_s


# State


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("grad_dtype", ["bf16", "fp32"])
def test_state_is_sharded_as_the_paper_says(n: int, grad_dtype: str) -> None:
    """2 P parameters, g P gradients and 12 P of fp32 master weights and moments; N ranks divide the last by
    ZeRO-1, the last two by ZeRO-2, all by ZeRO-3 (arXiv 1910.02054, figure 1). At N = 1 it is (14 + g) P throughout."""
    g = DTYPE_BYTES[grad_dtype]
    for zero in range(4):
        workload = load({"grad_dtype": grad_dtype, "global_batch": n}, dp=n, zero=zero)
        p = parameters(workload)
        expected = [(14 + g) * p, (2 + g) * p + 12 * p / n, 2 * p + (g + 12) * p / n, (14 + g) * p / n][zero]
        assert state_bytes(workload, 0).total == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("hsdp", [2, 4])
def test_hsdp_shards_over_its_group_alone(hsdp: int) -> None:
    for zero in (1, 2, 3):
        inside, small = load(dp=8, zero=zero, hsdp=hsdp), load({"global_batch": hsdp}, dp=hsdp, zero=zero)
        assert state_bytes(inside, 0) == state_bytes(small, 0)


def test_the_optimizer_works_on_the_shard() -> None:
    """Its kernels, and the zeroing of gradients where these are sharded, shrink with the shard; the norm of gradients
    is agreed on by the ranks that share a state."""
    for zero, zeroed in ((1, 1.0), (2, 1 / 4), (3, 1 / 4)):
        workload = load({"grad_clip": 1.0}, dp=8, zero=zero, hsdp=4)
        whole = load({"grad_clip": 1.0}, dp=8)
        weights = weights_of(rank_parts(workload, 0))
        own, all_ = optimizer_ops(workload, weights), optimizer_ops(whole, weights)
        (agreed,) = [op for op in own if isinstance(op, Comm)]
        assert (agreed.axis, agreed.nbytes) == ("dp_shard", 4.0)
        for op, full in zip([op for op in own if not isinstance(op, Comm)], all_, strict=True):
            assert not isinstance(full, Comm)
            share = zeroed if op.name == "optimizer.zero gradients" else 1 / 4
            assert op.kernel.bytes == pytest.approx(share * full.kernel.bytes, rel=1e-12)


@every_pair({"bucket_bytes": [300_000, 2_000_000], "overlap": [True, False], "fusion": [True, False]})
def test_zero_2_holds_whole_gradients_only_until_they_are_reduced(
    bucket_bytes: int, overlap: bool, fusion: bool
) -> None:
    """Beside the shard one bucket fills while one reduces, without overlap one alone. A bucket closes with the product
    that fills it, so it has at most its size and the largest parameter (fc1: 256 x 1024 of 4 bytes; the table and
    positions are as large). Nothing else differs from ZeRO-1's activations, and nothing is left at the end."""
    training = {"gradient_accumulation_fusion": fusion}
    on = {"grad_reduce": overlap}
    two, one = (play(training, dp=4, zero=zero, bucket_bytes=bucket_bytes, overlap=on).spans for zero in (2, 1))
    held = {zero: memory_curve(spans, 0).held_bytes for zero, spans in ((1, one), (2, two))}
    extra = held[2].max() - held[1].max()
    bucket = bucket_bytes + 4 * (1024 + 128 + 256 * 4) * 256
    assert 0 < extra <= (2 if overlap else 1) * bucket
    assert held[2][-1] == pytest.approx(0, abs=1e-6)


# HSDP


def test_shard_groups_are_neighbours_and_replicas_stand_across_them() -> None:
    placed = layout(load({"global_batch": 8}, tp=2, dp=8, zero=3, hsdp=4))
    assert placed.groups["dp"][0] == (0, 2, 4, 6, 8, 10, 12, 14)
    assert placed.groups["dp_shard"][:2] == ((0, 2, 4, 6), (8, 10, 12, 14))
    assert placed.groups["dp_replica"][:4] == ((0, 8), (2, 10), (4, 12), (6, 14))
    for whole in (8, None):
        assert "dp_shard" not in layout(load(tp=2, dp=8, zero=3, hsdp=whole)).groups


@every_pair({"n": [4, 8, 16], "hsdp": [2, 4], "zero": [1, 2, 3]})
def test_hsdp_reduces_shards_across_replicas(n: int, hsdp: int, zero: int) -> None:
    """In a group of h: reduce-scatter of 4-byte gradients and gathers of 2-byte parameters, (h-1)/h of them; then the
    shard of 4 P / h is all-reduced over the n / h replicas of it: 2 (r-1)/r of that."""
    result = play({"global_batch": n}, dp=n, zero=zero, hsdp=hsdp, **RING)
    whole, layers = (parameters(result.workload, layers_only=only) for only in (False, True))
    h, r = hsdp, n // hsdp
    inside = (h - 1) / h * (6 * whole + (2 * layers if zero == 3 else 0))
    across = 2 * (r - 1) / r * 4 * whole / h
    assert sent(result) == pytest.approx(inside + across, rel=1e-12)
    assert {step.op.axis for step in calls(result, "all_gather")} == {"dp_shard" if r > 1 else "dp"}


@pytest.mark.parametrize(
    ("dp", "ep", "hsdp", "expected"),
    [
        (16, 8, None, 2),  # two ranks hold the same experts, and share their state
        (16, 2, 8, 4),  # two instances of 8 ranks: of the 8 that hold the same experts 4 are in each
        (16, 8, 8, 1),  # of 2 one is in each
        (16, 8, 4, 1),  # four instances are more than the replicas: as many as divide them, 2
        (12, 2, 6, 3),
    ],
)
def test_experts_have_as_many_instances_as_the_rest(dp: int, ep: int, hsdp: int | None, expected: int) -> None:
    parallelism = Parallelism(dp=dp, ep=ep, zero=1, hsdp=hsdp)
    assert parallelism.shards("edp") == expected
    assert parallelism.shards("dp") == (hsdp or dp)


@pytest.mark.parametrize(
    ("keys", "zero"),
    grid(
        [{"dp": 8, "ep": 2}, {"dp": 4, "tp": 2, "ep": 4, "etp": 1}, {"dp": 8, "ep": 2, "hsdp": 4}, {"dp": 8, "ep": 8}],
        [1, 2, 3],
        every=3,
    ),
)
def test_experts_travel_on_an_axis_of_their_own(keys: dict[str, Any], zero: int) -> None:
    """As for the rest, with the e ranks that hold the same experts in place of n: over h of them that share a state and
    r that hold the same shard, (h-1)/h (4 + 2) bytes per parameter, under ZeRO-3 2 more per layer's, and 2 (r-1)/r 4/h.
    Where every rank has experts of its own, nothing."""
    moe = {"moe": {"experts": 8, "top_k": 2, "ffn_hidden": 256}, "layers": 4}
    result = play({"global_batch": keys["dp"]}, moe, zero=zero, **keys, **RING)
    layout, expected = result.workload.parallelism, 0.0
    for axis in ("dp", "edp"):
        h = layout.shards(axis)
        r = layout.replicas(axis) // h
        parts = rank_parts(result.workload, 0)
        every, units = weights_of(parts), weights_of(part for part in parts if part.is_unit)
        whole, layers = (elements_by_axis(weights)[axis] for weights in (every, units))
        expected += (h - 1) / h * (6 * whole + (2 * layers if zero == 3 else 0)) + 2 * (r - 1) / r * 4 * whole / h
    assert sent(result) == pytest.approx(expected, rel=1e-9)
    check(result.program, result.spans)


def test_hsdp_keeps_gathers_inside_nodes() -> None:
    """Two nodes of 8, shard groups of 8: each NIC carries the all-reduce of one GPU's shard alone, 2 (r-1)/r 4 P / 8
    bytes with r = 2. Sharding over all 16 (its rings leave a node through every NIC in turn) sends 1/8 of everything,
    (n-1)/n (4 P + 2 P + 2 P_layers), over each."""
    inside = play({"global_batch": 16}, dp=16, zero=3, hsdp=8, **RING)
    over_all = play({"global_batch": 16}, dp=16, zero=3, **RING)

    def of_nics(result: StepResult) -> float:
        (nic,) = [link for link in result.spans.links if link.kind == "infiniband"]
        return nic.nbytes

    whole, layers = (parameters(inside.workload, layers_only=only) for only in (False, True))
    assert of_nics(inside) == pytest.approx(4 * whole / 8, rel=1e-9)
    assert of_nics(over_all) == pytest.approx(15 / 16 * (6 * whole + 2 * layers) / 8, rel=1e-9)


@pytest.mark.parametrize(
    ("keys", "key", "said"),
    [
        ({"dp": 8, "hsdp": 4}, "parallelism.hsdp", "zero above 0"),
        ({"dp": 8, "zero": 2, "hsdp": 3}, "parallelism.hsdp", "1, 2, 4, 8"),
        ({"dp": 8, "zero": 3, "hsdp": 16}, "parallelism.hsdp", "1, 2, 4, 8"),
        ({"dp": 8, "zero": 4}, "parallelism.zero", "<= 3"),
        ({"dp": 8, "zero": 3, "prefetch": -1}, "parallelism.prefetch", ">= 0"),
    ],
)
def test_refused(keys: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        load(**keys)
    assert key in str(caught.value)
    assert said in str(caught.value)


def test_what_is_probably_not_meant() -> None:
    """Without a replica nothing is saved, and the reason is given. In a pipeline ZeRO-2 and 3 communicate for
    every micro-batch. Keys of ZeRO-3 have no effect elsewhere."""

    def said(**keys: Any) -> str:
        return " | ".join(note for note in warnings(load({"global_batch": 16}, **keys)) if "zero" in note)

    assert "with dp * cp 1 there is no replica to share the gradients and optimizer state with" in said(zero=2)
    assert "with dp * cp 1 there is no replica to share the whole state with" in said(zero=3)
    assert "hsdp 1" in said(dp=4, zero=3, hsdp=1)
    assert "gradients are reduced for each of the 8 micro-batches" in said(dp=2, pp=2, zero=2)
    assert "and parameters gathered, for each of the 8 micro-batches" in said(dp=2, pp=2, zero=3)
    assert said(dp=2, pp=2, zero=1) == said(dp=4, zero=3, prefetch=2) == said(dp=4, zero=2) == ""
    assert "parallelism.prefetch has no effect" in said(dp=4, zero=2, prefetch=2)
    assert "parallelism.reshard_after_forward has no effect" in said(dp=4, reshard_after_forward=False)


def test_a_pipeline_pays_for_every_micro_batch() -> None:
    """2 stages, m = 4: ZeRO-2 reduces 4 times what ZeRO-1 does, and gathers parameters as often."""
    one, two = (play({"global_batch": 8}, dp=2, pp=2, zero=zero, **RING) for zero in (1, 2))
    for rank in (0, 2):
        scattered, gathered = (
            [sum(step.op.nbytes for step in calls(result, op, rank)) for result in (one, two)]
            for op in ("reduce_scatter", "all_gather")
        )
        assert (scattered[1], gathered[1]) == (4 * scattered[0], gathered[0])


# Everything runs


SLOW = [pytest.mark.slow]


def points() -> list[Any]:
    """Return every schedule x stage x overlap. Schedules that keep whole earlier versions of weights have no ZeRO-3.

    Every other schedule has one fast case, of ZeRO-2 and 3 in turn; all other cases are slow.
    """
    stages = [(1, 2, 3) if schedule.drains else (1, 2) for schedule in SCHEDULES.values()]
    return [
        pytest.param(
            name,
            zero,
            overlap,
            marks=[] if n % 2 == 0 and zero == of[-1 - n // 2 % 2] and overlap == n % 8 // 4 else SLOW,
        )
        for n, (name, of) in enumerate(zip(SCHEDULES, stages, strict=True))
        for zero, overlap in product(of, (True, False))
    ]


@pytest.mark.parametrize(("name", "zero", "overlap"), points())
def test_every_schedule_runs_with_every_stage(name: str, zero: int, overlap: bool) -> None:
    """Each passes the validator of invariants, and folding and coalescing change nothing. Sizes, instances, resharding
    and prefetch take turns."""
    turn = list(SCHEDULES).index(name) + zero
    on = {"grad_reduce": overlap, "p2p": overlap, "param_gather": overlap}
    workload = load(
        {"global_batch": 16 if turn % 2 else 8, "seq": 32},
        {"hidden": 64, "heads": 4, "layers": 4},
        **({"tp": 1, "dp": 4, "hsdp": 2} if turn % 2 else {"tp": 1 + turn // 2 % 2, "dp": 2}),
        pp=2,
        vpp=SCHEDULES[name].chunks or 2,
        schedule=name,
        zero=zero,
        overlap=on,
        bucket_bytes=40_000,
        **({"reshard_after_forward": turn % 3 != 0, "prefetch": turn % 4} if zero == 3 else {}),
    )
    cluster, costs = build_cluster(workload.cluster), Costs.from_profile(quick.PROFILE)
    program = build_program(workload)
    short, plain = (
        StepResult(
            workload,
            {quick.PROFILE.gpu: quick.PROFILE},
            cluster,
            costs,
            program,
            simulate(program, cluster, costs, fold=on, coalesce=on),
            simulate=run_step,
        )
        for on in (True, False)
    )
    for result in (short, plain):
        check(result.program, result.spans)
    assert_same(short, plain)
    for rank in short.spans.ranks:
        held = memory_curve(short.spans, rank).held_bytes
        assert held.min() >= -1e-9 * held.max()
        assert np.abs(held[-1]) <= 1e-9 * held.max()
