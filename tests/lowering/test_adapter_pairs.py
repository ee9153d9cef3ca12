"""Adapters where they meet another feature: bytes moved and held, derived by hand.

The model is that of `tests.support.feature_pairs`. Adapters of rank 4 stand beside the attention's projection, which
tensor parallelism splits by rows, and beside the first product of the MLP, which it splits by columns. All else is
frozen: gradients, states and reductions are of adapters alone.
"""

from __future__ import annotations

import pytest

from tests.support.feature_pairs import (
    CP_SENT,
    SEQ,
    TP_P,
    E,
    H,
    Held,
    L,
    N,
    P,
    Pair,
    T,
    assert_moves_and_holds,
)

RANK = 4
ADAPTERS = {"adapters": {"rank": RANK, "targets": ["o", "up"]}}
#: Elements of a layer's adapters, r (h + h) and r (h + 4 h), and of all. A tensor-parallel rank of two has half of A
#: beside a product that is split by rows, and half of B beside one that is split by columns.
A_LAYER = RANK * (H + H) + RANK * (H + 4 * H)
A = 2 * A_LAYER
A_TP = 2 * (RANK * (H / 2 + H) + RANK * (H + 4 * H / 2))
#: Bytes of the columns between A and B, of a micro-batch.
THIN = SEQ * RANK * 2


def beside(weights: float, adapters: float, states: float | None = None) -> Held:
    """Elements of frozen ``weights`` and of ``adapters``, which alone have gradients and optimizer ``states``."""
    return Held(weights + adapters, adapters, adapters if states is None else states)


#: Bytes of all-reduces of one micro-batch over two tensor-parallel ranks without sequence parallelism. Forward as ever
#: five, behind attention, MLP and embedding. Backward four, before the head, before both MLPs, and before the second
#: attention: gradients end at the first projection's adapter. The loss sends three numbers of fp32 a token. In each
#: layer the partial sums of A beside the projection are all-reduced forward, and the partial gradients of A's columns
#: beside the MLP's product backward.
TP_BYTES = 9 * E + 3 * 4 * SEQ + 2 * 2 * THIN

PAIRS: dict[str, Pair] = {
    "data parallel": Pair({"dp": 2}, (beside(P, A),), {"dp": 4 * A}),
    # A reduce-scatter of 4/2 bytes, and a gather of 2/2 of what was updated.
    "ZeRO-1": Pair({"dp": 2, "zero": 1}, (beside(P, A, A / 2),), {"dp": 3 * A}),
    # A reduce-scatter for each of two micro-batches.
    "ZeRO-2": Pair({"dp": 2, "zero": 2}, (Held(P + A, A / 2, A / 2),), {"dp": 5 * A}),
    # Frozen weights are sharded and gathered too: layers twice for each of two micro-batches, the rest once.
    "ZeRO-3": Pair(
        {"dp": 2, "zero": 3},
        (Held((P + A) / 2, A / 2, A / 2),),
        {"dp": 2 * (2 * 2 * (L + A_LAYER) + (N + 2 * T) + 2 * A)},
    ),
    # Within instances of two a reduce-scatter and a gather, and across them an all-reduce of half.
    "HSDP, ZeRO-1": Pair({"dp": 4, "zero": 1, "hsdp": 2}, (beside(P, A, A / 2),), {"dp": 5 * A}),
    # Adapters' gradients go to the host, and adapters come back.
    "offload, ZeRO-1": Pair(
        {"dp": 2, "zero": 1, "offload": {"optimizer": "cpu"}}, (beside(P, A, 0),), {"dp": 3 * A, "offload": 3 * A}
    ),
    # A layer and a table a stage. The first stage trains its adapters, so that gradients go back to it.
    "pipeline": Pair({"pp": 2}, (beside(L + T, A_LAYER), beside(L + N + T, A_LAYER)), {"pp": 4 * E}),
    "pipeline, split passes": Pair(
        {"pp": 2, "schedule": "zb_h1"}, (beside(L + T, A_LAYER), beside(L + N + T, A_LAYER)), {"pp": 4 * E}
    ),
    "TP": Pair({"tp": 2, "sequence_parallel": False}, (beside(TP_P, A_TP),), {"tp": 4 * TP_BYTES}),
    # Layers send forward what they sent before: two all-reduces of E, and one of A's sums.
    "TP, recompute": Pair(
        {"tp": 2, "sequence_parallel": False},
        (beside(TP_P, A_TP),),
        {"tp": 4 * (TP_BYTES + 2 * (2 * E + THIN))},
        training={"recompute": "full"},
    ),
    # Forward there are a scatter behind the embedding, four a layer, and a gather before the head, E/2 each. Backward
    # there are one behind the head, four in the second layer, and two in the first one's MLP. Frozen products need no
    # gather of their input again. Each adapter gathers or scatters its thin columns once each way, half of their bytes.
    # Ranks have gradients of their own rows of A beside the MLP's product, and of B beside the projection. These, r h
    # each, are all-reduced once a step.
    "SP": Pair(
        {"tp": 2},
        (beside(TP_P, A_TP),),
        {"tp": 4 * ((10 + 7) * E / 2 + 3 * 4 * SEQ + 2 * 2 * 2 * THIN / 2) + 4 * 2 * (RANK * H + RANK * H)},
    ),
    # The first layer's attention has nothing behind it that is trained: its keys and values go round forward, E, alone.
    "CP": Pair({"cp": 2}, (beside(P, A),), {"cp": 4 * (E + CP_SENT), "dp": 4 * A}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_adapters_move_and_hold(name: str) -> None:
    pair = PAIRS[name]
    assert_moves_and_holds(Pair(pair.layout, pair.held, pair.sent, pair.model, {**ADAPTERS, **pair.training}))
