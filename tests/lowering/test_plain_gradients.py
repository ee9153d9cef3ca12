"""Gradients of plain PyTorch (eager): when they are added up, copied and given back, in the program and in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import simulator
from simulator.analysis.training.memory import second_step_warning
from simulator.config import Workload, load_workload
from simulator.lowering import build_program
from simulator.models import made_gradient_bytes, parameters, rank_parts, state_bytes, weights_of
from simulator.operations.weights import elements
from simulator.program import Memory, kernels_of

MODEL = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 1024, "tied_embeddings": False}
ONE = {"precision": "bf16", "grad_dtype": "bf16", "optimizer": {"master_weights": False, "state_dtype": "bf16"}}
APART = {"precision": "bf16", "grad_dtype": "fp32"}


def job(m: int, training: dict[str, Any] = ONE, framework: str = "pytorch", **layout: Any) -> Workload:
    """``m`` micro-batches of a model that is trained in plain PyTorch."""
    sizes = {"seq": 128, "micro_batch": 2, "global_batch": 2 * m * layout.get("dp", 1)}
    return load_workload(
        {
            "model": MODEL,
            "training": {**sizes, **training},
            "framework": framework,
            "parallelism": layout,
            "cluster": "dgx_h100",
        }
    )


def moved(workload: Workload, name: str) -> tuple[float, float]:
    """Bytes read and written in a step by the kernels of one rank whose names end in ``name``."""
    read = written = 0.0
    for _, _, step in build_program(workload).roles[0].steps():
        for op in getattr(step.op, "ops", ()):
            for kernel in kernels_of(op):
                if kernel.name.endswith(name) and isinstance(kernel.kernel, Memory):
                    read += kernel.kernel.read_bytes
                    written += kernel.kernel.write_bytes
    return read, written


@pytest.mark.parametrize("m", [1, 2, 5])
def test_the_first_gradients_of_a_step_are_not_added_to_anything(m: int) -> None:
    """Autograd keeps the first as it is: m - 1 times are two bf16 numbers per parameter read, and one written."""
    params = parameters(job(m))
    assert moved(job(m), "grad add") == (4.0 * params * (m - 1), 2.0 * params * (m - 1))


@pytest.mark.parametrize("m", [1, 2, 5])
def test_a_buffer_of_another_type_is_zeroed_and_added_to_each_time(m: int) -> None:
    """bf16 gradient and fp32 sum read, sum written, m times; before that 4 bytes per parameter are cleared."""
    work = job(m, APART)
    params = parameters(work)
    assert moved(work, "grad add") == (6.0 * params * m, 4.0 * params * m)
    assert moved(work, "zero gradients") == (0.0, 4.0 * params)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_ddp_scales_gradients_into_buckets_once_a_step(m: int, overlap: bool) -> None:
    """Each gradient is read and written once on its way, whatever the number of micro-batches; without DDP not at
    all."""
    work = job(m, dp=2, overlap={"grad_reduce": overlap})
    size = 2.0 * parameters(work)
    assert moved(work, "grad to bucket") == ((size, size) if overlap else (0.0, 0.0))
    assert moved(work, "grad add")[1] == size * (m - 1)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("kept", [True, False])
def test_fsdp_copies_what_it_gathers_and_reduces(m: int, kept: bool) -> None:
    """Per micro-batch: all parameters are copied out of the gathered buffer for the forward pass, 2 bytes each, and
    layers once more for the backward pass unless they are kept; a shard of 1/n of that is copied in before, and cast
    from fp32 before that; gradients go from bf16 to the fp32 buffer that is reduced. None is added to another: they are
    added up in shards."""
    n = 4
    work = job(m, APART, dp=n, zero=3, reshard_after_forward=not kept)
    params = parameters(work)
    layers = sum(elements(part.weights) for part in rank_parts(work, 0) if part.is_unit)
    gathered = m * (params + (0 if kept else layers))
    assert moved(work, "copy out") == (2.0 * gathered, 2.0 * gathered)
    assert moved(work, "gather copy in") == (2.0 * gathered / n, 2.0 * gathered / n)
    assert moved(work, "fsdp.cast") == (4.0 * gathered / n, 2.0 * gathered / n)
    assert moved(work, "reduce copy in") == (2.0 * params * m, 4.0 * params * m)
    assert moved(work, "grad add") == (0.0, 0.0)
    # Shards are the optimizer's own fp32 weights: 4 bytes of each and of two moments, and of the gradients.
    assert state_bytes(work, 0).weights == 0
    assert state_bytes(work, 0).total == (12 + 4) * params / n


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("gather", ["fp8", None])
def test_shards_gathered_in_8_bits_are_measured_before_they_are_cast(m: int, gather: str | None) -> None:
    """Each of n = 4 ranks casts its shard for the forward and for the backward pass, fp32 to bf16: 4 bytes read, 2
    written. Matrices of layers that are gathered in 8 bits are cast to 1 byte. Before the forward pass their largest
    magnitude is looked for, which reads their 4 bytes once more."""
    n = 4
    recipe = {"recipe": "torchao_tensorwise", **({"gather": gather} if gather else {})}
    sizes = {"seq": 128, "micro_batch": 2, "global_batch": 2 * m * n, "fp8": recipe}
    model = MODEL | {"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False}
    work = load_workload(
        {
            "model": model,
            "training": sizes,
            "framework": {"name": "torchtitan", "compile": True},
            "parallelism": {"dp": n, "zero": 3},
            "cluster": "dgx_h200",
        }
    )
    layers = [part for part in rank_parts(work, 0) if part.is_unit]
    # Of a layer 4 h^2 in attention, and 3 products with 4 h.
    matrices = len(layers) * (4 + 3 * 4) * MODEL["hidden"] ** 2
    forward, backward = parameters(work), sum(elements(part.weights) for part in layers)
    narrow = matrices if gather else 0
    cast = moved(work, "fsdp.cast")
    assert cast == (m * 4.0 * (forward + backward) / n, m * (2.0 * (forward + backward) - 2 * narrow) / n)
    assert moved(work, "fsdp.amax") == (m * 4.0 * narrow / n, 0.0)


@pytest.mark.parametrize(
    ("layout", "made"),
    [
        ({}, 2.0),
        ({"dp": 2}, 0.0),  # in DDP's buckets
        ({"dp": 2, "overlap": {"grad_reduce": False}}, 2.0),
        ({"dp": 2, "zero": 3}, 1.0),
    ],
)
@pytest.mark.parametrize("m", [1, 2])
def test_gradients_are_there_from_their_backward_pass_to_the_optimizer(
    layout: dict[str, Any], made: float, m: int
) -> None:
    """Bytes per parameter; of those in buckets there is a second set where several micro-batches are added up first."""
    work = job(m, **layout)
    assert made_gradient_bytes(work, weights_of(rank_parts(work, 0))) == made * parameters(work)
    apart = 2.0 if m > 1 and made == 0 else 0.0
    assert state_bytes(work, 0).gradients == (max(made, 2.0 if not made else 0.0) + apart) * parameters(work)
    (memory,) = {memory.stage: memory for memory in simulator.run(work).memories}.values()
    assert sum(memory.contents.values()) == pytest.approx(memory.total)
    steps = [step for role in build_program(work).roles[:1] for _, _, step in role.steps()]
    held = sum(step.alloc_bytes - step.free_bytes for step in steps)
    assert held == pytest.approx(0.0, abs=1.0)
    assert next(step for step in steps if step.label == "optimizer").free_bytes == made * parameters(work)


@pytest.mark.parametrize("m", [2, 8])
def test_a_stage_of_torch_receives_into_a_buffer_per_micro_batch(m: int) -> None:
    """An activation of b s h bf16 numbers for each micro-batch, and a gradient, but for the ends of the pipeline."""
    result = simulator.run(job(m, pp=4))
    each = 2.0 * 2 * 128 * 256
    ends = {0, 3}
    for memory in result.memories:
        assert memory.static.receives == m * each * (1 if memory.stage in ends else 2)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}])
def test_the_second_step_of_ddp_may_hold_its_first_bucket(m: int, layout: dict[str, Any]) -> None:
    """All gradients, 2 bytes each, lie in one bucket in the first step, and in others from the second on; both may be
    there then. A GPU that steps but the second fit into is told of with a warning, no other."""
    result = simulator.run(job(m, **layout))
    params = sum(elements(part.weights) for part in rank_parts(result.workload, 0))
    memory = max(result.memories, key=lambda one: one.second_step)
    assert memory.static.first_step_bucket == 2 * params
    assert memory.second_step == memory.allocated + memory.static.overhead + 2 * params
    assert result.to_dict()["memory"]["second_step_bytes"] == memory.second_step
    kept = replace(memory, cached=0.0)  # so little is made in segments of more
    for capacity, told in ((kept.total - 1, False), (kept.total, True), (kept.second_step, False)):
        assert bool(second_step_warning([replace(kept, capacity=capacity)])) == told
    assert not any("second step" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    ("training", "layout"),
    [
        (ONE, {"dp": 1}),
        (ONE, {"dp": 2, "overlap": {"grad_reduce": False}}),
        (ONE, {"dp": 2, "zero": 3}),
        (APART, {"dp": 2}),  # reduced by hand
        ({}, {"framework": "megatron_core", "dp": 2}),  # Megatron's buffers stay
    ],
)
def test_other_second_steps_are_like_any(training: dict[str, Any], layout: dict[str, Any]) -> None:
    assert "second_step_bytes" not in simulator.run(job(1, training, **layout)).to_dict()["memory"]
