"""Memory of a linear layer's backward pass, and what it keeps, by the way in which its weight is split.

The layer makes y of x in bf16. A rank has 32 tokens of both, x with 80 columns and y with 48.
"""

from __future__ import annotations

from typing import Any

from simulator.models.linear import linear
from simulator.models.shapes import shapes
from simulator.operations.nodes import Node
from tests.support.frameworks import MEGATRON
from tests.support.grids import every_pair
from tests.support.layers import LLAMA, make

TOKENS, N, K = 32, 48, 80
X, Y, W = 2 * TOKENS * K, 2 * TOKENS * N, 2 * N * K


def node(split: str, *, cached: bool = True, tp: int = 2, framework: Any = MEGATRON, **settings: Any) -> Node:
    work = make(TOKENS, 1, 64, 4, tp=tp, framework=framework, precision="bf16", **settings)
    return linear(shapes(work), "mlp", "fc1", N, K, split=split, saved="mlp.normed", cached=cached)


@every_pair(
    {
        "split": ["column", "row", "none"],
        "sequence_parallel": [False, True],
        "fused": [False, True],
        "cached": [False, True],
    }
)
def test_backward_holds_gradients_of_both_ends_and_what_is_gathered(
    split: str, sequence_parallel: bool, fused: bool, cached: bool
) -> None:
    """Gradients of x and y, of 32 x 80 and 32 x 48 elements of 2 bytes. A weight gradient that is handed to autograd is
    there, in the weight's 2 bytes, unless an empty tensor stands for it that stays: one per shape. A column-split layer
    keeps its own rows, half of x under sequence parallelism, and gathers x again for the weight gradient."""
    part = node(split, cached=cached, sequence_parallel=sequence_parallel, gradient_accumulation_fusion=fused)
    gathered = split == "column" and sequence_parallel
    stays = fused and cached
    assert part.output_grad_bytes == Y
    assert part.weight_grad_bytes == (X if gathered else 0) + (0 if stays else W)
    assert part.grad_bytes == X + Y + part.weight_grad_bytes
    assert [tensor.nbytes for tensor in part.placeholders] == ([W] if stays else [])
    assert [op.nbytes for op in part.gather] == ([X] if gathered else [])
    assert [(one.name, one.nbytes) for one in part.saved] == [("mlp.normed", X / 2 if gathered else X)]
    assert part.saved_for_weights == part.saved


def test_a_framework_that_keeps_gathered_rows_gathers_them_once() -> None:
    """torchtitan's column-split layers keep all 32 rows, and gather nothing for the weight gradient."""
    part = node("column", framework="torchtitan", sequence_parallel=True, dp=2, zero=3, **LLAMA)
    assert part.gather == ()
    assert [one.nbytes for one in part.saved] == [X]
    assert part.weight_grad_bytes == W
