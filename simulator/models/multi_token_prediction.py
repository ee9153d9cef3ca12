"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules that predict later tokens."""

from __future__ import annotations

from dataclasses import replace

from simulator.config import Workload
from simulator.models.layer import layer
from simulator.models.linear import linear
from simulator.models.norms import norm
from simulator.models.parts import Part, part_of
from simulator.models.shapes import FrameworkShapes, shapes
from simulator.models.vocabulary import embedding, head
from simulator.operations.nodes import Node, Ops, comm, memory
from simulator.operations.shapes import ANY_SEAT, ANY_TURN, Seat, Turn
from simulator.operations.weights import tie


def predictor(workload: Workload, number: int, seat: Seat = ANY_SEAT, turn: Turn = ANY_TURN) -> tuple[Part, ...]:
    """Return module ``number`` of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    The embedding of later tokens is joined with the last layer's output, and a layer of the module's own and the loss
    follow. Embedding table and vocabulary projection are the model's; a rank that does not hold the table already has a
    copy of it.
    """
    table = embedding(workload, turn)
    copied = not (number or workload.model.tied_embeddings or workload.parallelism.table_in_place)
    table = replace(table, weights=tuple(tie(weight, weight.name, copied=copied) for weight in table.weights))
    recompute = None if workload.training.recompute.layers is None else "none"
    place = workload.model.layers + number
    sizes = shapes(workload, turn=turn, number=place)
    return (
        replace(table, name="mtp embedding"),
        part_of(sizes, "mtp projection", _projection(sizes), is_unit=True),
        layer(workload, recompute=recompute, seat=seat, turn=turn, number=place),
        replace(head(workload, turn, projection=False), name="mtp head"),
    )


def _projection(shapes: FrameworkShapes) -> tuple[Node, ...]:
    """Return the projection of a hidden state beside the embedding of a later token to the width of one.

    Each is normed before. As in Megatron-Core (transformer/multi_token_prediction.py) the projection is split by
    columns, whose results are gathered.
    """
    full = float(shapes.element * shapes.tokens * shapes.hidden)
    split, rows = shapes.tp > 1, shapes.sequence_parallel
    gather: Ops = (comm("all_gather", "mtp", full),) if split else ()
    scatter: Ops = (memory("F", "mtp.rows", "copy", shapes.row_bytes, shapes.row_bytes, shapes.dtype),) if rows else ()
    narrow: Ops = (
        (memory("B", "mtp.columns", "copy", full / shapes.tp, full / shapes.tp, shapes.dtype),) if split else ()
    )
    return (
        # The hidden state also goes to the model's own head.
        Node(
            input_grad=(
                memory("B", "mtp.hidden grad", "residual", 2 * shapes.row_bytes, shapes.row_bytes, shapes.dtype),
            )
        ),
        norm(shapes, "mtp.hidden norm", saved="mtp.hidden", residual=False),
        norm(shapes, "mtp.embedding norm", saved="mtp.embedding", residual=False),
        Node(
            forward=(memory("F", "mtp.join", "copy", 2 * shapes.row_bytes, 2 * shapes.row_bytes, shapes.dtype),),
            grad_bytes=4 * shapes.row_bytes,
        ),
        linear(
            shapes,
            "mtp",
            "projection",
            shapes.hidden // shapes.tp,
            2 * shapes.hidden,
            split="column",
            saved="mtp.joined",
        ),
        Node(
            forward=(*gather, *scatter),
            input_grad=(*(gather if rows else ()), *narrow),
            grad_bytes=2 * full,
        ),
    )
