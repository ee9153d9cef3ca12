"""Experts in 8 bits: each has casts of its own, and its rows are padded, as Transformer Engine and Megatron-Core do."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.config import Workload, load_workload
from simulator.costs.launch import issued
from simulator.models.experts import experts, mixture
from simulator.models.shapes import shapes
from simulator.program import Compute, Memory

#: 2,048 tokens go to two of four experts each: 1,024 rows of 512 for each.
HIDDEN, FFN, EXPERTS, ROWS = 512, 256, 4, 4096
BF16 = 2
HYBRIDEP = {
    **{"parallelism.ep": 2, "parallelism.dp": 2, "training.global_batch": 2},
    "parallelism.dispatcher": "hybridep",
}


def workload(recipe: str | None, **changes: Any) -> Workload:
    model = {"layers": 2, "hidden": HIDDEN, "heads": 4, "ffn_hidden": 2048, "vocab": 1024, "position": "rope"}
    plain = {"norm": "rmsnorm", "activation": "swiglu", "bias": False, "tied_embeddings": False}
    moe = {"experts": EXPERTS, "top_k": 2, "ffn_hidden": FFN}
    training: dict[str, Any] = {"seq": 2048, "global_batch": 1}
    if recipe:
        training["fp8"] = {"recipe": recipe}
    job = {"model": {**model, **plain, "moe": moe}, "framework": "megatron_core", "training": training}
    return load_workload({**job, "parallelism": {"dp": 1}, "cluster": {"name": "dgx_h200", "nodes": 1}}, changes)


def launched(job: Workload, begins: str) -> list[Compute]:
    """Return the kernels of the mixture of experts whose names begin so, forward and backward."""
    nodes = mixture(shapes(job), experts(job)).nodes
    ops = [op for node in nodes for op in (*node.forward, *node.backward)]
    return [op for op in ops if isinstance(op, Compute) and op.name.startswith(begins)]


def read_bytes(ops: list[Compute]) -> float:
    return sum(op.kernel.read_bytes for op in ops if isinstance(op.kernel, Memory))


@pytest.mark.parametrize(("recipe", "n_kernels"), [("te_current", 3), ("te_blockwise", 1)])
def test_rows_of_each_expert_are_cast_by_kernels_of_their_own(recipe: str, n_kernels: int) -> None:
    """Current scaling has a magnitude, a scale and a cast. All but the first expert's are launched within its call."""
    casts = launched(workload(recipe), "moe.fc1 input ")
    assert [op.within_call for op in casts] == [False] * n_kernels + [True] * n_kernels * (EXPERTS - 1)
    whole = BF16 * ROWS * HIDDEN
    assert read_bytes([op for op in casts if op.name.endswith("both ways")]) == pytest.approx(whole)
    assert issued(casts[-1]) == {"expert": 1}


def test_delayed_scaling_casts_rows_of_all_experts_at_once_and_each_weight() -> None:
    """``nvte_multi_cast_transpose`` takes all rows; a weight is cast when its copy is made, by a call for each."""
    job = workload("te_delayed")
    (rows,) = launched(job, "moe.fc1 input ")
    weights = launched(job, "moe.fc1 weight ")
    assert read_bytes([rows]) == BF16 * ROWS * HIDDEN
    assert read_bytes(weights) == pytest.approx(BF16 * EXPERTS * HIDDEN * 2 * FFN)
    assert [op.within_call for op in weights] == [False] * EXPERTS


def test_rows_are_copied_into_padded_places_and_back() -> None:
    """Rows and outputs of 512 numbers each way, and a probability for each row, forward and backward."""
    padded, cut = launched(workload("te_delayed"), "moe.pad"), launched(workload("te_delayed"), "moe.unpad")
    assert [op.name.removeprefix("moe.") for op in (*padded, *cut)] == [
        *("pad", "pad probs", "pad probs bwd", "pad bwd"),
        *("unpad", "unpad bwd"),
    ]
    assert read_bytes([*padded, *cut]) == 4 * BF16 * ROWS * HIDDEN + 2 * 4 * ROWS


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (None, {}),
        ("te_delayed", {"model.moe.capacity_factor": 1.0}),
        ("te_delayed", HYBRIDEP),
    ],
)
def test_nothing_is_padded_in_16_bits_in_fixed_places_or_behind_a_dispatcher_that_pads(
    recipe: str | None, changes: dict[str, Any]
) -> None:
    """HybridEP's permutation pads on its way."""
    assert launched(workload(recipe, **changes), "moe.pad") == []
