"""Experts of Megatron-Core by PyTorch's kernels, as core_v0.19 launches them (megatron/core/transformer/moe)."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator.config import Workload, load_workload
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.costs.launch import issued
from simulator.errors import InputError
from simulator.frameworks.megatron_core import EXPERTS
from simulator.models.experts import experts, mixture
from simulator.models.shapes import shapes
from simulator.operations.nodes import Ops
from simulator.program import Compute, GroupedMatmul, Matmul, Memory, StepPhase

MEASUREMENTS = Path(__file__).resolve().parents[2] / "calibration" / "measurements"
MOE: dict[str, Any] = {"experts": 8, "top_k": 2, "ffn_hidden": 512}


def workload(framework: str = "megatron_core_local", moe: dict[str, Any] = MOE, **training: Any) -> Workload:
    """Return a job of 2,048 tokens, 1,024 wide, of which 512 go to each of 8 experts on the mean."""
    model = {"layers": 2, "hidden": 1024, "heads": 8, "ffn_hidden": 2048, "vocab": 1024, "position": "rope"}
    plain = {"norm": "rmsnorm", "activation": "swiglu", "bias": False, "tied_embeddings": False, "moe": moe}
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


def test_cublas_is_called_for_each_expert_with_tokens() -> None:
    """Eight experts in a grouped kernel are its launch and seven calls more, of five with tokens four, of none none.

    A product of its own is one launch, of whatever size.
    """
    grouped = named(passes(workload("megatron_core"))[0], "moe.fc1")[0]
    assert issued(grouped) == {"forward_grouped": 1, "expert": 7}
    five, none = (Compute("x", GroupedMatmul(loads, 8, 8), StepPhase("F")) for loads in ((9, 0, 9, 9, 0, 9, 9), (0,)))
    assert (issued(five)["expert"], issued(none)) == (4, {"forward_grouped": 1})
    assert issued(named(passes(workload())[0], "moe.fc1")[0]) == {"forward_matmul": 1}


def test_a_call_for_an_expert_takes_the_mean_of_those_measured() -> None:
    """Turns 1 and 2 of `grouped-calls.csv` have sizes that cuBLAS met in turn 0.

    Hosts of H100s issue Megatron-Core's products in 42.69 us in place of 61.62, and these calls as much faster. Other
    software has one launch for all experts.
    """
    with (MEASUREMENTS / "grouped-calls.csv").open(encoding="utf-8") as file:
        calls = [float(row["us_mean"]) for row in csv.DictReader(file) if int(row["turn"]) > 0]
    mean = sum(calls) / len(calls) * 1e-6
    for gpu, seconds in (("h200-sxm-141gb", mean), ("h100-sxm-80gb", mean * 42.69 / 61.62)):
        costs = Costs.from_profile(load_profile(gpu), workload("megatron_core").software)
        assert costs.launch["expert"] == pytest.approx(seconds, rel=1e-3)
    assert "expert" not in Costs.from_profile(load_profile("h200-sxm-141gb"), workload("pytorch").software).launch


def test_searches_for_kernels_pass_where_their_sizes_are_remembered() -> None:
    """Most products have new sizes in the first ten steps, few after forty.

    Sizes that cuBLAS remembers are searched for no more. It remembers 8,192. A run with more of them meets some
    again that are forgotten, and has searches to the end.
    """
    with (MEASUREMENTS / "expert-calls.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

    def share(job: str, kind: str, steps: range) -> float:
        some = [row for row in rows if row["job"] == job and int(row["step"]) in steps]
        return sum(int(row[kind]) for row in some) / sum(int(row["calls"]) for row in some)

    for job in ("mc1_moe_e8", "mc1_moe_e8_s4k_shared"):
        assert share(job, "new", range(10)) > 0.6
        assert share(job, "new", range(40, 60)) < 0.1
        assert share(job, "met_slow", range(100)) < 0.05
    assert share("mc1_moe_e8_s4k_shared", "forgotten", range(100)) == 0
    assert share("mc1_moe_e8", "forgotten_slow", range(80, 100)) > 0.2


def test_an_expert_without_tokens_has_no_products_but_a_gradient_of_zeros() -> None:
    """Four of eight experts get all tokens, three times as many go to the first as to each other.

    Their activations share what is read and written by their tokens. All eight gradients are added, four of which were
    set to zero: 1,024 x 1,024 numbers of 2 bytes.
    """
    job = workload()
    loads = (1536, 512, 512, 512, 0, 0, 0, 0)
    z, whole = shapes(job), experts(job)
    nodes = mixture(z, replace(whole, loads=loads)).nodes
    backward = tuple(op for one in nodes for op in (*one.input_grad, *one.weight_grad))
    assert [len(named(backward, f"moe.fc1 {name}")) for name in ("dgrad", "wgrad", "grad add")] == [4, 4, 8]
    zeros = [op.kernel for op in named(backward, "moe.fc1 wgrad zero")]
    assert zeros == [Memory("zero", 0.0, 2.0 * 1024 * 1024)] * 4
    swiglu = [op.kernel for op in named(tuple(op for one in nodes for op in one.forward), "moe.swiglu")]
    assert [kernel.bytes for kernel in swiglu] == pytest.approx([2 * 3 * load * 512 for load in loads[:4]])
    biases = EXPERTS.biased
    assert biases is not None
    assert len(named(biases(z, replace(whole, loads=loads), "row")[0], "moe.bias weigh")) == 4


@pytest.mark.parametrize(("padded", "copies"), [(False, 1), (True, 0)])
def test_counts_go_to_the_host_where_tokens_are_counted(padded: bool, copies: int) -> None:
    """Counts by expert are one copy, those by rank and expert another (``num_global_tokens_per_local_expert``)."""
    capacity = {"capacity_factor": 1.0, "pad_to_capacity": True} if padded else {}
    forward, _ = passes(workload(moe={**MOE, **capacity}))
    numbers = [len(named(forward, f"moe.{name}")) for name in ("counts to host", "counts by rank to host")]
    assert numbers == [copies, copies]


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
