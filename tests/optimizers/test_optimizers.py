"""Every optimizer, by every library that runs it: kernels, shares, states."""

from __future__ import annotations

from typing import get_args

import pytest

from simulator.config import load_workload
from simulator.hardware.kernels import MemoryClass
from simulator.optimizers import OPTIMIZERS, Implementation, UpdatedTensor, UpdateTypes
from simulator.optimizers.update import Kernels
from simulator.program import Memory

ON_GPU = [
    (name, library)
    for name, rule in OPTIMIZERS.items()
    for library, implementation in rule.implementations.items()
    if not implementation.on_host
]
#: Experts of one tensor, two matrices, and a vector too small for blocks.
SHAPES = ((4, 256, 128), (512, 256), (256, 512), (256,))


def implementation(name: str, library: str) -> Implementation:
    return OPTIMIZERS[name].implementations[library]


def kernels(name: str, library: str, share: float = 1.0, **types: str) -> Kernels:
    one = implementation(name, library)
    kinds = UpdateTypes(**({"weight": "fp32", "gradient": "fp32", "state": one.state_dtypes[0]} | types))
    parameters = [
        UpdatedTensor(shape, share) for shape in SHAPES if len(shape) > 1 or not OPTIMIZERS[name].matrices_only
    ]
    return tuple(op for kernels_of_round in one.rounds for op in kernels_of_round(parameters, kinds))


def traffic(ops: Kernels) -> float:
    return sum(op.kernel.bytes for op in ops if isinstance(op.kernel, Memory))


@pytest.mark.parametrize(("name", "library"), ON_GPU)
def test_kernels_are_of_classes_that_profiles_have(name: str, library: str) -> None:
    classes = {op.kernel.op for op in kernels(name, library) if isinstance(op.kernel, Memory)}
    assert classes
    assert classes <= set(get_args(MemoryClass))


@pytest.mark.parametrize(("name", "library"), ON_GPU)
def test_every_weight_is_read_and_written_and_every_gradient_read(name: str, library: str) -> None:
    """Weights that are twice as wide are 2 bytes more an element to read and 2 to write, gradients 2 to read."""
    elements = sum(
        UpdatedTensor(shape).elements for shape in SHAPES if len(shape) > 1 or not OPTIMIZERS[name].matrices_only
    )
    wide = traffic(kernels(name, library))
    for changed, least in (("weight", 2 * 2 * elements), ("gradient", 2 * elements)):
        assert wide - traffic(kernels(name, library, **{changed: "bf16"})) >= least


@pytest.mark.parametrize(("name", "library"), [case for case in ON_GPU if not OPTIMIZERS[case[0]].needs_whole])
def test_a_shard_takes_its_share(name: str, library: str) -> None:
    """Half a tensor is half the bytes, but where it is then too small for blocks."""
    whole, half = traffic(kernels(name, library)), traffic(kernels(name, library, 0.5))
    assert half == pytest.approx(whole / 2, rel=0.01)


@pytest.mark.parametrize("library", ["foreach", "fused", "for_loop"])
def test_a_read_only_state_is_only_read(library: str) -> None:
    """1-bit Adam's second moment: no pass writes it, and none is there for it alone."""
    every = {op.name: op.kernel for op in kernels("adamw", library)}
    left = {op.name: op.kernel for op in kernels("adamw", library, read_only="v")}
    assert set(every) - set(left) == (set() if library == "fused" else {"optimizer.square decay", "optimizer.addcmul"})
    elements = sum(UpdatedTensor(shape).elements for shape in SHAPES)
    written = {
        name: sum(kernel.write_bytes for kernel in some.values() if isinstance(kernel, Memory))
        for name, some in (("every", every), ("left", left))
    }
    assert written["every"] - written["left"] == 4 * elements * (1 if library == "fused" else 2)


def test_adam_has_no_pass_for_weight_decay() -> None:
    names = {rule: {op.name for op in kernels(rule, "foreach")} for rule in ("adam", "adamw")}
    assert names["adamw"] - names["adam"] == {"optimizer.decay"}


def test_kernels_of_one_tensor_are_counted() -> None:
    """Eight operations on four tensors, in eight kernels of four launches; multi-tensor kernels are launched once."""
    looped = [op.kernel.launches for op in kernels("adamw", "for_loop") if isinstance(op.kernel, Memory)]
    assert looped == [4] * 8
    assert [op.kernel.launches for op in kernels("adamw", "fused") if isinstance(op.kernel, Memory)] == [0]


def test_small_tensors_keep_states_in_fp32() -> None:
    """Two states of 256 elements are 8 bytes each; of 512 x 256 they are 2, and 8 bytes for 256.

    torchao keeps a table of 256 values for each state of a tensor that is quantised.
    """
    types = UpdateTypes("fp32", "fp32", "int8")
    states = {
        library: [
            implementation("adamw_8bit", library).state_bytes(UpdatedTensor(shape), types) for shape in SHAPES[1::2]
        ]
        for library in ("bitsandbytes", "torchao")
    }
    large, small = 2 * 512 * 256 * (1 + 4 / 256), 2 * 4 * 256
    assert states == {"bitsandbytes": [large, small], "torchao": [large + 2 * 1024, small]}


def test_adafactor_keeps_rows_and_columns() -> None:
    """Each of 4 experts has 256 + 128, a matrix 512 + 256, a vector as many as it has elements."""
    adafactor = implementation("adafactor", "for_loop")
    kept = [adafactor.state_bytes(UpdatedTensor(shape), UpdateTypes("fp32", "fp32", "fp32")) / 4 for shape in SHAPES]
    assert kept == [4 * 384, 768, 768, 256]


def test_states_have_a_type_that_the_library_has() -> None:
    """torchtitan keeps states in the weights' 16 bits, which bitsandbytes' Lion has not: they are fp32, and a workload
    that is written down says so."""
    changes = {
        "framework": "torchtitan",
        "parallelism.zero": 3,
        "training.optimizer": {"name": "lion", "master_weights": False},
    }
    workload = load_workload("llama3_8b_dgx_h100", changes)
    assert workload.training.optimizer.state_dtype == "fp32"
    assert load_workload(workload.model_dump(mode="json")) == workload
