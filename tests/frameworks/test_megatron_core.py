"""Megatron-Core's kernels beside what Transformer Engine fuses: checkpoints of parts, routers, positions, counts."""

from __future__ import annotations

import csv
import gzip
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from simulator.config import Workload, load_workload
from simulator.config.loading import altered
from simulator.costs.launch import issued
from simulator.errors import InputError
from simulator.lowering import build_program
from simulator.models import stage_parts
from simulator.models.parts import Part
from simulator.operations.nodes import Ops
from simulator.program import AllToAll, Collective, Compute

TIMELINE = Path(__file__).resolve().parents[2] / "calibration/results/frameworks/mc2_ep_e8.timeline.csv.gz"
MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 512}
MLA = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}


def workload(model: dict[str, Any], ranks: int = 1, framework: str = "megatron_core", **training: Any) -> Workload:
    """Return a job of one layer; with experts each rank holds a part of them."""
    layout = {"dp": ranks, "ep": ranks} if "moe" in model else {"dp": ranks}
    return load_workload(
        {
            "model": {"layers": 1, "hidden": 256, "heads": 4, "vocab": 512, **model},
            "framework": framework,
            "training": {"seq": 128, "micro_batch": 1, "global_batch": ranks, **training},
            "parallelism": layout,
            "cluster": "hgx_h200_8gpu",
        }
    )


def only_layer(job: Workload) -> Part:
    return next(part for part in stage_parts(job, 0) if part.name in ("layer", "moe layer"))


@pytest.mark.parametrize(("replicas", "parameters"), [(2, 40e6), (40, 40e6), (64, 64e6)])
def test_a_bucket_has_forty_million_parameters_or_one_per_million_and_replica(replicas: int, parameters: float) -> None:
    """`DistributedDataParallel` of Megatron-Core chooses so. Gradients are kept in fp32, or in bf16."""
    for framework in ("megatron_core", "megatron_core_local"):
        job = workload({}, replicas, framework)
        assert job.parallelism.bucket_bytes == 4 * parameters
    assert workload({}, replicas, grad_dtype="bf16").parallelism.bucket_bytes == 2 * parameters


def test_parameters_are_gathered_in_buckets_of_as_many_as_gradients_have() -> None:
    """The embeddings and a layer are more than 900,000 parameters, as are two layers, and a layer, norm and head."""
    changes = {"parallelism.zero": 1, "parallelism.bucket_bytes": 4 * 900_000}
    (role,) = build_program(altered(workload({"layers": 4, "tied_embeddings": False}, 2), changes)).roles
    gathered = [
        step.op.nbytes / 2
        for lane in role.lanes.values()
        for step in lane
        if step.label.startswith("gather") and isinstance(step.op, Collective)
    ]
    layer = 12 * 256**2 + 13 * 256
    assert gathered == [512 * 256 + 128 * 256 + layer, 2 * layer, layer + 2 * 256 + 512 * 256]


def names(ops: Ops) -> list[str]:
    return [op.name for op in ops if isinstance(op, Compute)]


@pytest.mark.parametrize(
    ("attention", "again", "carriers"),
    [
        ("unfused", ["core_attn"], ["attn.softmax"]),
        ("unfused", ["layernorm"], ["attn.norm", "mlp.norm"]),
        ("unfused", ["mlp"], ["mlp.fc1"]),
        ("unfused", ["core_attn", "layernorm"], ["attn.norm", "attn.softmax", "mlp.norm"]),
        ("unfused", "full", ["attn.softmax"]),
        ("flash", "full", ["attn.flash"]),
        ("unfused", "ops", ["attn.softmax"]),
        ("flash", "ops", ["attn.norm"]),  # the output of fused attention is kept
    ],
)
def test_a_checkpoint_is_counted_with_one_of_its_kernels(
    attention: str, again: str | list[str], carriers: list[str]
) -> None:
    """Each has its random states, saved and set again: one around a layer, its core or its MLP, one around each norm.

    Megatron-Core's ``CheckpointWithoutOutput``, of norms, saves and sets them as its checkpoints of layers do
    (tensor_parallel/random.py). It is counted with attention, or else with the first kernel that runs again.
    """
    recompute = again if isinstance(again, str) else {"granularity": "selective", "modules": again}
    part = only_layer(workload({"attention": attention}, recompute=recompute))
    kernels = [op for op in part.recompute if isinstance(op, Compute)]
    assert [op.name for op in kernels if "checkpoint" in issued(op, "B")] == carriers
    assert not any("checkpoint" in issued(op, "F") for op in part.forward if isinstance(op, Compute))


def test_a_router_without_its_fused_kernel_runs_pytorchs() -> None:
    """Top-k, a softmax of the choices, and two maps of tokens to experts, filled with zeros first (router.py)."""
    fused, apart = (only_layer(workload({"moe": MOE}, unfused=unfused)) for unfused in ([], ["router"]))
    routed = [name.removeprefix("moe.router ") for name in names(apart.forward) if name.startswith("moe.router ")]
    assert routed == ["cast", "top-k", "softmax", "probs zero", "probs", "map zero", "map whole", "map", "map cast"]
    assert sum(name.startswith("moe.router ") for name in names(fused.forward)) == 3  # cast, softmax, top-k
    # Rows are put in order by Transformer Engine's kernel all the same, not by PyTorch's sort of the map.
    assert "moe.permute" in names(apart.forward)
    assert not {"moe.map turned", "moe.sort indices"} & set(names(apart.forward))


@pytest.mark.parametrize(
    ("model", "ordered", "ordered_back", "joins"),
    [({"position": "rope"}, 0, 0, 0), ({"position": "rope", "mla": MLA}, 1, 5, 3)],
)
def test_positions_without_their_fused_kernel_are_twelve_kernels(
    model: dict[str, Any], ordered: int, ordered_back: int, joins: int
) -> None:
    """Six for cosines and sines, six for the turn, for queries and for keys (``_apply_rotary_pos_emb_bshd``).

    Gradients need no cosines anew. Five kernels turn them back, and the empty rest of a head is zeros and a sum.

    Latent attention puts even elements before odd ones first. Gradients of the two halves go into zeros, and are added.
    It then joins the two parts of queries and of keys, and copies values (``multi_latent_attention.py``).
    """
    fused, apart = (only_layer(workload(model, unfused=unfused)) for unfused in ([], ["rotation"]))
    turned = [name for name in names(apart.forward) if name.startswith("attn.rope ")]
    assert Counter(name.split()[1] for name in turned) == {"q": 12 + ordered, "k": 12 + ordered}
    assert sum(name.startswith("attn.rope") for name in names(fused.forward)) == 2
    back = [name for name in names(apart.input_grad) if name.startswith("attn.rope ")]
    assert Counter(name.split()[1] for name in back) == {"q": 7 + ordered_back, "k": 7 + ordered_back}
    assert not any("cosine" in name for name in back)
    others = len(names(apart.forward)) - len(turned) - (len(names(fused.forward)) - 2)
    assert others == joins


def test_the_bias_of_queries_keys_and_values_can_be_a_kernel() -> None:
    fused, apart = (only_layer(workload({}, unfused=unfused)) for unfused in ([], ["qkv_bias"]))
    assert set(names(apart.forward)) - set(names(fused.forward)) == {"attn.qkv bias"}


@pytest.mark.parametrize(
    ("model", "framework", "part"),
    [
        ({}, "megatron_core", "router"),
        ({"position": "learned"}, "megatron_core", "rotation"),
        ({"bias": False}, "megatron_core", "qkv_bias"),
        ({"position": "rope", "mla": MLA}, "megatron_core", "qkv_bias"),
        ({"position": "rope", "mixers": ["no_rope"]}, "megatron_core", "rotation"),
        ({"position": "rope"}, "pytorch", "rotation"),
    ],
)
def test_a_part_without_a_fused_kernel_is_told(model: dict[str, Any], framework: str, part: str) -> None:
    with pytest.raises(InputError) as caught:
        workload(model, framework=framework, unfused=[part])
    assert (caught.value.key, caught.value.found) == ("training.unfused", part)


def test_deepspeeds_experts_exchange_tokens_alone() -> None:
    """There and back, forward and backward: neither probabilities nor Megatron-Core's kernels that sum counts."""
    part = only_layer(workload({"moe": MOE}, 2, "deepspeed"))
    exchanges = [op.name for op in (*part.forward, *part.backward) if isinstance(op, AllToAll)]
    assert exchanges == [f"ep.all_to_all {name}" for name in ("dispatch", "combine", "combine grad", "dispatch grad")]
    assert not [name for name in names(part.forward) if name.startswith("moe.counts")]


@pytest.mark.parametrize("framework", ["megatron_core", "megatron_core_local"])
def test_counts_and_probabilities_go_as_a_real_run_has_them(framework: str) -> None:
    """A run on two H200s has for each layer and micro-batch six exchanges, a gathering of counts, five copies to hosts.

    It permutes by PyTorch's kernels. Of eight layers and two micro-batches that is 96, 16 and 80 (mc2_ep_e8), the
    copies between the counts and the next exchange. Tokens go there and back, forward and backward. Probabilities go
    there, and their gradients back. The host waits for the last copy.
    """
    with gzip.open(TIMELINE, "rt", encoding="utf-8") as file:
        rows = sorted((float(row["start_s"]), row["name"]) for row in csv.DictReader(file) if row["rank"] == "0")
    kernels = [name for _, name in rows]
    gatherings = [number for number, name in enumerate(kernels) if "AllGather" in name]
    behind = [list(itertools.takewhile(lambda name: "SendRecv" not in name, kernels[at:])) for at in gatherings]
    attention = {"attention": "unfused"} if framework == "megatron_core_local" else {}
    model = {"moe": MOE, "bias": False, "activation": "swiglu", **attention}
    part = only_layer(workload(model, 2, framework, fused_permutation=False))
    passes = 8 * 2
    exchanges = [op for op in (*part.forward, *part.backward) if isinstance(op, AllToAll)]
    copies = [op for op in part.forward if isinstance(op, Compute) and op.name.endswith(" to host")]
    gathered = [op for op in part.forward if isinstance(op, Collective) and op.name == "ep.all_gather token counts"]
    assert len(exchanges) * passes == sum("SendRecv" in name for name in kernels)
    assert [sum("DtoH" in name for name in between) for between in behind] == [len(copies)] * passes
    assert len(gathered) * passes == len(gatherings)
    assert [op.host_waits for op in copies] == [False] * 4 + [True]
    assert not gathered[0].host_waits
