"""Scores of an indexer, its choice among them, and the gradient of its own loss.

What is chosen are tokens (DeepSeek-V3.2, arXiv 2512.02556, section 2.1), or compressed pieces of tokens (DeepSeek-V4).
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute, StepPhase, Tiled
from simulator.units import FP32_BYTES

#: Bytes of a score, and of the number (int32) of what is chosen.
SCORE, NUMBER = FP32_BYTES, 4
#: Keys of a tile of scores.
TILE = 128


@dataclass(frozen=True)
class IndexScores:
    """Sizes of the scores of one micro-batch.

    ``heads`` of ``head_dim`` score ``keys`` of all sequences. Of the ``pairs`` of a query and a key before it, those
    ``chosen`` are attended to: at most ``choices`` of a query. ``attention_width`` is that of all heads of attention on
    this rank, ``attention_bytes`` what its queries and keys take.
    """

    heads: int
    head_dim: int
    keys: int
    pairs: float
    chosen: float
    choices: int
    attention_width: int
    attention_head_dim: int
    attention_bytes: float

    @property
    def width(self) -> int:
        """Width of all heads of the indexer."""
        return self.heads * self.head_dim


def index_scores(shapes: Shapes, sizes: IndexScores) -> Node:
    """Return the scores of all that stands before a query, the choice among them, and the gradient of its own loss.

    A score is a sum over heads. The gradient takes three products over what was chosen: its scores again, and the
    gradients of queries and of keys. What attention gave to it is computed again, over this rank's heads. That all of
    this runs in such kernels, each tensor read once, is assumed, and that a choice takes as long as a sum over its row.
    """
    inputs = float(shapes.element * (shapes.tokens * (sizes.width + sizes.heads) + sizes.keys * sizes.head_dim))
    numbers = float(NUMBER * shapes.tokens * sizes.choices)
    scores = SCORE * sizes.pairs
    attended = 2.0 * sizes.chosen * sizes.attention_width
    return Node(
        forward=(
            Compute(
                "mixer.scores",
                Tiled(2.0 * sizes.pairs * sizes.width, inputs, scores, TILE, sizes.head_dim, dtype=shapes.dtype),
                StepPhase.FORWARD,
            ),
            memory("F", "mixer.choice", "reduce", scores, numbers, "fp32"),
        ),
        input_grad=(
            Compute(
                "mixer.attended",
                Tiled(
                    attended,
                    sizes.attention_bytes + numbers,
                    SCORE * sizes.chosen,
                    TILE,
                    sizes.attention_head_dim,
                    dtype=shapes.dtype,
                ),
                StepPhase.BACKWARD,
            ),
            Compute(
                "mixer.scores bwd",
                Tiled(
                    6.0 * sizes.chosen * sizes.width,
                    inputs + numbers + SCORE * sizes.chosen,
                    inputs,
                    TILE,
                    sizes.head_dim,
                    backward=True,
                    dtype=shapes.dtype,
                ),
                StepPhase.BACKWARD,
            ),
        ),
        saved=(Tensor("mixer.index", inputs), Tensor("mixer.chosen", numbers)),
        forward_bytes=scores,
        grad_bytes=inputs + SCORE * sizes.chosen,
    )
