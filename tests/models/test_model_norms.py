"""RMSNorm operation by operation: its kernels, what it keeps, and what a fused one saves."""

from __future__ import annotations

from typing import Any

import pytest

import simulator
from simulator.config import load_workload
from simulator.errors import InputError
from simulator.models.layer import layer
from simulator.models.norms import norm
from simulator.models.shapes import shapes
from simulator.program import Compute, Memory
from tests.support.frameworks import COMPILED, MEGATRON


def job(hidden: int = 1024, seq: int = 512, **training: Any) -> dict[str, Any]:
    sizes = {"layers": 2, "hidden": hidden, "heads": 8, "vocab": 32000, "norm": "rmsnorm", "activation": "swiglu"}
    return {
        "model": {**sizes, "position": "rope", "bias": False},
        "training": {"seq": seq, "micro_batch": 2, "global_batch": 16, **training},
        "framework": "pytorch",
        "parallelism": {"zero": 3},
        "cluster": {"name": "dgx_h100", "nodes": 1},
    }


def moved(ops: tuple[Any, ...]) -> float:
    return sum(op.kernel.bytes for op in ops if isinstance(op, Compute) and isinstance(op.kernel, Memory))


@pytest.mark.parametrize(("hidden", "seq"), [(1024, 512), (4096, 2048), (2048, 96)])
def test_bytes_per_element_are_those_of_its_operations(hidden: int, seq: int) -> None:
    """Forward, bytes per element: to fp32 2 + 4, square 4 + 4, mean 4, x / rms 4 + 4, to bf16 4 + 2, weight 2 + 2: 36.
    Backward: weight 4, to fp32 6, x / rms 8, its row's number 12 and the sum of that 4, the mean's gradient written 4,
    the square's: x copied 8, doubled 8, and times that 12; the sum of both gradients of x 12, to bf16 6: 84. The
    weight's: a product of 6, and a sum of 2 that ends in a row.
    """
    z = shapes(load_workload(job(hidden, seq, fused_rms_norm=False)))
    node = norm(z, "norm", saved="input", residual=False)
    elements = z.rows * hidden
    assert moved(node.forward) == 36 * elements
    assert moved(node.input_grad) == 84 * elements
    assert moved(node.weight_grad) == 8 * elements + 2 * hidden
    around = norm(z, "norm", saved="input", residual=True)
    assert moved(around.input_grad) == moved(node.input_grad) + 6 * elements
    # One kernel reads and writes each element once; backward it reads input and gradient.
    fused = norm(shapes(load_workload(job(hidden, seq))), "norm", saved="input", residual=False)
    assert (moved(fused.forward), moved(fused.input_grad)) == (4 * elements, 6 * elements)


@pytest.mark.parametrize("fused", [True, False])
def test_full_recompute_keeps_the_input_of_a_layer_alone(fused: bool) -> None:
    workload = load_workload(job(fused_rms_norm=fused, recompute="full"))
    assert sum(tensor.nbytes for tensor in layer(workload).saved) == shapes(workload).row_bytes


def test_it_keeps_its_input_in_fp32_and_what_the_weight_multiplies() -> None:
    """4 + 2 bytes per element in place of 2, for both norms of a layer; the residual stream itself is kept no more."""
    saved = [
        sum(tensor.nbytes for tensor in layer(load_workload(job(fused_rms_norm=fused))).saved)
        for fused in (False, True)
    ]
    assert saved[0] - saved[1] == 2 * (6 - 2) * 2 * 512 * 1024


def test_a_fused_kernel_gains_what_torchtitan_measured() -> None:
    """Torchtitan's pull request 181: "It improves MFU by +15% with FSDP2 7B, and compiled slightly by +1.2%"."""
    sizes = {"seq": 4096, "micro_batch": 1, "global_batch": 8}
    steps = [
        simulator.run(
            {
                "model": {"preset": "llama2-7b"},
                "framework": "pytorch",
                "training": {**sizes, "recompute": "ops", "fused_rms_norm": fused},
                "parallelism": {"zero": 3},
                "cluster": {"name": "dgx_h100", "nodes": 1},
            }
        ).spans.step_time_s
        for fused in (False, True)
    ]
    assert steps[0] / steps[1] == pytest.approx(1.15, abs=0.04)


@pytest.mark.parametrize("framework", [MEGATRON, COMPILED])
def test_only_eager_code_has_it(framework: Any) -> None:
    with pytest.raises(InputError, match="is one kernel") as caught:
        load_workload({**job(fused_rms_norm=False), "framework": framework})
    assert caught.value.key == "training.fused_rms_norm"
