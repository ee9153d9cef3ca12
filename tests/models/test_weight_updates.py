"""Optimizers of each kind of weights, and states and matrices under ZeRO."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.api import run
from simulator.config import Workload, load_workload
from simulator.errors import InputError
from simulator.models import optimizer_ops, paged_state_bytes, rank_parts, state_bytes, weights_of
from simulator.models.tuning import kinds_of_weight
from simulator.models.weight_updates import weight_updates
from simulator.operations.weights import Weight, elements
from simulator.program import AllToAll, Axis, Compute, Matmul, Memory
from tests.support import jobs
from tests.support.unadvised import without_advice  # noqa: F401

#: Two layers of 64 wide, untied.
SIZES: dict[str, Any] = {
    "model": {"layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 256, "vocab": 512, "tied_embeddings": False},
    "training": {"seq": 32, "global_batch": 8},
}


def job(optimizer: dict[str, Any], **changes: Any) -> Workload:
    """A small model with this optimizer, gradients in fp32 and masters beside weights in bf16."""
    model = SIZES["model"] | changes.pop("model", {})
    return load_workload(jobs.job(model=model, training={**SIZES["training"], "optimizer": optimizer}, **changes))


def weights(work: Workload) -> tuple[Weight, ...]:
    return weights_of(rank_parts(work, 0))


def of_kind(work: Workload, kind: str) -> list[Weight]:
    return [weight for weight in weights(work) if kind in kinds_of_weight(weight)]


def test_every_weight_has_its_kinds() -> None:
    """Four products of a layer have matrices and biases. Norms, here LayerNorm, have a weight and a bias each."""
    work = job({"name": "adamw"})
    kinds = ("embedding", "head", "norms", "biases", "matrices", "vectors")
    number = {kind: len(of_kind(work, kind)) for kind in kinds}
    assert number == {"embedding": 2, "head": 1, "norms": 5 * 2, "biases": 4 * 2 + 5, "matrices": 4 * 2, "vectors": 18}
    assert all(kinds_of_weight(weight) for weight in weights(work))


def test_experts_and_routers_are_kinds_too() -> None:
    """Experts' weights are matrices of layers, a router's too."""
    work = job({"name": "adamw"}, model={"moe": {"experts": 4, "top_k": 2, "ffn_hidden": 64}})
    assert {kind for weight in of_kind(work, "experts") for kind in kinds_of_weight(weight)} == {
        *("experts", "matrices", "biases", "vectors")
    }
    assert [kinds_of_weight(weight) for weight in of_kind(work, "router")] == [{"router", "matrices"}] * 2


def test_muon_updates_the_matrices_of_layers_and_adamw_the_rest() -> None:
    """One state of 4 bytes for the matrices, two for all others, and 4 bytes of master weights for all."""
    work = job({"name": "muon"})
    matrices = elements(of_kind(work, "matrices"))
    muon, adamw = weight_updates(work, weights(work))
    assert sum(parameter.elements for parameter in muon.parameters) == matrices
    every = elements(weights(work))
    assert sum(parameter.elements for parameter in adamw.parameters) == every - matrices
    assert state_bytes(work, 0).optimizer == 4 * every + 4 * matrices + 8 * (every - matrices)


def test_a_group_takes_its_weights_before_others() -> None:
    """Norms go with the first group, though they are vectors; biases with the second; the rest with SGD, stateless."""
    groups = [{"weights": "norms", "name": "adamw_8bit"}, {"weights": "vectors", "name": "lion"}]
    work = job({"name": "sgd", "groups": groups})
    norms, vectors, rest = weight_updates(work, weights(work))
    assert len(norms.parameters) == len(of_kind(work, "norms"))
    assert len(norms.parameters) + len(vectors.parameters) == len(of_kind(work, "vectors"))
    # Tensors under 4,096 elements keep both states in fp32; Lion has one.
    assert sum(norms.implementation.state_bytes(one, norms.types) for one in norms.parameters) == 8 * 64 * 10
    assert rest.state_bytes(paged=False) == 0
    assert vectors.state_bytes(paged=False) == 4 * sum(one.elements for one in vectors.parameters)


def test_each_rank_keeps_the_states_of_its_shard() -> None:
    """Blocks, and factors of a matrix, are of what is updated here: AdamW in 8 bits over 4 ranks takes a fourth."""
    alone, shared = (job({"name": "adamw_8bit"}, parallelism={"dp": dp, "zero": zero}) for dp, zero in ((4, 0), (4, 1)))
    large = [weight for weight in weights(alone) if weight.elements >= 4 * 4096]
    here, there = (
        sum(update.implementation.state_bytes(one, update.types) for one in update.parameters if one.elements >= 4096)
        for work in (alone, shared)
        for update in weight_updates(work, large)
    )
    assert here == 2 * (1 + 4 / 256) * elements(large)
    assert there == here / 4


def test_ranks_of_zero_3_exchange_momentum_for_whole_matrices() -> None:
    """Shards in bf16 go out before the products, and updates come back; ranks of ZeRO 1 have whole matrices already."""
    work = job({"name": "muon"}, parallelism={"dp": 4, "zero": 3})
    matrices = elements(of_kind(work, "matrices"))
    ops = optimizer_ops(work, weights(work))
    exchanged = [op for op in ops if isinstance(op, AllToAll)]
    assert [(op.axis, op.nbytes) for op in exchanged] == [(Axis.DP, 2 * matrices / 4)] * 2
    products = [number for number, op in enumerate(ops) if isinstance(op, Compute) and isinstance(op.kernel, Matmul)]
    assert ops.index(exchanged[0]) < products[0]
    assert products[-1] < len(ops) - 1 - ops[::-1].index(exchanged[1])
    sharing = job({"name": "muon"}, parallelism={"dp": 4, "zero": 1})
    assert not [op for op in optimizer_ops(sharing, weights(sharing)) if isinstance(op, AllToAll)]


@pytest.mark.parametrize(("zero", "ranks"), [(0, 1), (1, 4), (3, 4)])
def test_ranks_deal_out_whole_matrices(zero: int, ranks: int) -> None:
    """8 matrices over 4 ranks are 2 each, of 5 iterations with 3 products; without sharing every rank does all."""
    work = job({"name": "muon"}, parallelism={"dp": 4, "zero": zero})
    products = [op for op in optimizer_ops(work, weights(work)) if isinstance(getattr(op, "kernel", None), Matmul)]
    assert len(products) == 8 / ranks * 5 * 3


def test_newton_schulz_multiplies_the_short_side() -> None:
    """A matrix of 256 x 64: X X' of 64 x 64 by 256, its square, and the sum with X: 2 n (2 n m + n n) FLOPs, n = 64."""
    work = job({"name": "muon"})
    tall = [weight for weight in of_kind(work, "matrices") if weight.shape == (256, 64)]
    (muon, *_) = weight_updates(work, tall[:1])
    kernels = [op.kernel for op in muon.ops() if isinstance(op, Compute) and isinstance(op.kernel, Matmul)]
    assert sum(kernel.flops for kernel in kernels) == 5 * 2 * 64 * (2 * 64 * 256 + 64 * 64)
    assert [kernel.accumulate for kernel in kernels[:3]] == [False, True, True]
    # What a product adds to is copied first: 10 copies, one of them against its order, as the matrix is tall.
    copies = {op.name: op.kernel for op in muon.ops() if isinstance(op, Compute) and isinstance(op.kernel, Memory)}
    assert copies["optimizer.addmm copies"].launches == 9
    assert copies["optimizer.transpose"].read_bytes == 2 * 256 * 64


def test_paged_states_are_the_host_s() -> None:
    """Large tensors' states page; none is counted on the GPU, and the small ones' stay."""
    model = {"hidden": 512, "ffn_hidden": 2048}
    plain, paged = (
        job({"name": "adamw", "implementation": "bitsandbytes", "paged": pages}, model=model) for pages in (False, True)
    )
    large = 8 * sum(weight.elements for weight in weights(plain) if weight.elements >= 100_000)
    assert paged_state_bytes(plain, weights(plain)) == 0
    assert paged_state_bytes(paged, weights(paged)) == large
    assert state_bytes(plain, 0).optimizer - state_bytes(paged, 0).optimizer == large
    report = run(paged).to_dict()
    assert report["memory"]["host"]["peak_bytes"] == large
    assert any("training.optimizer.paged" in warning for warning in report["warnings"])
    assert "host" not in run(plain).to_dict()["memory"]


@pytest.mark.parametrize(
    ("optimizer", "key"),
    [
        ({"name": "lion", "implementation": "foreach"}, "implementation"),
        ({"name": "adamw_8bit", "state_dtype": "bf16"}, "state_dtype"),
        ({"name": "adamw", "paged": True}, "paged"),
        ({"implementation": "cpu"}, "implementation"),
        ({"threads": 2}, "threads"),
        ({"groups": [{"weights": "norms", "name": "muon"}]}, "groups.0.name"),
        ({"groups": [{"weights": "experts"}]}, "groups.0.weights"),
        ({"groups": [{"weights": "norms"}, {"weights": "norms", "name": "sgd"}]}, "groups.1.weights"),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(optimizer: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        job(optimizer)
    assert caught.value.key == f"training.optimizer.{key}"


def test_optimizers_that_need_whole_matrices_are_not_sharded_without_an_exchange() -> None:
    with pytest.raises(InputError, match="whole matrices") as caught:
        job({"name": "adafactor"}, parallelism={"dp": 2, "zero": 1})
    assert caught.value.key == "parallelism.zero"
    assert job({"name": "adafactor"}, parallelism={"dp": 2}).training.optimizer.implementation == "for_loop"


@pytest.mark.usefixtures("without_advice")
def test_a_fused_optimizer_makes_a_large_model_fit() -> None:
    """Llama 2 70B by FSDP on 16 GPUs of 80 GB: PyTorch's default AdamW needs the root of the second moment beside its
    states, 4 bytes for each of 68,977 million parameters over 16 ranks (16.1 GiB); one kernel needs nothing."""
    reports = {}
    for library in ("foreach", "fused"):
        training = {"seq": 2048, "global_batch": 16, "recompute": "full", "optimizer": {"implementation": library}}
        model = {"preset": "llama2-70b"}
        stack = {"framework": "pytorch", "parallelism": {"zero": 3}, "cluster": {"name": "dgx_a100", "nodes": 2}}
        reports[library] = run({"name": library, "model": model, "training": training, **stack}).to_dict()
    assert [reports[library]["memory"]["fits"] for library in ("foreach", "fused")] == [False, True]
    assert reports["foreach"]["time_breakdown_s"]["optimizer"] > 2 * reports["fused"]["time_breakdown_s"]["optimizer"]
