"""Kernels of single operations, whose bytes and sizes are derived from the shapes of their tensors."""

from __future__ import annotations

from typing import Any

import pytest

import simulator
from simulator.captured import CapturedNode
from simulator.capturing import recorder
from simulator.errors import InputError
from simulator.program import GroupedMatmul, Kernel, Matmul, Memory, kernel_from_text

torch = pytest.importorskip("torch")
nn = torch.nn
ROWS, WIDTH = 32, 64
IMAGES = (2, 8, 6, 5)
TABLE = 1000


def nodes(module: Any, inputs: Any) -> list[CapturedNode]:
    model = simulator.capture(module, inputs, dtype="bf16")
    return [node for number in (model.before, *model.layers, model.after) for node in model.parts[number].nodes]


def kernels(module: Any, inputs: Any, *passes: str) -> list[Kernel]:
    """Kernels of some passes, or of all."""
    chosen = passes or ("forward", "input_grad", "weight_grad")
    return [
        kernel_from_text(one.kernel) for node in nodes(module, inputs) for name in chosen for one in getattr(node, name)
    ]


def frozen(module: Any) -> Any:
    return module.requires_grad_(False)


NORMS: dict[str, Any] = {
    "layer": lambda affine: (nn.LayerNorm(WIDTH, elementwise_affine=affine), (ROWS, WIDTH)),
    "group": lambda affine: (nn.GroupNorm(2, 8, affine=affine), IMAGES),
    "rms": lambda affine: (nn.RMSNorm(WIDTH, elementwise_affine=affine), (ROWS, WIDTH)),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("weights", ["trained", "frozen", "none"])
@pytest.mark.parametrize("follows", [True, False], ids=["input follows", "input alone"])
def test_a_norm_has_the_gradients_that_are_wanted(norm: str, weights: str, follows: bool) -> None:
    # A gradient of the input is wanted where the input has one, those of the weights where they are trained.
    module, shape = NORMS[norm](weights != "none")
    module = frozen(module) if weights == "frozen" else module
    inputs = torch.zeros(shape, requires_grad=follows)
    behind = nn.Sequential(module, nn.Linear(shape[-1], 3))
    seen = [
        sum(isinstance(one, Memory) and "norm_bwd" in one.op for one in kernels(behind, inputs, name))
        for name in ("input_grad", "weight_grad")
    ]
    assert seen == [int(follows), int(weights == "trained")]


@pytest.mark.parametrize(
    ("module", "shape", "elements"),
    [
        (nn.LayerNorm((6, 5)), IMAGES, 6 * 5),
        (nn.RMSNorm((6, 5)), IMAGES, 6 * 5),
        (nn.GroupNorm(2, 8), IMAGES, 8 // 2 * 6 * 5),
        (nn.BatchNorm2d(8), IMAGES, 0),  # its means lie across images
        (nn.Softmax(dim=1), IMAGES, 8),
        (nn.LogSoftmax(dim=1), IMAGES, 8),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_width_of_a_kernel_is_what_its_sums_go_over(module: Any, shape: tuple[int, ...], elements: int) -> None:
    chain = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), module)
    rows = [one for one in kernels(chain, torch.zeros(shape)) if isinstance(one, Memory) and one.op != "transposed"]
    assert len(rows) >= 2
    assert {one.width for one in rows if one.op.startswith(("norm", "rms", "softmax", "loss"))} == {elements}


def test_a_first_convolution_has_no_gradient_of_its_input() -> None:
    # 2 images of 30 pixels; its backward pass is a product for the weight, and the sum of the bias.
    (node,) = [node for node in nodes(nn.Sequential(nn.Conv2d(8, 8, 1)), torch.zeros(IMAGES)) if node.weight_grad]
    assert node.input_grad == ()
    product, bias = (kernel_from_text(one.kernel) for one in node.weight_grad)
    assert isinstance(product, Matmul)
    assert (product.m, product.n, product.k, product.role) == (8, 8, 60, "wgrad")
    assert bias.kind == "reduce"


class Table(nn.Module):
    """Rows of a table, read by one of PyTorch's operations."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.weight, self.read = nn.Parameter(torch.empty(TABLE, WIDTH)), read

    def forward(self, ids: Any) -> Any:
        return self.read(self.weight, ids)


READS = {
    "index": lambda table, ids: table[ids],
    "index_select": lambda table, ids: table.index_select(0, ids),
    "gather": lambda table, ids: table.gather(0, ids[:, None].expand(-1, WIDTH)),
}


@pytest.mark.parametrize("read", READS)
def test_rows_of_a_table_are_read_and_added_alone(read: str) -> None:
    # Rows of 64 elements of 2 bytes, and an index of 8 bytes for each row. The gradient is cleared whole, once.
    rows, whole = 2.0 * ROWS * WIDTH, 2.0 * TABLE * WIDTH
    ids = torch.zeros(ROWS, dtype=torch.long)
    memory = [one for one in kernels(Table(READS[read]), ids) if isinstance(one, Memory)]
    assert [(one.op, one.read_bytes, one.write_bytes) for one in memory if one.op != "transposed"] == [
        ("embedding", rows + 8 * ROWS, rows),
        ("zero", 0.0, whole),
        ("embedding_bwd", rows, rows),
    ]


class GroupedExperts(nn.Module):
    """Two experts, half of the rows each, in one grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.empty(2, WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        ends = torch.arange(1, 3, device=x.device, dtype=torch.int32) * (ROWS // 2)
        return torch._grouped_mm(self.first(x), self.weight, offs=ends)


def test_a_weight_knows_the_grouped_product_that_makes_its_gradient() -> None:
    # Kinds of weights, and what adds gradients up, are told by that product: it is a matrix, and no vector.
    (node,) = [node for node in nodes(GroupedExperts(), torch.zeros(ROWS, WIDTH)) if "grouped" in str(node.forward)]
    (weight,), (wgrad,) = node.weights, node.weight_grad
    assert isinstance(kernel_from_text(wgrad.kernel), GroupedMatmul)
    assert weight.gradient == wgrad.name != ""


class Chances(nn.Linear):
    """A branch on what is different each time."""

    def __init__(self, chance: Any) -> None:
        super().__init__(WIDTH, WIDTH)
        self.chance = chance

    def forward(self, x: Any) -> Any:
        numbers = torch.arange(8.0, device=x.device)
        return super().forward(x) if self.chance(numbers).sum().item() > 14 else x


@pytest.mark.parametrize(
    ("chance", "why"),
    [
        (lambda x: nn.functional.dropout(x, 0.5), "chance decides"),
        (lambda x: x.new_empty(8), "only real data have"),
        (lambda x: x.clone().exponential_(), "chance decides"),
    ],
    ids=["dropout", "new_empty", "exponential_"],
)
def test_a_branch_on_chance_is_refused(chance: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        simulator.capture(Chances(chance), torch.zeros(ROWS, WIDTH))


def test_a_fault_of_ours_is_not_laid_at_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "launches", lambda call: call.nothing)
    with pytest.raises(AssertionError, match="a fault of the simulator"):
        simulator.capture(nn.Linear(WIDTH, WIDTH), torch.zeros(ROWS, WIDTH))
