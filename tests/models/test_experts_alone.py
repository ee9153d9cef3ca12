"""Experts whose products run one after another, as Megatron-Core's local modules do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from simulator import models
from simulator.config import load_workload
from simulator.program import Compute, GroupedMatmul, Matmul, Memory, kernels_of
from tests.support.experts import job
from tests.support.layers import traffic


def products(ops: Iterable[Any]) -> Counter[tuple[str, int, int, int]]:
    """Count the experts' products, by role and sizes."""
    kernels = [one for op in ops for one in kernels_of(op) if one.name.startswith("moe.fc")]
    return Counter(
        (one.kernel.role, one.kernel.m, one.kernel.n, one.kernel.k) for one in kernels if isinstance(one.kernel, Matmul)
    )


def test_an_expert_has_its_products_however_few_its_rows() -> None:
    """16 tokens choose two of 8 experts each: 4 rows an expert, fewer than the columns of any product.

    Gate and up together have 2 x 256 columns of 256, down has 256 of 256. Backward each has a product for the gradient
    of its rows and one for that of its weights, in which the 4 rows are summed over.
    """
    layer = models.layer(load_workload(job(framework="megatron_core_local", training={"seq": 16, "global_batch": 8})))
    assert products(layer.forward) == {("fwd", 4, 512, 256): 8, ("fwd", 4, 256, 256): 8}
    assert products(layer.backward) == {
        ("dgrad", 4, 256, 512): 8,
        ("dgrad", 4, 256, 256): 8,
        ("wgrad", 512, 256, 4): 8,
        ("wgrad", 256, 256, 4): 8,
    }


def test_an_expert_without_rows_has_nothing_but_zeros_for_its_weights() -> None:
    """All 16 tokens choose the same two of 8 experts, whose 4 products have 16 rows each. The other 6 have none, but
    gradients of their weights are set to zero: 2 bytes of 512 x 256 and of 256 x 256 each."""
    chosen = {"token_distribution": [0.5, 0.5, 0, 0, 0, 0, 0, 0]}
    training = {"seq": 16, "global_batch": 8}
    layer = models.layer(load_workload(job(framework="megatron_core_local", training=training, moe=chosen)))
    assert products(layer.forward) == {("fwd", 16, 512, 256): 2, ("fwd", 16, 256, 256): 2}
    assert sum(products(layer.backward).values()) == 8
    zeros = [one for one in traffic((*layer.forward, *layer.backward)) if re.fullmatch(r"moe\.fc.* zero", one[0])]
    assert Counter(zeros) == {
        ("moe.fc1 wgrad zero", 0, 2 * 512 * 256): 6,
        ("moe.fc2 wgrad zero", 0, 2 * 256 * 256): 6,
    }


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_of_weights_alone_are_added_up_in_grouped_products(fused: bool) -> None:
    """The buffer is in fp32. Where products do not add to it they write bf16, as products of rows always do."""
    layer = models.layer(load_workload(job(training__gradient_accumulation_fusion=fused)))
    kernels = [one.kernel for op in (*layer.forward, *layer.backward) for one in kernels_of(op)]
    grouped = [one for one in kernels if isinstance(one, GroupedMatmul)]
    assert {(one.role, one.out_dtype or one.dtype, one.accumulate) for one in grouped} == {
        ("fwd", "bf16", False),
        ("dgrad", "bf16", False),
        ("wgrad", "fp32" if fused else "bf16", fused),
    }


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_gradients_of_experts_biases_are_sums_of_rows(ep: int) -> None:
    """128 tokens go to two experts each, so that 256 rows of gradients are read, 512 wide of gate and up, and 256 wide
    of down. A row for each of a rank's 8 / ep experts is written, in the 2 bytes of a weight."""
    layout = {"dp": ep, "ep": ep}
    layer = models.layer(load_workload(job(framework="pytorch", model__bias=True, parallelism=layout)))
    sums = [one for one in traffic(layer.backward) if re.fullmatch(r"moe\.fc. bias grad", one[0])]
    assert sums == [
        ("moe.fc2 bias grad", 2 * 256 * 256, 2 * 8 // ep * 256),
        ("moe.fc1 bias grad", 2 * 256 * 512, 2 * 8 // ep * 512),
    ]


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (4, 1), (1, 2), (2, 4)])
def test_a_rank_has_its_part_of_experts_weights(ep: int, etp: int) -> None:
    """8 experts have 512 x 256 for gate and up, and 256 x 256 back. A rank has 8 / ep of them, whose first is split by
    rows over etp and whose second by columns."""
    layer = models.layer(load_workload(job(parallelism={"tp": etp, "etp": etp, "dp": ep, "ep": ep})))
    found = {one.name: (one.shape, one.whole, one.sharded_over) for one in layer.weights if ".experts." in one.name}
    over, local = ("ep", "etp"), 8 // ep
    assert found == {
        "mlp.experts.fc1.weight": ((local, 512 // etp, 256), (8, 512, 256), over),
        "mlp.experts.fc2.weight": ((local, 256, 256 // etp), (8, 256, 256), over),
    }


def test_a_host_waits_for_the_counts_of_experts_that_are_all_on_its_gpu() -> None:
    """Without expert parallelism too: 8 counts of 8 bytes each go to the host, which waits for them."""
    ops = models.layer(load_workload(job(training={"seq": 16, "global_batch": 8}))).forward
    (copy,) = [op for op in ops if isinstance(op, Compute) and op.name == "moe.counts to host"]
    assert isinstance(copy.kernel, Memory)
    assert (copy.kernel.read_bytes, copy.kernel.write_bytes, copy.host_waits) == (64.0, 64.0, True)
