"""Capturing modules of our own: what is recorded is derived by hand, or counted by PyTorch itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.capturing import entry
from simulator.capturing.parts import Parts
from simulator.errors import InputError
from simulator.models import embedding, hardware_flops_per_step, head, layer, parameters
from simulator.models.stage import stage_parts
from simulator.program import Attention, Matmul
from tests.support.captured_modules import BATCH, ROWS, TOKENS, WIDTH, Tiny, captured, ids, kernels, workload

torch = pytest.importorskip("torch")
nn = torch.nn


def test_equal_layers_are_one_part_and_a_shared_weight_counts_once(tmp_path: Path) -> None:
    # The table has 100 x 64 elements, a block 64 x (3 + 1) x 64 and a norm of 2 x 64.
    model = captured(Tiny())
    assert len(set(model.layers)) == 1
    assert model.parameters == 100 * WIDTH + 2 * (4 * WIDTH**2 + 2 * WIDTH)
    assert (model.vocab, model.hidden, model.heads, model.table) == (100, WIDTH, 4, "table.weight")
    job = workload(model, tmp_path, parallelism={"pp": 2})
    assert parameters(job) == model.parameters
    assert sum(weight.copied for weight in head(job).weights) == 1  # each end of the pipeline has the table


def test_parts_may_be_asked_for_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last part reads the table of the first one, to which it stays tied.
    in_order = captured(Tiny())

    class LastFirst(Parts):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.part(self.sections.behind)

    monkeypatch.setattr(entry, "Parts", LastFirst)
    assert captured(Tiny()) == in_order


def test_a_layer_keeps_what_its_operations_read_again(tmp_path: Path) -> None:
    # In 2 bytes: the norm's input and output, queries, keys and values in one tensor, and the context. In 4 bytes: mean
    # and deviation of each row, the logarithm of each softmax. Two seeds of attention are 16 + 8 bytes.
    one = 2 * ROWS * WIDTH
    part = layer(workload(captured(Tiny()), tmp_path))
    assert part.saved_bytes == 2 * one + 3 * one + one + 2 * 4 * ROWS + 4 * 4 * ROWS + 24


def test_dropout_keeps_a_mask_of_a_byte_for_each_element(tmp_path: Path) -> None:
    dry = layer(workload(captured(Tiny()), tmp_path)).saved_bytes
    wet = layer(workload(captured(Tiny(0.1)), tmp_path)).saved_bytes
    assert wet == dry + ROWS * WIDTH


def test_weight_gradients_are_apart_from_input_gradients() -> None:
    # Every product has one for its input and one for its weight.
    products = kernels(captured(Tiny()), Matmul)
    assert [sum(one.role == role for one in products) for role in ("fwd", "dgrad", "wgrad")] == [3, 3, 3]
    assert all(one.k == ROWS for one in products if one.role == "wgrad")
    assert [(one.causal, one.backward) for one in kernels(captured(Tiny()), Attention)] == [(True, False), (True, True)]


def test_flops_of_convolutions_are_those_that_pytorch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 12 * 12, 5),
    ).to("meta")
    images = torch.zeros(BATCH, 3, 16, 16, device="meta")
    with FlopCounterMode(display=False) as counter:
        net(images).sum().backward()
    model = simulator.capture(net, images)
    assert sum(one.flops for one in kernels(model, Matmul)) == counter.get_total_flops()
    assert (model.dtype, model.seq, model.micro_batch, len(model.layers)) == ("fp32", 1, BATCH, 6)


def test_a_grouped_convolution_is_a_product_for_each_group() -> None:
    # 2 images of 6 x 6 places; each of 4 groups has 2 channels out of 2 x 3 x 3 numbers. The images have no gradient.
    model = simulator.capture(nn.Conv2d(8, 8, 3, groups=4, bias=False), torch.zeros(BATCH, 8, 8, 8))
    sizes = [(one.batch, one.m, one.n, one.k) for one in kernels(model, Matmul)]
    assert sizes == [(4, 72, 2, 18), (4, 2, 18, 72)]


def test_functions_with_their_own_gradient_are_recorded() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = ctx.saved_tensors
            return grad @ weight.t(), x.t() @ grad

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 4))

        def forward(self, x: Any) -> Any:
            return Twice.apply(x, self.weight)

    model = captured(Own(), torch.zeros(3, 8, requires_grad=True))
    assert [(one.m, one.n, one.k, one.role) for one in kernels(model, Matmul)] == [
        (3, 4, 8, "fwd"),
        (3, 8, 4, "dgrad"),
        (8, 4, 3, "wgrad"),
    ]


def test_rms_norm_is_a_kernel_each_way() -> None:
    model = captured(nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), torch.zeros(ROWS, WIDTH))
    names = [one.name for node in model.parts[model.layers[0]].nodes for one in (*node.forward, *node.weight_grad)]
    assert names == ["fused_rms_norm", "fused_rms_norm_backward weight wgrad"]


def test_the_class_of_a_kernel_follows_from_the_order_of_its_tensors() -> None:
    class Kinds(nn.Linear):
        def forward(self, x: Any) -> Any:
            x = super().forward(x)
            table = torch.ones(TOKENS, WIDTH, dtype=x.dtype, device=x.device)
            x = x * self.bias * x[..., :1] * table
            return x + x, -x[..., :8], x.float()

    model = captured(Kinds(WIDTH, WIDTH), torch.zeros(BATCH, TOKENS, WIDTH))
    nodes = model.parts[model.layers[0]].nodes
    kinds = [one.kernel.split()[1] for node in nodes for one in node.forward if "memory" in one.kernel]
    assert kinds == [f"op={kind}" for kind in ("zero", "bias", "strided", "rope", "residual", "strided", "upcast")]


def test_values_that_the_module_counts_itself_are_known() -> None:
    class Counts(nn.Linear):
        def forward(self, x: Any) -> Any:
            positions = torch.arange(x.shape[0], device=x.device)
            return super().forward(x) if (positions[-1] == ROWS - 1).item() else x

    assert len(kernels(captured(Counts(WIDTH, WIDTH), torch.zeros(ROWS, WIDTH)), Matmul)) == 2


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.inner(x) if x.sum() > 0 else x


class Checkpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (Branches(), torch.zeros(2, WIDTH), "branches on, or reads, a value that only real data have"),
        (
            Checkpoints(),
            torch.zeros(2, WIDTH, requires_grad=True),
            "fix: .*without .*training.recompute: full",
        ),
        (nn.Linear(8, 8), torch.zeros(2, 9), "fails as it runs on tensors without data: RuntimeError"),
        (nn.Linear(8, 8).requires_grad_(False), torch.zeros(2, 8), "no output has a gradient"),
        (
            nn.Linear(8, 8, dtype=torch.float64),
            torch.zeros(2, 8, dtype=torch.float64),
            "is not simulated|not simulated",
        ),
        ("a module", ids(), "is no torch.nn.Module"),
        (nn.Linear(8, 8), {}, "no tensor with a batch dimension"),
        (nn.Linear(8, 8), torch.zeros(0, 8), "a tensor without elements"),
    ],
)
def test_what_cannot_be_recorded_is_refused_in_a_sentence(module: Any, inputs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulator.capture(module, inputs)


def test_the_module_is_left_as_it_was() -> None:
    module = Tiny(0.1).eval()
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    captured(module)
    assert not any(one.training for one in module.modules())
    assert all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())
    assert module.table.weight.grad is None


def test_without_pytorch_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"needs PyTorch[\s\S]*pip install"):
        simulator.capture(object(), ())


PLAN = {"blocks.*.qkv": "colwise", "blocks.*.out": "rowwise"}


def test_tensor_parallel_ranks_share_what_lies_between_split_layers(tmp_path: Path) -> None:
    # qkv has 192 columns, of which each of 2 ranks has 96, and 2 of the 4 heads. The output is summed, as is the
    # gradient of the input: an all-reduce of 2 bytes x 32 x 64 each way.
    job = workload(captured(Tiny(), tp_plan=PLAN), tmp_path, parallelism={"tp": 2})
    part = layer(job)
    products = [op.kernel for op in part.forward if isinstance(getattr(op, "kernel", None), Matmul)]
    assert [(one.n, one.k) for one in products] == [(3 * WIDTH // 2, WIDTH), (WIDTH, WIDTH // 2)]
    sums = [op.nbytes for op in (*part.forward, *part.backward) if not hasattr(op, "kernel")]
    assert sums == [2 * ROWS * WIDTH] * 2
    assert [weight.shape for weight in part.weights if weight.sharded_over] == [(96, 64), (64, 32)]
    whole = sum(op.kernel.flops for op in layer(workload(captured(Tiny()), tmp_path)).forward)
    assert sum(op.kernel.flops for op in part.forward if hasattr(op, "kernel")) == whole / 2


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 4},
        {"dp": 4, "zero": 3},
        {"dp": 4, "zero": 1},
        {"pp": 2, "dp": 2},
        {"pp": 2, "schedule": "zb_h1"},
        {"tp": 2, "dp": 2},
    ],
    ids=str,
)
def test_a_captured_model_plays_in_every_layout(layout: dict[str, Any], tmp_path: Path) -> None:
    figures = simulator.run(workload(captured(Tiny(), tp_plan=PLAN), tmp_path, parallelism=layout)).to_dict()
    # Forward and backward: 6 FLOPs for each token and element of a product, 12 s^2 h for each sequence and layer.
    products = 6 * (2 * 4 * WIDTH**2 + 100 * WIDTH)
    assert figures["model_flops_per_step"] == 8 * TOKENS * (products + 2 * 12 * TOKENS * WIDTH)
    assert figures["memory"]["fits"]


@pytest.mark.parametrize("pp", [1, 3])
def test_layers_of_several_kinds_are_played_each(pp: int, tmp_path: Path) -> None:
    # Three linear layers of 8 x 8: 6 FLOPs for each of 8 rows and weight, 2 less where the input has no gradient.
    net = nn.ModuleDict({"layers": nn.Sequential(*(nn.Linear(8, 8, bias=bias) for bias in (False, True, False)))})
    net.layers[1].register_forward_hook(lambda _, __, output: output.relu())
    net.forward = lambda x: net.layers(x)  # type: ignore[method-assign]
    job = workload(captured(net, torch.zeros(BATCH, 8)), tmp_path, parallelism={"pp": pp})
    assert len(set(job.model.captured_model.layers)) == 3
    assert (
        hardware_flops_per_step(job) == 8 * (3 * 6 - 2) * 8 * 8 == simulator.run(job).to_dict()["model_flops_per_step"]
    )
    stages = [[op.name for part in stage_parts(job, stage) for op in part.forward] for stage in range(pp)]
    assert [name for names in stages for name in names].count("relu") == 1


def test_recomputed_layers_keep_their_input_alone(tmp_path: Path) -> None:
    part = layer(workload(captured(Tiny()), tmp_path, training={"recompute": "full"}))
    assert part.saved_bytes == 2 * ROWS * WIDTH
    assert [op.kernel for op in part.recompute] == [op.kernel for op in part.forward]


class Skips(Tiny):
    """A U-Net in small: what the embedding gives is added behind all layers."""

    def forward(self, ids: Any) -> Any:
        start = x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x + start)


def test_layouts_that_the_operations_do_not_allow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no chain: the model itself reads what table has made"):
        workload(captured(Skips()), tmp_path, parallelism={"pp": 2})
    with pytest.raises(InputError, match="captured without a plan"):
        workload(captured(Tiny()), tmp_path, parallelism={"tp": 2})
    with pytest.raises(InputError, match="a divisor of 4"):
        workload(captured(Tiny(), tp_plan=PLAN), tmp_path, parallelism={"tp": 8})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"head": "diagonal"}, r"tp_plan\['head'\]: is no style"),
        ({"block.*.qkv": "colwise"}, "is the name of no module"),
        ({"blocks.0": "colwise"}, r"splits no product[\s\S]*blocks.0.out, blocks.0.qkv"),
        ({"blocks.*.norm": "colwise"}, "splits no product"),
    ],
)
def test_a_plan_that_splits_nothing_is_refused_at_once(plan: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        captured(Tiny(), tp_plan=plan)


@pytest.mark.parametrize("asked", [0, -1, 8, True, 10**12])
def test_inputs_of_tokens_say_how_long_sequences_are(asked: int) -> None:
    with pytest.raises(InputError, match=rf"seq: is another than of the example inputs[\s\S]*allowed: {TOKENS}"):
        captured(Tiny(), seq=asked)


def test_tokens_of_other_inputs_are_a_size_of_the_forward_pass() -> None:
    # Images of 16 x 16 in patches of 4 x 4 are 16 tokens.
    net = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), nn.Linear(TOKENS, 4))
    images = torch.zeros(BATCH, 3, 16, 16)
    assert (captured(net, images).seq, captured(net, images, seq=TOKENS).seq) == (1, TOKENS)
    for asked in (0, -3, 17):
        with pytest.raises(InputError, match="seq: is no size of a tensor"):
            captured(net, images, seq=asked)


def test_positions_beyond_their_table_are_refused() -> None:
    class Positions(Tiny):
        def forward(self, ids: Any) -> Any:
            return self.head(self.table(torch.arange(101, device=ids.device)))

    with pytest.raises(InputError, match="table: reads row 100 of a table of 100 rows"):
        captured(Positions())


def test_the_ends_of_the_model_are_parts_of_their_own(tmp_path: Path) -> None:
    job = workload(captured(Tiny(), layers="blocks"), tmp_path)
    assert [op.name for op in embedding(job).forward] == ["table embedding"]
    assert [op.name for op in head(job).forward] == ["head mm"]
    with pytest.raises(InputError, match=r"allowed: 'blocks'"):
        captured(Tiny(), layers="block")
