"""Captured layers under torch.compile: Inductor's kernels, what is kept, and the built-in models beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.captured import CapturedModel
from simulator.capturing.fused_classes import fused_kernel
from simulator.config import load_workload
from simulator.errors import InputError
from simulator.models import hardware_flops_per_step, layer, parameters
from simulator.program import Attention, Matmul, Memory, kernel_from_text
from tests.support.captured_llama import BATCH, FFN, HEADS, KV_HEADS, ROWS, SEQ, SIZES, WIDTH, llama
from tests.support.captured_modules import Block, Tiny, captured, workload

torch = pytest.importorskip("torch")
nn = torch.nn
if not torch.__version__.startswith("2.13."):
    pytest.skip("Inductor of another version is not known", allow_module_level=True)

#: Bytes of a row of hidden states, of the MLP's, and of keys, in 16 bits.
ROW, WIDE, KEYS = 2.0 * ROWS * WIDTH, 2.0 * ROWS * FFN, 2.0 * ROWS * WIDTH * KV_HEADS / HEADS
COMPILED = {"name": "pytorch", "compile": True}


@pytest.fixture(scope="module")
def compiled_llama() -> CapturedModel:
    module, tokens = llama()
    return simulator.capture(module, tokens, dtype="bf16", compile=True)


def kernels(model: CapturedModel, field: str) -> list[Any]:
    """Kernels of a layer in one of its passes, in their order."""
    return [kernel_from_text(one.kernel) for node in model.parts[1].nodes for one in getattr(node, field)]


def test_equal_layers_are_one_part_of_a_single_graph(compiled_llama: CapturedModel) -> None:
    assert (compiled_llama.layers, len(compiled_llama.parts[1].nodes)) == ((1, 1), 1)
    assert compiled_llama.compiled
    assert compiled_llama.one_piece == ""
    assert compiled_llama.unsplit


def test_a_forward_graph_has_one_kernel_between_two_products(compiled_llama: CapturedModel) -> None:
    """Kernels are the norm, the turn of queries and of keys, the sum with its norm, the gate, and the last sum.

    A norm also writes a number for each row in fp32, and reads its weight. The turn reads a sine and a cosine for each
    token and each element of a head.
    """
    fused = [kernel for kernel in kernels(compiled_llama, "forward") if isinstance(kernel, Memory)]
    number, weight, turns = 4.0 * ROWS, 2.0 * WIDTH, 2 * 2.0 * SEQ * WIDTH / HEADS
    assert [kernel.op for kernel in fused] == ["rms_norm", "activation", "activation", "rms_norm", *["activation"] * 2]
    assert [(kernel.read_bytes, kernel.write_bytes) for kernel in fused] == [
        (ROW + weight, ROW + number),
        (ROW + turns, ROW),
        (KEYS + turns, KEYS),
        (2 * ROW + weight, ROW + number),
        (2 * WIDE, WIDE),
        (3 * ROW, ROW),
    ]


def test_products_and_attention_are_left_to_libraries(compiled_llama: CapturedModel) -> None:
    """Each of seven weights has a product forward, and two backward."""
    for field in ("forward", "input_grad", "weight_grad"):
        matmuls = [kernel for kernel in kernels(compiled_llama, field) if isinstance(kernel, Matmul)]
        assert len(matmuls) == 7
    attention = [kernel for kernel in kernels(compiled_llama, "input_grad") if isinstance(kernel, Attention)]
    assert [kernel.backward for kernel in attention] == [True]


def test_kernels_are_named_by_the_module_whose_weight_they_read(compiled_llama: CapturedModel) -> None:
    node = compiled_llama.parts[1].nodes[0]
    names = {one.name for field in ("forward", "input_grad", "weight_grad") for one in getattr(node, field)}
    assert {"down mm", "down mm bwd", "down mm wgrad", "triton fused__unsafe_view_mul_silu"} <= names
    assert {weight.name: weight.gradient for weight in node.weights}["gate.weight"] == "gate mm wgrad"


def test_a_compiled_llama_is_the_built_in_one(compiled_llama: CapturedModel, tmp_path: Path) -> None:
    """A layer keeps as much, and the deviations of two norms and 24 bytes of attention's seeds.

    Products of one input are apart here and joined there, and the norm before the head is not compiled here.
    """
    job = workload(compiled_llama, tmp_path, training={"global_batch": BATCH}, framework=COMPILED)
    training = {"seq": SEQ, "micro_batch": BATCH, "global_batch": BATCH, "loss": {"name": "eager"}}
    built_in = load_workload({"model": SIZES, "training": training, "cluster": "dgx_h100", "framework": COMPILED})
    assert parameters(job) == parameters(built_in)
    assert hardware_flops_per_step(job) == hardware_flops_per_step(built_in)
    assert layer(job).saved_bytes - layer(built_in).saved_bytes == 2 * 4 * ROWS + 24
    steps = [simulator.run(one).to_dict()["step_time_s"] for one in (job, built_in)]
    assert steps[0] == pytest.approx(steps[1], rel=0.03)


def test_a_workload_compiles_what_was_recorded_so(compiled_llama: CapturedModel, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"framework\.compile: the captured model was recorded otherwise"):
        workload(compiled_llama, tmp_path)
    with pytest.raises(InputError, match=r"fix: +convert its layers by torchao\.float8"):
        workload(compiled_llama, tmp_path, framework=COMPILED, training={"fp8": "torchao_tensorwise"})
    with pytest.raises(InputError, match=r"parallelism\.tp"):
        workload(compiled_llama, tmp_path, framework=COMPILED, parallelism={"tp": 2})


def test_compiled_layers_are_sharded_piped_and_recomputed(compiled_llama: CapturedModel, tmp_path: Path) -> None:
    """Recomputation runs the forward graph once more: 4/3 of a layer's products."""
    layouts = [
        {"parallelism": {"dp": 8, "zero": 3}, "training": {"global_batch": 32}},
        {"parallelism": {"pp": 2}, "training": {"global_batch": 16, "recompute": "full"}},
    ]
    sharded, piped = (workload(compiled_llama, tmp_path, framework=COMPILED, **one) for one in layouts)
    assert all(simulator.run(one).to_dict()["step_time_s"] > 0 for one in (sharded, piped))
    forward = sum(one.flops for one in kernels(compiled_llama, "forward"))
    again = hardware_flops_per_step(piped) / 4 - hardware_flops_per_step(sharded) / 8
    assert again == 2 * forward


def test_dropout_is_drawn_inside_the_sum_that_follows() -> None:
    """The kernel reads what is dropped, the other addend and a seed. It writes the sum, and a byte of mask each."""
    model = captured(Tiny(drop=0.1), compile=True)
    elements = 2 * 16 * 64
    dropping = [kernel for kernel in kernels(model, "forward") if isinstance(kernel, Memory) and kernel.op == "dropout"]
    assert [(one.read_bytes, one.write_bytes, one.elements) for one in dropping] == [
        (2 * 2.0 * elements + 8, 3.0 * elements, elements)
    ]


def test_a_module_without_lists_is_compiled_whole() -> None:
    model = captured(Block(), torch.zeros(2, 16, 64), compile=True)
    assert (model.layer_list, len(model.layers)) == ("", 1)
    assert [kernel.op for kernel in kernels(model, "forward") if isinstance(kernel, Memory)] == ["norm", "activation"]


@pytest.mark.parametrize(
    ("operations", "row", "narrow", "op"),
    [
        ({"abs", "max"}, 64, set(), "fp8_amax"),
        ({"abs", "max", "silu"}, 64, set(), "fp8_amax_made"),
        ({"abs", "max", "clamp", "reciprocal"}, 64, set(), "fp8_scale"),
        ({"mul", "clamp", "_to_copy"}, 1, {False}, "fp8_cast"),
        ({"mul", "clamp", "_to_copy"}, 1, {True}, "fp8_turned"),
        ({"mul", "clamp", "_to_copy"}, 1, {True, False}, "fp8_both"),
        ({"mul", "clamp", "silu_backward"}, 1, {False}, "fp8_both"),
        ({"abs", "amax", "clamp"}, 64, {False}, "fp8_rows"),
        ({"abs", "amax", "clamp"}, 64, {True, False}, "fp8_both_rows"),
        ({"mul", "reciprocal"}, 1, set(), "fp8_rescale"),
        ({"abs", "max", "rsqrt"}, 64, set(), "rms_norm"),
        ({"_log_softmax"}, 64, set(), "loss"),
        ({"mul", "tanh"}, 1, set(), "gelu"),
    ],
)
def test_classes_follow_from_operations(operations: set[str], row: int, narrow: set[bool], op: str) -> None:
    kernel = fused_kernel(
        operations, read=4.0, written=2.0, elements=64, row=row, dtype="bf16", backward=False, narrow=narrow
    )
    assert kernel.op == op


def test_what_cannot_be_compiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="are not put beside compiled layers"):
        captured(Tiny(), compile=True, adapters={"rank": 4, "targets": ["qkv"]})
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    with pytest.raises(InputError, match="Inductor of another version"):
        captured(Tiny(), compile=True)


class _Product(torch.autograd.Function):
    """A product in 8 bits with a scale for each tensor, found anew, as torchao's ``Float8Linear`` has forward."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        scales = [448.0 / torch.max(torch.abs(one)).float().clamp(min=1e-12) for one in (x, weight)]
        narrow = [
            (one * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            for one, scale in zip((x, weight), scales, strict=True)
        ]
        a, b = (scale.reciprocal() for scale in scales)
        return torch._scaled_mm(narrow[0], narrow[1].t(), a, b, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class _Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4096, 2048))

    def forward(self, x: Any) -> Any:
        return _Product.apply(x, self.weight)


def test_products_in_8_bits_have_their_casts_beside_them() -> None:
    """The largest magnitude of either operand takes two kernels; its cast from 16 bits to 8 takes one."""
    model = captured(_Narrow(), torch.zeros(4096, 2048), compile=True)
    forward = kernels(model, "forward")
    casts = [one for one in forward if isinstance(one, Memory)]
    assert sorted(one.op for one in casts) == sorted(["fp8_amax", "fp8_scale", "fp8_cast"] * 2)
    assert {one.write_bytes for one in casts if one.op == "fp8_cast"} == {4096.0 * 2048}
    products = [one for one in forward if isinstance(one, Matmul)]
    assert products == [Matmul(4096, 4096, 2048, dtype="fp8", out_dtype="bf16", scaling="tensor")]


def test_a_gpu_without_units_for_8_bits_is_refused(tmp_path: Path) -> None:
    model = captured(_Narrow(), torch.zeros(4096, 2048), compile=True)
    assert model.scales_of_8_bits == {"tensor"}
    with pytest.raises(InputError, match=r"model\.captured: a100-sxm-80gb has no matrix units for 8 bits"):
        workload(model, tmp_path, framework=COMPILED, training={"global_batch": 4096}, cluster="dgx_a100")
