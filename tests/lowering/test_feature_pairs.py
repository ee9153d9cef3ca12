"""Pairs of features: bytes moved, bytes held and seconds where two of them meet, derived by hand.

The model is that of `tests.support.feature_pairs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from simulator.costs import Costs
from simulator.engine import simulate
from simulator.lowering import build_program
from simulator.program import Attention, GroupedMatmul, Matmul, Memory
from tests.support import quick
from tests.support.clusters import HOP_s, NIC_Bps, nic_cluster
from tests.support.feature_pairs import (
    CP_SENT,
    SEQ,
    TIED_P,
    TP_P,
    TP_SENT,
    TP_TIED_P,
    E,
    H,
    Held,
    L,
    N,
    P,
    Pair,
    T,
    assert_moves_and_holds,
    description,
    whole,
)

#: Four experts of width 64, two matrices each, one for each token; a layer's experts, and its other weights with the
#: router of four rows.
MOE = {"moe": {"experts": 4, "top_k": 1, "ffn_hidden": 64}}
EXPERT, DENSE_LAYER = 2 * 64 * H, 4 * H * H + 2 * H + 4 * H
#: All outside experts of an untied model.
DENSE = 2 * DENSE_LAYER + N + 2 * T
#: Bytes of probabilities and their gradients that a rank of two sends for a micro-batch in one layer.
PROBABILITIES = 4 * SEQ
TIED = {"tied_embeddings": True}
NO_OVERLAP = {"grad_reduce": False, "param_gather": False, "p2p": False}

PAIRS: dict[str, Pair] = {
    # Both stages hold the table: L + T, and L + N + T. Four micro-batches go over the one edge each way, half of it
    # from each GPU: 4 E; the two all-reduce the table's gradients, 4 T bytes.
    "tied table, pipeline": Pair({"pp": 2}, whole(L + T, L + N + T), {"pp": 4 * E + 4 * T}, TIED),
    # A split backward moves and holds the same.
    "tied table, split passes": Pair(
        {"pp": 2, "schedule": "zb_h1"}, whole(L + T, L + N + T), {"pp": 4 * E + 4 * T}, TIED
    ),
    # Over two replicas gradients are reduce-scattered, 4/2 bytes each, and parameters gathered, 2/2: 3 each; the mean
    # stage has L + N/2 + T. Two micro-batches a replica. The optimizer's states are halved, the table's too.
    "tied table, ZeRO-1": Pair(
        {"pp": 2, "dp": 2, "zero": 1},
        (Held(L + T, L + T, (L + T) / 2), Held(L + N + T, L + N + T, (L + N + T) / 2)),
        {"dp": 3 * (L + N / 2 + T), "pp": 2 * E + 4 * T},
        TIED,
    ),
    # Gradients are reduce-scattered after each of the two micro-batches, and half of them held: 2 * 2 + 1 each. The
    # stages add up their shards of the table's gradients, half of 4 T.
    "tied table, ZeRO-2": Pair(
        {"pp": 2, "dp": 2, "zero": 2},
        (Held(L + T, (L + T) / 2, (L + T) / 2), Held(L + N + T, (L + N + T) / 2, (L + N + T) / 2)),
        {"dp": 5 * (L + N / 2 + T), "pp": 2 * E + 2 * T},
        TIED,
    ),
    # Each of two micro-batches gathers a layer forward and backward, 2 * 2/2 L, the rest once, 2/2 (T + N), and
    # reduce-scatters all gradients, 4/2 each. All is halved.
    "tied table, ZeRO-3": Pair(
        {"dp": 2, "zero": 3},
        whole(TIED_P / 2),
        {"dp": 2 * (2 * 2 * L + (T + N) + 2 * TIED_P)},
        TIED,
    ),
    # So on two stages, each with a layer and a table; shards of the table's gradients are added up.
    "pipeline, ZeRO-3": Pair(
        {"pp": 2, "dp": 2, "zero": 3},
        whole((L + T) / 2, (L + N + T) / 2),
        {"dp": 2 * (2 * L + (T + N / 2) + 2 * (L + N / 2 + T)), "pp": 2 * E + 2 * T},
        TIED,
    ),
    # Ranks split the table with the matrices.
    "tied table, TP": Pair({"tp": 2, "sequence_parallel": False}, whole(TP_TIED_P), {"tp": 4 * TP_SENT}, TIED),
    # Rows are split between the blocks. A block gathers its input and scatters its output, E/2 each, backward the other
    # way, and gathers its input once more for the weight gradients: 5/2 E, four times. The embedding scatters and its
    # gradient is gathered, E; the head gathers, scatters its gradient and gathers again, 3/2 E. Once a step the norms'
    # gradients, of a rank's own rows, are all-reduced: (2 * 2 h + h) 4 bytes.
    "tied table, SP": Pair(
        {"tp": 2}, whole(TP_TIED_P), {"tp": 4 * (12.5 * E + 3 * 4 * SEQ) + 4 * (2 * 2 * H + N)}, TIED
    ),
    # Of four experts a rank has two, which nobody else has: their gradients stay. The others' are all-reduced, 4
    # bytes each. A micro-batch's tokens go to their experts and back, and their gradients too, half of them to the
    # other rank: 4 * E/2 in each of two layers, for each of two micro-batches. Before, ranks tell each other how many
    # come for each of four experts, in 8 bytes each (int64): to the other one 32 bytes. A token's probability (fp32)
    # goes with it, and the gradient of that comes back: 2 * 4 SEQ/2.
    "experts, data parallel": Pair(
        {"dp": 2, "ep": 2},
        whole(DENSE + 2 * 2 * EXPERT),
        {"dp": 4 * DENSE, "ep": 2 * 2 * (4 * E / 2 + 32 + PROBABILITIES)},
        MOE,
    ),
    # Only the others are sharded.
    "experts, ZeRO-1": Pair(
        {"dp": 2, "ep": 2, "zero": 1},
        (Held(DENSE + 4 * EXPERT, DENSE + 4 * EXPERT, DENSE / 2 + 4 * EXPERT),),
        {"dp": 3 * DENSE, "ep": 2 * 2 * (2 * E + 32 + PROBABILITIES)},
        MOE,
    ),
    "experts, ZeRO-2": Pair(
        {"dp": 2, "ep": 2, "zero": 2},
        (Held(DENSE + 4 * EXPERT, DENSE / 2 + 4 * EXPERT, DENSE / 2 + 4 * EXPERT),),
        {"dp": 5 * DENSE, "ep": 2 * 2 * (2 * E + 32 + PROBABILITIES)},
        MOE,
    ),
    # Four replicas: what is outside experts is sharded over four, experts over the two ranks that hold the same two.
    # One micro-batch: layers are gathered twice, the rest once, gradients reduce-scattered: 3/4 and 1/2 of 2, 1 and 4
    # bytes.
    "experts, ZeRO-3": Pair(
        {"dp": 4, "ep": 2, "zero": 3},
        whole(DENSE / 4 + 4 * EXPERT / 2),
        {
            "dp": 3 / 4 * (2 * 2 * 2 * DENSE_LAYER + 2 * (N + 2 * T) + 4 * DENSE)
            + 1 / 2 * (2 * 2 * 4 * EXPERT + 4 * 4 * EXPERT),
            "ep": 2 * (2 * E + 32 + PROBABILITIES),
        },
        MOE,
    ),
    # A layer and a table a stage, the second with the final norm; a shared expert of 2 * 64 h a layer, held by both.
    "experts, split passes": Pair(
        {"pp": 2, "dp": 2, "ep": 2, "schedule": "zb_h1"},
        whole(*(DENSE_LAYER + EXPERT + T + norm + 2 * EXPERT for norm in (0, N))),
        {"dp": 4 * (DENSE_LAYER + EXPERT + T + N / 2), "pp": 2 * E, "ep": 2 * (2 * E + 32 + PROBABILITIES)},
        {"moe": {**MOE["moe"], "shared_experts": 1}},
    ),
    # Four replicas in two instances of two: a reduce-scatter within one, 4/2 P, an all-reduce of the shard across, 4/2
    # P, and a gather within one, 2/2 P.
    "HSDP, ZeRO-1": Pair({"dp": 4, "zero": 1, "hsdp": 2}, (Held(P, P, P / 2),), {"dp": 5 * P}),
    # Both reductions for each of two micro-batches.
    "HSDP, ZeRO-2": Pair(
        {"dp": 4, "zero": 2, "hsdp": 2}, (Held(P, P / 2, P / 2),), {"dp": 9 * P}, training={"global_batch": 8}
    ),
    "HSDP, ZeRO-3": Pair(
        {"dp": 4, "zero": 3, "hsdp": 2},
        whole(P / 2),
        {"dp": 2 * (2 * 2 * L + (N + 2 * T) + 4 * P)},
        training={"global_batch": 8},
    ),
    # All dp x cp = 4 ranks hold the same, and share one state: 3/4 of 4 and of 2 bytes.
    "CP, ZeRO-1": Pair(
        {"cp": 2, "dp": 2, "zero": 1}, (Held(P, P, P / 4),), {"dp": 3 / 4 * 6 * P, "cp": 2 * 2 * CP_SENT}
    ),
    # Each rank has half of the tokens, and half of the heads; the two with the same half of the weights all-reduce.
    "CP, TP": Pair(
        {"cp": 2, "tp": 2, "sequence_parallel": False},
        whole(TP_P),
        {"tp": 4 * TP_SENT / 2, "cp": 4 * 2 * CP_SENT / 2, "dp": 4 * TP_P},
    ),
    # What a layer runs again sends again: forward's share of the keys and values once more, two all-reduces of a layer.
    "recompute, CP": Pair(
        {"cp": 2}, whole(P), {"cp": 4 * 2 * (CP_SENT + E), "dp": 4 * P}, training={"recompute": "full"}
    ),
    "recompute, TP": Pair(
        {"tp": 2, "sequence_parallel": False},
        whole(TP_P),
        {"tp": 4 * (TP_SENT + 2 * 2 * E)},
        training={"recompute": "full"},
    ),
    # A layer that is run again has been gathered for its backward pass anyway.
    "recompute, ZeRO-3": Pair(
        {"dp": 2, "zero": 3},
        whole(P / 2),
        {"dp": 2 * (2 * 2 * L + (N + 2 * T) + 2 * P)},
        training={"recompute": "full"},
    ),
    # Of a layer nothing is kept but its input, which goes out and comes back: 2 E of each layer and micro-batch.
    "recompute, offloaded activations": Pair(
        {"offload": {"activations": "cpu"}}, whole(P), {"offload": 4 * 2 * 2 * E}, training={"recompute": "full"}
    ),
    # A shard of the gradients goes to the host, 4/2 P, and of the weights back, 2/2 P; no state is on the GPU.
    "offload, ZeRO-1": Pair(
        {"dp": 2, "zero": 1, "offload": {"optimizer": "cpu"}}, (Held(P, P, 0),), {"dp": 3 * P, "offload": 3 * P}
    ),
    # Shards of gradients go after each of two micro-batches, and are kept on the host.
    "offload, ZeRO-2": Pair(
        {"dp": 2, "zero": 2, "offload": {"optimizer": "cpu"}}, (Held(P, 0, 0),), {"dp": 5 * P, "offload": 5 * P}
    ),
    # Shards of parameters come in for each of two micro-batches' gathers, as many bytes as the gather sends; shards of
    # gradients go out as they are reduced.
    "offload, ZeRO-3": Pair(
        {"dp": 2, "zero": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
        whole(0),
        dict.fromkeys(("dp", "offload"), 2 * (2 * 2 * L + (N + 2 * T) + 2 * P)),
    ),
    # Stages of half a model's layer each; one micro-batch's passes are each cut in two, and all-reduce as often.
    "TP, split passes": Pair(
        {"pp": 2, "tp": 2, "schedule": "zb_h1", "sequence_parallel": False},
        whole(6 * H * H + 2 * H + T / 2, 6 * H * H + 2 * H + N + T / 2),
        {"tp": 4 * TP_SENT / 2, "pp": 4 * E},
    ),
    # With one state for the step eight micro-batches are reduced and gathered no more often than two are.
    "accumulation, ZeRO-1": Pair(
        {"dp": 2, "zero": 1}, (Held(P, P, P / 2),), {"dp": 3 * P}, training={"global_batch": 16}
    ),
    # Sharded gradients are reduced eight times.
    "accumulation, ZeRO-2": Pair(
        {"dp": 2, "zero": 2}, (Held(P, P / 2, P / 2),), {"dp": (8 * 2 + 1) * P}, training={"global_batch": 16}
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_two_features_move_and_hold(name: str) -> None:
    assert_moves_and_holds(PAIRS[name])


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "ep": 2},
        {"dp": 2, "ep": 2, "overlap": {"ep": True}},
        {"pp": 2, "dp": 2, "ep": 2, "schedule": "zb_h1"},
        {"pp": 2, "dp": 2, "ep": 2, "schedule": "zb_h1", "overlap": {"ep": True}},
    ],
    ids=["experts", "experts beside the all-to-all", "split passes", "split passes beside the all-to-all"],
)
def test_every_product_of_shared_experts_is_run_forward_and_for_both_gradients(layout: dict[str, Any]) -> None:
    """A weight takes part in a product forward, one for its gradient and one for its input's: 6 FLOPs per weight and
    token. Tables aside, 64 tokens meet all weights outside routed experts, a shared expert a layer among them, and each
    one routed expert. The embedding is no product; the router's product is in fp32."""
    model = {"moe": {**MOE["moe"], "shared_experts": 1}}
    result = quick.play(quick.load(description(layout, model, {})))
    rows = result.spans.rows()
    kinds = rows["kind"].astype(str)
    flops = {
        kind: sum(
            float(one) * result.spans.ranks_like[int(rank)]
            for one, rank in zip(rows["flops"][kinds == kind], rows["rank"][kinds == kind], strict=True)
        )
        for kind in ("matmul", "grouped_matmul")
    }
    assert flops["matmul"] == pytest.approx(6 * 4 * SEQ * (2 * (4 * H * H + 4 * H + EXPERT) + T), rel=1e-12)
    assert flops["grouped_matmul"] == pytest.approx(6 * 4 * SEQ * 2 * EXPERT, rel=1e-12)


def test_experts_fill_no_bucket_of_the_others() -> None:
    """Buckets of 100,000 bytes. Backward come the head, 4 T, the final norm, 4 N, and a layer outside its experts,
    67,072 bytes: 100,096 when the layer's norms are there, its last. Then the other layer and the embedding, 99,840
    bytes when the pass ends. Experts, whose gradients nobody else has, close none, though a layer has 65,536 bytes."""
    layout = {"dp": 2, "ep": 2, "bucket_bytes": 100_000}
    result = quick.play(quick.load(description(layout, MOE, {"global_batch": 2})))
    rows = result.timeline
    reduced = rows[(rows["rank"] == 0) & (rows["name"] == "dp.all_reduce grads")]
    assert list(reduced["nbytes"]) == [4 * (T + N + DENSE_LAYER), 4 * (DENSE_LAYER + T)]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_as_many_layers_are_whole_at_once_as_are_gathered_ahead_and_one(prefetch: int) -> None:
    """From the start of its gather to the end of the pass that drops it a layer is whole or on its way. Gathers take a
    hundredth of the time of a layer here, so that all eight would be whole at once if none waited for its turn."""
    layout = {"dp": 2, "zero": 3, "prefetch": prefetch}
    result = quick.play(quick.load(description(layout, {"layers": 8}, {"global_batch": 2})))
    spans = result.played
    start = dict(zip(spans.labels, spans.start_s.tolist(), strict=True))
    end = dict(zip(spans.labels, spans.end_s.tolist(), strict=True))
    gathered = [label.removeprefix("gather ") for label in spans.labels if label.startswith("gather ")]
    layers = [(start[f"gather {label}"], end[label]) for label in gathered if label in end]
    assert len(layers) == 2 * 8
    assert max(sum(first <= at < last for first, last in layers) for at, _ in layers) == prefetch + 1


# Seconds, where computing takes none


class NextToNothing:
    """Prices kernels so low that a step of thousands is no longer to nine digits."""

    def seconds(self, kernel: object, *_: object) -> float:
        return 1e-18


def seconds(nodes: int, layout: Mapping[str, Any], model: Mapping[str, Any], **training: Any) -> float:
    """Seconds of a step on ``nodes`` nodes of one GPU, whose NICs move `NIC_Bps` and take `HOP_s` a message."""
    workload = quick.load(description({"bucket_bytes": 10**9, **layout}, model, training))
    costs = replace(Costs.ideal(), kernels=dict.fromkeys((Matmul, GroupedMatmul, Attention, Memory), NextToNothing()))
    return simulate(build_program(workload), nic_cluster(nodes), costs).step_time_s


def test_seconds_of_a_reduction_do_not_depend_on_accumulation_with_one_state() -> None:
    """ZeRO-1 over two: a reduce-scatter and a gather, each one message of half its bytes, 4/2 P and 2/2 P."""
    for batch in (2, 16):
        step = seconds(2, {"dp": 2, "zero": 1, "overlap": NO_OVERLAP}, {}, global_batch=batch)
        assert step == pytest.approx(2 * HOP_s + 3 * P / NIC_Bps, rel=1e-9)


def test_seconds_of_sharded_gradients_grow_with_accumulation() -> None:
    """ZeRO-2 over two: so a reduce-scatter for each of three micro-batches, and one gather."""
    step = seconds(2, {"dp": 2, "zero": 2, "overlap": NO_OVERLAP}, {}, global_batch=6)
    assert step == pytest.approx((3 + 1) * HOP_s + (3 * 2 + 1) * P / NIC_Bps, rel=1e-9)


def test_seconds_of_instances_are_those_of_three_operations() -> None:
    """HSDP of ZeRO-1, two instances of two: a reduce-scatter of one message of 4/2 P; an all-reduce of 2 P bytes in two
    messages of half; a gather of one message of 2/2 P."""
    step = seconds(4, {"dp": 4, "zero": 1, "hsdp": 2, "overlap": NO_OVERLAP}, {}, global_batch=4)
    assert step == pytest.approx((1 + 2 + 1) * HOP_s + (2 + 2 + 1) * P / NIC_Bps, rel=1e-9)


def test_seconds_of_a_tied_table_in_a_pipeline() -> None:
    """One micro-batch: its activation one way, its gradient back, and the table's gradients, all-reduced in two
    messages of half of 4 T."""
    step = seconds(2, {"pp": 2, "overlap": NO_OVERLAP}, TIED, global_batch=1)
    assert step == pytest.approx((1 + 1 + 2) * HOP_s + (2 * E + 4 * T) / NIC_Bps, rel=1e-9)


@pytest.mark.parametrize(("recompute", "more"), [("none", 0), ("full", 4)])
def test_seconds_of_tensor_parallelism_with_what_is_run_again(recompute: str, more: int) -> None:
    """One micro-batch: ten all-reduces of E and three of the loss, each in two messages of half; layers that are run
    again reduce twice each."""
    step = seconds(2, {"tp": 2, "sequence_parallel": False}, {}, global_batch=1, recompute=recompute)
    assert step == pytest.approx(2 * (13 + more) * HOP_s + (TP_SENT + more * E) / NIC_Bps, rel=1e-9)
