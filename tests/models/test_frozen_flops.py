"""FLOPs of models that are trained in part: 2 of each weight and token, as many again for each gradient there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator import models
from simulator.config import Workload
from tests.support.small_llama import ALL, HEAD_DIM, HEADS, HIDDEN, LAYERS, MATRICES, SEQ, SIZES, VOCAB, adapted, load

#: Of a step of 8 sequences.
TOKENS = 8 * SEQ
TABLE = VOCAB * HIDDEN
LAYER = MATRICES // LAYERS
QKV = sum(SIZES[name][0] * SIZES[name][1] for name in "qkv")
OUT = HEADS * HEAD_DIM * HIDDEN
#: Attention of a layer for each token: scores and context are products of HEADS * HEAD_DIM with SEQ keys.
CORE = 2 * 2 * SEQ * HEADS * HEAD_DIM


def per_token(work: Workload) -> float:
    return models.model_flops_per_step(work) / TOKENS


def a_and_b(*targets: str, rank: int = 4) -> tuple[int, int]:
    """Elements of A and of B beside the products of ``targets`` in a layer."""
    return rank * sum(SIZES[name][1] for name in targets), rank * sum(SIZES[name][0] for name in targets)


@pytest.mark.parametrize("pp", [1, 3])
@pytest.mark.parametrize(
    ("freeze", "expected"),
    [
        # Norms come first, so that all that is frozen passes gradients on: 4, and 6 of the table.
        (["layers 1-1"], 6 * (2 * LAYER + TABLE) + 4 * LAYER + 3 * LAYERS * CORE),
        # The first layer runs forward alone. The second begins with a norm that is trained.
        (["embedding", "layers 0-0"], 2 * LAYER + CORE + 6 * (2 * LAYER + TABLE) + 3 * 2 * CORE),
        # The last norm is trained: only through the frozen head goes a gradient.
        (["layers", "embedding", "head"], 2 * MATRICES + LAYERS * CORE + 4 * TABLE),
        # The head has a gradient and passes none on.
        (["layers", "embedding", "norms"], 2 * MATRICES + LAYERS * CORE + 4 * TABLE),
        # Queries, keys and values of the first layer are trained and have no gradient to pass on. All behind them is
        # reached.
        (["embedding", "norms"], 6 * (MATRICES + TABLE) - 2 * QKV + 3 * LAYERS * CORE),
        # As before, in the MLP: what comes before it in the first layer runs forward alone.
        (
            ["embedding", "norms", "attention"],
            (2 + 2 * 4) * (QKV + OUT) + 6 * LAYERS * (LAYER - QKV - OUT) - 2 * 2 * 128 * HIDDEN + 6 * TABLE + 7 * CORE,
        ),
    ],
)
def test_nothing_before_the_first_trained_weight_has_a_gradient(freeze: list[str], expected: int, pp: int) -> None:
    """Whatever the layout: a stage behind the first gives gradients back, of which the mathematics needs none."""
    work = load(freeze=freeze, parallelism={"pp": pp})
    assert per_token(work) == pytest.approx(expected, rel=1e-12)
    least = models.model_flops_per_step_causal(work)
    assert least <= models.hardware_flops_per_step(work) * (1 + 1e-12)


def test_adapters_of_the_first_layer_end_the_backward_pass() -> None:
    """4 of frozen products and 6 of adapters; but queries, keys, values and their A take no gradient of their input."""
    a, b = a_and_b(*ALL)
    first_a, _ = a_and_b("q", "k", "v")
    work = load(adapters=adapted(*ALL))
    products = 4 * (MATRICES + TABLE) - 2 * QKV + 6 * LAYERS * (a + b) - 2 * first_a
    assert per_token(work) == pytest.approx(products + 3 * LAYERS * CORE, rel=1e-12)


def test_attention_before_the_first_adapter_runs_forward_alone() -> None:
    """Adapters stand beside the output's product: in the first layer this, its A and all before pass nothing on."""
    a, b = a_and_b("o")
    work = load(adapters=adapted("o"))
    products = 4 * (MATRICES + TABLE) - 2 * (QKV + OUT) + 6 * LAYERS * (a + b) - 2 * a
    assert per_token(work) == pytest.approx(products + (3 * LAYERS - 2) * CORE, rel=1e-12)


def test_attention_that_was_recorded_without_a_backward_pass_counts_once(tmp_path: Path) -> None:
    """Table and first block are frozen: 2 of its weights and 1 attention, where the second block and the head have 6
    and 3. A row has 4 w^2 weights in a block, attention 4 t w: 8 samples of t rows."""
    torch = pytest.importorskip("torch")
    from tests.support import captured_modules as small

    model: Any = small.Tiny()
    model.head.weight = torch.nn.Parameter(model.table.weight.detach().clone())
    for frozen in (model.table, model.blocks[0]):
        frozen.requires_grad_(False)
    work = small.workload(small.captured(model), tmp_path)
    block, core, rows = 4 * small.WIDTH**2, 4 * small.TOKENS * small.WIDTH, 8 * small.TOKENS
    expected = rows * ((2 + 6) * block + (1 + 3) * core + 6 * 100 * small.WIDTH)
    assert models.model_flops_per_step(work) == pytest.approx(expected, rel=1e-12)
    assert models.model_flops_per_step_causal(work) <= models.hardware_flops_per_step(work)
