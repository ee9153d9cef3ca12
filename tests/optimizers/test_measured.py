"""Optimizers beside what they took on an H200 (see `tests.support.measured`)."""

from __future__ import annotations

import pytest

from simulator.frameworks import FRAMEWORKS
from simulator.optimizers import OPTIMIZERS, Implementation, UpdatedTensor, UpdateTypes
from simulator.optimizers.update import Kernels
from simulator.program import Memory, StepPhase
from tests.support.measured import kernel_s, measured, played, profile

#: 16 layers of a model of 2,048 wide, and an embedding: 145 tensors, 1,038,811,136 parameters.
LAYER = (
    (2048, 2048),
    (512, 2048),
    (512, 2048),
    (2048, 2048),
    (8192, 2048),
    (8192, 2048),
    (2048, 8192),
    (2048,),
    (2048,),
)
SHAPES = (*LAYER * 16, (32064, 2048))
#: Name, library and type of what was measured; paged states were not counted by PyTorch, and are not compared.
CASES = [case for case in measured("optimizer") if "paged" not in case[1]]
#: Optimizers whose products make cuBLAS allocate its workspace, which the measurement counts as state.
WITH_PRODUCTS = ("muon", "adafactor")


def implementation(case: tuple[str, str, str]) -> Implementation:
    name, library, _ = case
    return OPTIMIZERS[name].implementations[library.split()[0]]


def types(case: tuple[str, str, str]) -> UpdateTypes:
    """States have the type of the weights where the library leaves it open."""
    states = implementation(case).state_dtypes
    return UpdateTypes(case[2], case[2], case[2] if case[2] in states and len(states) > 1 else states[0])


def parameters(case: tuple[str, str, str]) -> list[UpdatedTensor]:
    return [UpdatedTensor(shape) for shape in SHAPES if len(shape) > 1 or not OPTIMIZERS[case[0]].matrices_only]


def kernels(case: tuple[str, str, str]) -> Kernels:
    return tuple(
        op for kernels_of_round in implementation(case).rounds for op in kernels_of_round(parameters(case), types(case))
    )


@pytest.mark.parametrize("case", list(measured("optimizer")), ids="-".join)
def test_kernels_take_what_they_took(case: tuple[str, str, str]) -> None:
    """Within 10 %, of the kernels alone; the engine plays them, as the clock of products depends on what is around."""
    ops = kernels(case)
    launches = sum(op.kernel.launches or 1 if isinstance(op.kernel, Memory) else 1 for op in ops)
    timeline = played({StepPhase.OPTIMIZER: ops}, FRAMEWORKS["pytorch"])
    assert kernel_s(timeline, launches) == pytest.approx(measured("optimizer")[case]["kernel_s"], rel=0.1)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_states_take_what_they_took(case: tuple[str, str, str]) -> None:
    """Within 1 %: 8 bytes of AdamW in fp32; a byte and 4/256 of each state in blocks; rows and columns of Adafactor."""
    states = sum(implementation(case).state_bytes(one, types(case)) for one in parameters(case))
    workspace = profile().gpu_spec.blas_workspace_bytes if case[0] in WITH_PRODUCTS else 0
    assert states == pytest.approx(measured("optimizer")[case]["state_bytes"] - workspace, rel=0.01, abs=512 * 145)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_step_s_peak_is_what_it_was(case: tuple[str, str, str]) -> None:
    """Within 1 %: weights, gradients and states, and the workspace beside them."""
    row = measured("optimizer")[case]
    workspace = implementation(case).workspace_bytes(parameters(case), types(case))
    peak = row["weight_and_gradient_bytes"] + row["state_bytes"] + workspace
    assert peak == pytest.approx(row["peak_bytes"], rel=0.01)


@pytest.mark.parametrize(
    ("case", "copies"),
    [
        (("adamw", "foreach", "fp32"), 4 * 1_038_811_136),  # the root of every second moment
        (("adamw", "fused", "fp32"), 0),
        (("adamw", "for_loop", "fp32"), 2 * 4 * 32064 * 2048),  # the root, and it over the correction
        (("adafactor", "for_loop", "fp32"), 4 * 32064 * 2048),  # the variance, which becomes the update
        (("muon", "for_loop", "fp32"), (4 + 2 + 2) * 32064 * 2048 + 2 * 2 * 2048**2),  # update, two iterates, two grams
        (("adamw_8bit", "torchao", "fp32"), 2 * (4 + 4 / 256) * 32064 * 2048),  # both new states, and their scales
    ],
)
def test_a_step_needs_that_much_beside_its_states(case: tuple[str, str, str], copies: float) -> None:
    """The largest tensor is the embedding's, 32,064 x 2,048; what the allocator rounds up is less than 5 MB."""
    row = measured("optimizer")[case]
    beside = row["peak_bytes"] - row["weight_and_gradient_bytes"] - row["state_bytes"]
    assert implementation(case).workspace_bytes(parameters(case), types(case)) == copies
    assert beside == pytest.approx(copies, abs=5e6)


def test_paged_states_are_not_the_allocator_s() -> None:
    """PyTorch still counts, of 8-bit states, the scales (4 bytes in 256 for both), norms in fp32 and two tables."""
    paged = measured("optimizer")["adamw_8bit", "bitsandbytes paged", "fp32"]["state_bytes"]
    whole = measured("optimizer")["adamw_8bit", "bitsandbytes", "fp32"]["state_bytes"]
    matrices = 1_038_745_600
    assert whole - paged == 2 * matrices
    assert paged == 2 * 4 * matrices / 256 + 2 * 4 * 32 * 2048 + 2 * 1024
