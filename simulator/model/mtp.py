"""Multi-token prediction: what joins a module's two inputs (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from simulator.model.nodes import Node, Ops, comm, linear, memory, norm
from simulator.model.shapes import Shapes


def joined(z: Shapes) -> tuple[Node, ...]:
    """The hidden state and the embedding of a later token, each normed, side by side, and projected to one width.

    As in Megatron-Core (transformer/multi_token_prediction.py) the projection is split by columns, whose results are
    gathered.
    """
    full = float(z.element * z.tokens * z.hidden)
    split, rows = z.tp > 1, z.sequence_parallel
    gather: Ops = (comm("all_gather", "mtp", full),) if split else ()
    scatter: Ops = (memory("F", "mtp.rows", "copy", z.row_bytes, z.row_bytes, z.dtype),) if rows else ()
    narrow: Ops = (memory("B", "mtp.columns", "copy", full / z.tp, full / z.tp, z.dtype),) if split else ()
    return (
        # The hidden state also goes to the model's own head.
        Node(input_grad=(memory("B", "mtp.hidden grad", "residual", 2 * z.row_bytes, z.row_bytes, z.dtype),)),
        norm(z, "mtp.hidden norm", saved="mtp.hidden", residual=False),
        norm(z, "mtp.embedding norm", saved="mtp.embedding", residual=False),
        Node(
            forward=(memory("F", "mtp.join", "copy", 2 * z.row_bytes, 2 * z.row_bytes, z.dtype),),
            grad_bytes=4 * z.row_bytes,
        ),
        linear(z, "mtp", "projection", z.hidden // z.tp, 2 * z.hidden, split="column", saved="mtp.joined"),
        Node(
            forward=(*gather, *scatter),
            input_grad=(*(gather if rows else ()), *narrow),
            grad_bytes=2 * full,
        ),
    )
