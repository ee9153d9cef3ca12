"""Gradient buffers beside an update on the host: set to zero where whole ones lie on the GPU, and else not there."""

from __future__ import annotations

import pytest

from simulator import models
from simulator.config import load_workload
from simulator.models.optimizer import optimizer_ops
from simulator.operations.weights import elements
from simulator.program import Compute, Memory
from tests.support.jobs import job


@pytest.mark.parametrize(("zero", "shares"), [(1, [1.0]), (2, [])])
def test_buffers_are_cleared_where_whole_gradients_lie_on_the_gpu(zero: int, shares: list[float]) -> None:
    """The host updates the weights, so that of an optimizer's kernels clearing alone is left to the GPU.

    ZeRO-1 keeps whole gradients there, in fp32: 4 bytes of each parameter are written. ZeRO-2 reduces each as it is
    made, and its shard goes to the host: no buffer is left.
    """
    work = load_workload(job(parallelism={"dp": 4, "zero": zero, "offload": {"optimizer": "cpu"}}))
    weights = models.layer(work).weights
    kernels = [op.kernel for op in optimizer_ops(work, weights) if isinstance(op, Compute)]
    assert all(isinstance(kernel, Memory) and kernel.op == "zero" for kernel in kernels)
    written = [kernel.write_bytes / (4.0 * elements(weights)) for kernel in kernels if isinstance(kernel, Memory)]
    assert written == shares
