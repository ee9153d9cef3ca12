"""Layers with experts: bytes and loads of their tokens, exact shortcuts, latent attention, multi-token prediction."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import simulator
from simulator.cli.app import main
from simulator.cluster import build_cluster
from simulator.config import load_cluster, load_workload
from simulator.config.model import Moe
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.lowering.layout import layout
from simulator.models import layer, rank_parts, stage_parts, weights_of
from simulator.models.routing import dropped_share, popularity, routing
from simulator.network.collectives import patterns
from simulator.network.direct import ByteShares
from simulator.operations.weights import elements, elements_by_axis
from simulator.program import Collective, Comm, Compute, GroupedMatmul, Matmul, from_text, kernels_of, to_text
from tests.support.clusters import carried
from tests.support.exact import assert_same
from tests.support.experts import MLA, job, play
from tests.support.frameworks import MEGATRON, PYTORCH
from tests.support.grids import every_pair, grid, one_in

COUNTED = "MFU counts them as worked on"
SKEW: dict[str, Any] = {"token_distribution": {"skew": 1.0}}


# --- routing ---


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.2, 6.0])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_skew_is_zipfs_law_cut_where_every_token_goes(skew: float, k: int) -> None:
    """The i-th most popular of 16 experts gets i^-s of the sum, but none more than 1 / k; what is cut off goes to those
    after it in proportion. The seed says who they are, not how many tokens they get."""
    moe = Moe(experts=16, top_k=k, ffn_hidden=8, token_distribution={"skew": skew})
    shares = sorted(popularity(moe, 0), reverse=True)
    assert math.fsum(shares) == pytest.approx(1)
    assert shares[0] <= 1 / k + 1e-12
    free = [i for i, share in enumerate(shares) if share < 1 / k * (1 - 1e-9)]
    for i in free:
        assert shares[i] / shares[free[0]] == pytest.approx(((free[0] + 1) / (i + 1)) ** skew)
    assert sorted(popularity(moe, 1), reverse=True) == shares
    assert skew == 0 or popularity(moe, 1) != popularity(moe, 0)


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize(
    ("moe", "share"),
    [
        ({}, 0.0),
        ({"capacity_factor": 2.0}, 0.0),
        ({"capacity_factor": 0.5}, 0.5),
        # One expert of eight is meant to get 4/11 and takes 1/8, the others 1/11 each.
        ({"capacity_factor": 1.0, "token_distribution": [4, 1, 1, 1, 1, 1, 1, 1], "top_k": 1}, 4 / 11 - 1 / 8),
    ],
)
def test_tokens_beyond_the_capacity_are_dropped_and_said(moe: dict[str, Any], share: float, pad: bool) -> None:
    padded = {"pad_to_capacity": pad} if "capacity_factor" in moe else {}
    work = job(moe=moe | padded, parallelism={"dp": 16, "ep": 2})
    assert dropped_share(load_workload(work)) == pytest.approx(share, abs=1e-12)
    told = [text for text in simulator.run(work).warnings if "drop" in text]
    assert told == (
        [f"model.moe.capacity_factor: experts drop {share:.1%} of their tokens; {COUNTED}"] if share else []
    )


def test_check_is_strict_about_dropped_tokens_as_run_is(tmp_path: Path) -> None:
    path = tmp_path / "drops.yaml"
    path.write_text(yaml.safe_dump(job(moe={"capacity_factor": 0.5}, parallelism={"dp": 16, "ep": 2})))
    for command in ("check", "run"):
        for strict, status in (([], 0), (["--strict"], 1)):
            with pytest.raises(SystemExit) as caught:
                main([command, str(path), *strict])
            assert caught.value.code == status, command


@every_pair(
    {
        "ep": [1, 2, 4, 8],
        "etp, tp": [(1, 1), (1, 2), (2, 2), (2, 1)],
        "moe": [{}, SKEW, {"token_distribution": [4, 1, 1, 1, 1, 1, 1, 1], "top_k": 1}],
    }
)
def test_every_copy_of_a_token_is_worked_on_once(ep: int, etp: int, tp: int, moe: dict[str, Any]) -> None:
    """A rank routes its 128 / tp tokens to k experts; all copies of ep * etp ranks are what their experts work on."""
    work = load_workload(job(moe=moe, parallelism={"tp": tp, "dp": 16, "ep": ep, "etp": etp}))
    routed = routing(work)
    k = moe.get("top_k", 2)
    assert routed.tokens == 128 // tp
    assert routed.sent == pytest.approx(k * routed.tokens)
    total = sum(sum(own) for own in routed.loads)
    assert abs(total - k * routed.tokens * ep * etp) <= ep
    assert [round(sum(own) / etp - got) for own, got in zip(routed.loads, routed.received, strict=True)] == [0] * ep


@pytest.mark.parametrize(
    ("factor", "pad", "expected"),
    [(1.0, True, 32), (1.25, True, 40), (0.5, True, 16), (1.25, False, 32), (0.5, False, 16)],
)
def test_capacity(factor: float, pad: bool, expected: int) -> None:
    """ceil(factor * 128 tokens * 2 / 8 experts) of each rank's tokens, and no more; padded: no fewer either."""
    moe = {"capacity_factor": factor} | ({} if pad else {"pad_to_capacity": False})
    work = load_workload(job(moe=moe, parallelism={"dp": 4, "ep": 4}))
    assert routing(work).loads == ((4 * expected, 4 * expected),) * 4


def test_copies_take_half_of_the_busiest_experts() -> None:
    """Of 4 experts with 4, 2, 1 and 1 eighths two copies are made: of the first (then 2 and 2), and of the first that
    has most then, the first again: 4/3 each."""
    moe = {"experts": 4, "top_k": 1, "token_distribution": [4, 2, 1, 1], "redundant_experts": 2}
    work = load_workload(job(moe=moe, parallelism={"dp": 2, "ep": 2}))
    assert [sum(own) for own in routing(work).loads] == pytest.approx(
        [256 * (4 / 3 + 2 + 1) / 8, 256 * (1 + 8 / 3) / 8], abs=1
    )


@pytest.mark.parametrize(
    ("copies", "fold"),
    grid(
        [(8, 8, "balanced"), (4, 8, "balanced"), (8, 8, {"skew": 1.0}), (4, 4, {"skew": 2.0}), (2, 2, {"skew": 1.0})],
        [True, False],
        every=2,
    ),
)
def test_gradients_of_copies_are_added_up_by_their_holders(copies: tuple[int, int, object], fold: bool) -> None:
    """Of 8 experts of 3 x 256 x 256 fp32 gradients in each of 2 layers, those with copies on several ranks are
    all-reduced once a step over these ranks and no others: every rank takes part for each such expert it holds."""
    ep, redundant, distribution = copies
    moe = {"redundant_experts": redundant, "token_distribution": distribution}
    result = play({"fold": fold}, moe=moe, parallelism={"dp": ep, "ep": ep})
    check(result.program, result.spans)
    groups = {one.positions: one.experts for of in routing(result.workload).copy_rounds for one in of.groups}
    if distribution == "balanced":  # one copy of each expert in turn, consecutive slots on a rank
        local = (8 + redundant) // ep
        expected = [{slot // local, (8 + slot) // local} for slot in range(8)][:redundant]
        assert sum(groups.values()) == sum(len(holders) > 1 for holders in expected)
        assert {frozenset(positions) for positions in groups} == {frozenset(holders) for holders in expected}
    rows = result.timeline
    moved = rows[rows["name"] == "ep.all_reduce redundant experts"]
    for rank in moved["rank"].unique():
        # Of n holders each sends 2 (n - 1) / n of the gradients.
        own = {positions: experts for positions, experts in groups.items() if rank in positions}
        sent = sum(experts * 2 * (1 - 1 / len(positions)) for positions, experts in own.items())
        assert moved[moved["rank"] == rank]["nbytes"].sum() == pytest.approx(2 * 3 * 256 * 256 * 4 * sent)
    assert fold or set(moved["rank"]) == {rank for positions in groups for rank in positions}


# --- bytes ---


@pytest.mark.parametrize(
    ("tp", "dp", "ep", "k"), [(1, 4, 4, 2), (1, 8, 8, 1), (1, 16, 16, 4), (2, 4, 8, 2), (2, 4, 2, 2)]
)
def test_dispatch_and_combine_bytes(tp: int, dp: int, ep: int, k: int) -> None:
    """Balanced, a rank sends tokens x top_k x hidden x 2 bytes x (ep - 1) / ep per all-to-all.

    Of these there are two forward and two backward per layer and micro-batch. Each row's probability in fp32 follows it
    to its expert, and the gradient of that comes back.
    """
    result = play(moe={"experts": 16, "top_k": k}, parallelism={"tp": tp, "dp": dp, "ep": ep, "etp": 1})
    each = 128 / tp * k * 256 * 2 * (ep - 1) / ep
    frame = result.timeline
    moved = frame[frame["kind"] == "all_to_all"]
    behind = moved["name"].str.endswith(" of probabilities")
    assert moved[~behind]["nbytes"].to_numpy() == pytest.approx(each)
    assert moved[behind]["nbytes"].to_numpy() == pytest.approx(each * 4 / (2 * 256))
    passes = frame["rank"].nunique() * 2 * (32 // dp)
    assert (len(moved[~behind]), len(moved[behind])) == (4 * passes, 2 * passes)


def test_expert_tensor_ranks_exchange_all_rows_that_they_work_on() -> None:
    """128 tokens on two ranks are 64 x top_k 2 = 128 rows of 256 values in bf16 each. Both ranks work on the rows of
    both: gathered before the products and scattered behind them, and so again backward."""
    workload = load_workload(job(moe={"top_k": 2}, parallelism={"tp": 2, "dp": 2, "ep": 2, "etp": 2}))
    part = next(part for part in stage_parts(workload, 0) if part.name == "moe layer")
    for ops in (part.forward, part.backward):
        moved = [(op.op, op.nbytes) for op in ops if isinstance(op, Collective) and op.name.startswith("etp.")]
        assert moved == [("all_gather", 2 * 128 * 256 * 2), ("reduce_scatter", 2 * 128 * 256 * 2)]


@pytest.mark.parametrize(("nodes", "limit"), [(2, 1), (4, 1), (4, 2), (4, 3)])
def test_node_limited_routing_crosses_the_network_once_per_node(nodes: int, limit: int) -> None:
    """k = 4 copies to ``limit`` nodes: a NIC carries limit / k of what its GPU's copies to other nodes would be,
    (nodes - 1) / nodes of all; inside nodes every copy goes on to the 7/8 of GPUs that are not reached first."""
    cluster = build_cluster(replace(load_cluster("dgx_h100"), nodes=nodes))
    ranks = tuple(range(8 * nodes))
    (plain,) = patterns("all_to_all", ranks, cluster)
    (pattern,) = patterns("all_to_all", ranks, cluster, shares=ByteShares(per_node=limit / 4))
    for one, share in ((plain, 1.0), (pattern, limit / 4)):
        loads = carried(one, cluster)
        nics = [load for name, load in loads.items() if ".nic" in name and not name.endswith(("pcie:tx", "pcie:rx"))]
        assert nics == pytest.approx([share * (nodes - 1) / nodes] * len(nics))
    loads = carried(pattern, cluster)
    nvlink = [load for name, load in loads.items() if name.endswith(("nvlink:tx", "nvlink:rx"))]
    assert nvlink == pytest.approx([7 / 8] * len(nvlink))


def test_uneven_bytes_of_every_pair() -> None:
    """Member i sends n s_i r_j bytes per byte of size to j: ports carry what leaves and reaches their GPUs."""
    cluster = build_cluster(load_cluster("dgx_h100"))
    shares = (0.4, 0.3, 0.2, 0.1)
    (pattern,) = patterns("all_to_all", (0, 1, 2, 3), cluster, shares=ByteShares(receive=shares))
    loads = carried(pattern, cluster)
    for gpu, share in enumerate(shares):
        assert loads[f"node0.gpu{gpu}.nvlink:tx"] == pytest.approx(1 - share)
        assert loads[f"node0.gpu{gpu}.nvlink:rx"] == pytest.approx(3 * share)
    assert pattern.sent == pytest.approx(3)
    (back,) = patterns("all_to_all", (0, 1, 2, 3), cluster, shares=ByteShares(send=shares))
    loads = carried(back, cluster)
    assert loads["node0.gpu0.nvlink:tx"] == pytest.approx(3 * 0.4)


# --- exactness ---


@pytest.mark.parametrize(
    ("parallelism", "changes"),
    one_in(
        3,
        [
            ({"dp": 8, "ep": 8}, {}),
            ({"dp": 8, "ep": 4, "zero": 1}, {"moe": SKEW}),
            ({"dp": 16, "ep": 16}, {"moe": SKEW}),
            ({"dp": 16, "ep": 16}, {"moe": {"node_limit": 1}}),
            ({"dp": 16, "ep": 16}, {"moe": {"node_limit": 2} | SKEW}),
            ({"dp": 4, "tp": 2, "ep": 8, "etp": 1, "overlap": {"ep": True}}, {"moe": {"shared_experts": 1} | SKEW}),
            ({"dp": 4, "tp": 2, "ep": 2, "etp": 2}, {"moe": SKEW}),
            ({"dp": 4, "tp": 2, "ep": 4, "etp": 1, "sequence_parallel": False}, {}),
            (
                {"dp": 4, "pp": 2, "ep": 4, "vpp": 2, "schedule": "interleaved"},
                {"model__layers": 4, "model__mtp_layers": 1},
            ),
            ({"dp": 4, "pp": 2, "ep": 4, "schedule": "zb_h1"}, {"model__mla": MLA, "moe": SKEW}),
        ],
    ),
)
def test_shortcuts_are_exact(parallelism: dict[str, Any], changes: dict[str, Any]) -> None:
    changes = {"model__layers": 2} | changes
    moe = {"experts": 16} | changes.pop("moe", {})
    runs = [play({"fold": on, "coalesce": on}, moe=moe, parallelism=parallelism, **changes) for on in (True, False)]
    for result in runs:
        check(result.program, result.spans)
    assert_same(*runs)
    assert from_text(to_text(runs[0].program)) == runs[0].program


# --- layers ---


@pytest.mark.parametrize(
    ("first", "every", "expected"), [(0, 1, "MMMM"), (1, 1, "DMMM"), (0, 2, "MDMD"), (1, 2, "DMDM")]
)
def test_which_layers_have_experts(first: int, every: int, expected: str) -> None:
    moe = {"first_dense_layers": first, "every": every}
    work = load_workload(job(moe=moe, model__layers=4, parallelism={"pp": 2}))
    names = [part.name for stage in range(2) for part in stage_parts(work, stage) if "layer" in part.name]
    assert "".join("M" if name == "moe layer" else "D" for name in names) == expected


def test_ranks_hold_the_experts_between_them() -> None:
    """Of 8 experts of 3 x 256 x 256 in 2 layers each of 4 ep ranks has a quarter; etp halves each."""
    for parallelism, share in (({"dp": 4, "ep": 4}, 4), ({"dp": 8, "ep": 4, "etp": 2}, 8), ({"dp": 4}, 1)):
        held = elements_by_axis(weights_of(rank_parts(load_workload(job(parallelism=parallelism)), 0)))
        assert held["edp"] == 2 * 8 * 3 * 256 * 256 // share


@pytest.mark.parametrize("framework", [MEGATRON, PYTORCH])
@pytest.mark.parametrize("moe", [{}, {"shared_experts": 1}])
def test_a_backward_pass_has_two_products_for_each_of_the_forward(moe: dict[str, Any], framework: str) -> None:
    work = load_workload(job(moe=moe, model__mla=MLA, framework=framework))
    part = layer(work)
    products = [
        sorted(
            one.kernel.flops
            for op in ops
            for one in kernels_of(op)
            if isinstance(one.kernel, Matmul | GroupedMatmul) and one.phase == phase
        )
        for ops, phase in ((part.forward, "F"), (part.backward, "B"), (part.backward, "W"))
    ]
    assert products[0] == products[1] == products[2]


@pytest.mark.parametrize(
    ("modules", "gone"),
    [
        (["moe_act"], 256 * 256),  # the activation's output: 128 x 2 copies of 256
        (["layernorm"], 2 * 128 * 256),  # both norms' outputs
        # Queries and keys of 48, values of 32 for 8 heads, and both normed compressed forms.
        (["mla_up_proj"], 128 * (8 * (48 + 48 + 32) + 96 + 64)),
    ],
)
def test_recomputed_modules_drop_what_they_make(modules: list[str], gone: int) -> None:
    """``gone``: elements of 2 bytes that are saved no longer, and exist again in the backward pass."""
    recompute = {"granularity": "selective", "modules": modules}
    some = layer(load_workload(job(model__mla=MLA, training__recompute=recompute)))
    none = layer(load_workload(job(model__mla=MLA)))
    assert none.saved_bytes - some.saved_bytes == 2 * gone
    assert sum(tensor.nbytes for tensor in some.recomputed) == 2 * gone
    assert some.recompute


def test_recomputing_moe_keeps_the_normed_rows_and_sends_again() -> None:
    recompute = {"granularity": "selective", "modules": ["moe"]}
    part = layer(load_workload(job(parallelism={"dp": 4, "ep": 4}, training__recompute=recompute)))
    assert not [tensor.name for tensor in part.saved if tensor.name.startswith("moe.")]
    assert [op.name for op in part.recompute if isinstance(op, Comm)] == [
        "ep.all_gather token counts",
        "ep.all_to_all dispatch",
        "ep.all_to_all dispatch of probabilities",
        "ep.all_to_all combine",
    ]


def test_shared_experts_beside_the_all_to_all() -> None:
    """With overlap.ep the same kernels and bytes take less time, as long as links are the slower."""
    changes: dict[str, Any] = {
        "moe": {"experts": 16, "shared_experts": 2, "ffn_hidden": 1024},
        "model__hidden": 1024,
        "training__seq": 2048,
    }
    apart = play(parallelism={"dp": 16, "ep": 16}, **changes)
    beside = play(parallelism={"dp": 16, "ep": 16, "overlap": {"ep": True}}, **changes)
    assert beside.spans.step_time_s < apart.spans.step_time_s
    for column in ("flops", "nbytes"):
        assert beside.timeline[column].sum() == pytest.approx(apart.timeline[column].sum())


def test_latent_attention_kernel_has_two_widths() -> None:
    """Scores are as wide as nope + rope, the context as v: of 128 x 128 / 2 pairs and 8 heads."""
    part = layer(load_workload(job(model__mla=MLA)))
    (flash,) = [op for op in part.forward if isinstance(op, Compute) and op.kernel.kind == "attention"]
    assert flash.kernel.flops == 2 * 8 * (128 * 128 / 2) * (48 + 32)


def test_multi_token_prediction_stands_on_the_last_stage() -> None:
    """Embedding, projection, layer and loss once more; the table is a copy whose gradients both ends add up."""
    work = load_workload(job(model__mtp_layers=2, parallelism={"pp": 2, "dp": 2}))
    names = [part.name for part in stage_parts(work, 1)]
    module = ["mtp embedding", "mtp projection", "moe layer", "mtp head"]
    assert names == ["moe layer", "head", *module, *module]
    copies = [elements(part.weights) for part in stage_parts(work, 1) if part.name == "mtp embedding"]
    assert copies == [1024 * 256, 0]
    assert layout(work).groups["embd"] == ((0, 2), (1, 3))
    assert any(
        step.label == "embedding grads"
        for role in play(model__mtp_layers=2, parallelism={"pp": 2, "dp": 2}).program.roles
        for _, _, step in role.steps()
    )


# --- errors ---


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"moe": {"top_k": 9}}, "model.moe.top_k", "at most 8"),
        ({"moe": {"first_dense_layers": 2}}, "model.moe.first_dense_layers", "none of the 2 layers"),
        ({"moe": {"token_distribution": [1, 2]}}, "model.moe.token_distribution", "2 shares for 8 experts"),
        ({"moe": {"token_distribution": [9, 1, 1, 1, 1, 1, 1, 1]}}, "model.moe.token_distribution", "1 / top_k"),
        ({"moe": {"token_distribution": "even"}}, "model.moe.token_distribution", "balanced"),
        ({"moe": {"pad_to_capacity": False}}, "model.moe.pad_to_capacity", "capacity factor"),
        ({"moe": {"redundant_experts": 2}}, "model.moe.redundant_experts", "ep > 1"),
        ({"moe": {"ffn_hidden": 255}, "parallelism": {"dp": 2, "etp": 2}}, "model.moe.ffn_hidden", "multiple of 2"),
        ({"parallelism": {"overlap": {"ep": True}}}, "parallelism.overlap.ep", "no shared experts"),
        (
            {"parallelism": {"dp": 2, "tp": 2, "pp": 2, "ep": 2, "etp": 1, "rank_order": "tp-pp-ep-dp"}},
            "parallelism.rank_order",
            "apart",
        ),
        ({"model__mla": MLA, "model__head_dim": 64}, "model.head_dim", "left out"),
        ({"model__mla": MLA, "model__position": "learned"}, "model.position", "rope"),
        (
            {"training__recompute": {"granularity": "selective", "modules": ["mlp"]}},
            "training.recompute.modules",
            "moe_act",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_workload(job(**changes))
    assert str(caught.value).startswith(f"{key}: ")
    assert words in str(caught.value)
