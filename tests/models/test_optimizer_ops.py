"""Updates on hosts: gradient buffers that are left on the GPU, and bytes that a server moves."""

from __future__ import annotations

from typing import Any

import pytest

from simulator import models
from simulator.config import load_workload
from simulator.models.optimizer import optimizer_ops, server_update_bytes
from simulator.operations.weights import elements
from simulator.program import Compute, Memory
from tests.support.jobs import job
from tests.support.layers import SIZES, make


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


@pytest.mark.parametrize("gradients", [1, 2, 8])
@pytest.mark.parametrize(
    ("training", "states", "copied"),
    [
        ({}, 12, 2),  # fp32 masters and two moments; bf16 is written
        ({"optimizer": {"master_weights": False, "state_dtype": "bf16"}}, 6, 0),  # the weights are those in bf16
    ],
)
@pytest.mark.parametrize(("clip", "passes"), [(None, 0), (1.0, 2)])
def test_bytes_of_an_update_on_servers(
    gradients: int, training: dict[str, Any], states: int, copied: int, clip: float | None, passes: int
) -> None:
    """States are read and written. So many gradients of fp32 are read, and to clip them they are read and written once
    more. The working copy is written where there are master weights."""
    work = make(*SIZES[0], precision="bf16", grad_dtype="fp32", grad_clip=clip, **training)
    assert server_update_bytes(work, gradients) == 2 * states + 4 * (gradients + passes) + copied
