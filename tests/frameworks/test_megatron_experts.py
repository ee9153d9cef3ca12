"""Experts of Megatron-Core by PyTorch's kernels, as core_v0.19 launches them (megatron/core/transformer/moe)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from simulator.config import Workload, load_workload
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.costs.launch import MET_SIZES_S, NEW_SIZES_S, issued
from simulator.errors import InputError
from simulator.models.experts import experts, mixture
from simulator.models.shapes import shapes
from simulator.operations.nodes import Ops
from simulator.program import Compute, GroupedMatmul, Matmul, Memory, StepPhase

MOE: dict[str, Any] = {"experts": 8, "top_k": 2, "ffn_hidden": 512}


def workload(framework: str = "megatron_core_local", **training: Any) -> Workload:
    """Return a job of 2,048 tokens, 1,024 wide, of which 512 go to each of 8 experts on the mean."""
    model = {"layers": 2, "hidden": 1024, "heads": 8, "ffn_hidden": 2048, "vocab": 1024, "position": "rope"}
    plain = {"norm": "rmsnorm", "activation": "swiglu", "bias": False, "tied_embeddings": False, "moe": MOE}
    attention = {"attention": "unfused"} if framework == "megatron_core_local" else {}
    return load_workload(
        {
            "model": {**model, **plain, **attention},
            "framework": framework,
            "training": {"seq": 2048, "micro_batch": 1, "global_batch": 1, **training},
            "cluster": "hgx_h200_8gpu",
        }
    )


def passes(job: Workload) -> tuple[Ops, Ops]:
    """Return all operations of the mixture of experts, forward and backward."""
    nodes = mixture(shapes(job), experts(job)).nodes
    return tuple(op for one in nodes for op in one.forward), tuple(op for one in nodes for op in one.backward)


def named(ops: Ops, name: str) -> list[Compute]:
    return [op for op in ops if isinstance(op, Compute) and op.name == name]


def test_each_expert_has_products_and_gradients_of_its_own() -> None:
    """Eight experts: eight products of 512 rows for each weight and role, and as many additions to buffers."""
    forward, backward = passes(workload())
    (first, *_), gradients = named(forward, "moe.fc1"), named(backward, "moe.fc1 grad add")
    assert first.kernel == Matmul(512, 1024, 1024)
    counts = Counter(op.name for op in (*forward, *backward) if isinstance(op, Compute))
    assert {counts[f"moe.{name}"] for name in ("fc1", "fc2", "fc1 dgrad", "fc2 wgrad", "swiglu")} == {8}
    assert len(gradients) == 8


def test_rows_are_summed_by_atomic_additions() -> None:
    """4,096 copies of tokens of 1,024 numbers: forward each number by itself, backward row by row.

    On an H200 a number takes 3.78 and 7.91 ps, longer than its bytes do: 16 and 33 us, behind a start of 2.5 us.
    """
    forward, backward = passes(workload())
    (scatter,), (index,) = named(forward, "moe.unpermute"), named(backward, "moe.permute bwd")
    costs = Costs.from_profile(load_profile("h200-sxm-141gb"), workload().software)
    for op, kind in ((scatter, "scatter_add"), (index, "index_add")):
        assert isinstance(op.kernel, Memory)
        assert (op.kernel.op, op.kernel.elements) == (kind, 4096 * 1024)
    seconds = [costs.kernel_s(op.kernel, "h200-sxm-141gb") for op in (scatter, index)]
    assert seconds == pytest.approx([2.5e-6 + 4096 * 1024 * each for each in (3.78e-12, 7.91e-12)])


def test_the_fused_permutation_is_a_kernel_each_way() -> None:
    """Transformer Engine's products of all experts are one grouped kernel here; without the flag PyTorch permutes."""
    fused, by_operations = passes(workload("megatron_core")), passes(workload("megatron_core", fused_permutation=False))
    assert isinstance(named(fused[0], "moe.fc1")[0].kernel, GroupedMatmul)
    assert not named(fused[0], "moe.unpermute zero")
    assert named(by_operations[0], "moe.unpermute zero")


def test_cublas_is_called_for_each_expert() -> None:
    """Eight experts are eight calls in a grouped kernel; a product of 512 rows has sizes that hardly come twice."""
    grouped = named(passes(workload("megatron_core"))[0], "moe.fc1")[0]
    assert issued(grouped)["expert"] == 8
    alone = named(passes(workload())[0], "moe.fc1")[0]
    assert issued(alone)["new_sizes"] == 1
    assert "new_sizes" not in issued(Compute("moe.fc1", Matmul(16, 1024, 1024), StepPhase("F")))
    assert MET_SIZES_S < NEW_SIZES_S


def test_biases_of_experts_are_added_expert_by_expert() -> None:
    """Eight times two kernels in fp32, a join and a cast, as `TEGroupedMLP._apply_bias` has them."""
    job = workload("megatron_core")
    biased = job.model_copy(update={"model": job.model.model_copy(update={"biases": ("experts",)})})
    counts = Counter(op.name for op in passes(biased)[0] if isinstance(op, Compute))
    assert (counts["moe.bias weigh"], counts["moe.bias add"]) == (8, 8)
    assert (counts["moe.bias join"], counts["moe.bias cast"]) == (1, 1)
    assert not named(passes(job)[0], "moe.bias weigh")


@pytest.mark.parametrize(
    ("framework", "fused"), [("megatron_core_local", True), ("pytorch", False)], ids=["local has none", "not Megatron"]
)
def test_a_permutation_that_the_software_does_not_have_is_refused(framework: str, fused: bool) -> None:
    with pytest.raises(InputError) as caught:
        workload(framework, fused_permutation=fused)
    assert caught.value.key == "training.fused_permutation"
