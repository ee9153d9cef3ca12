"""Experts whose products run one after another, as Megatron-Core's local modules do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from simulator import models
from simulator.config import load_workload
from simulator.program import Compute, Matmul, Memory, kernels_of
from tests.support.experts import job


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


def test_a_host_waits_for_the_counts_of_experts_that_are_all_on_its_gpu() -> None:
    """Without expert parallelism too: 8 counts of 8 bytes each go to the host, which waits for them."""
    ops = models.layer(load_workload(job(training={"seq": 16, "global_batch": 8}))).forward
    (copy,) = [op for op in ops if isinstance(op, Compute) and op.name == "moe.counts to host"]
    assert isinstance(copy.kernel, Memory)
    assert (copy.kernel.read_bytes, copy.kernel.write_bytes, copy.host_waits) == (64.0, 64.0, True)
